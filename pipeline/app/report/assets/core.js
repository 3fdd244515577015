"use strict";
// Opening the data, making elements, and showing text that may be hostile.
const report = {};

/** Makes an element; strings become text nodes, never HTML. */
report.el = function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter(c => c != null).map(c => (c instanceof Node ? c : String(c))));
  return node;
};

const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\u2028\u2029]/gu;

/** Text with control, direction and other invisible characters written out; line breaks stay, marked. */
report.visible = function visible(text) {
  return text.replace(INVISIBLE, c => {
    const code = c.codePointAt(0);
    if (code === 10) return "⏎\n";
    if (code === 9) return "⇥";
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
};

const TYPES = {
  uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array,
  uint32: Uint32Array, int32: Int32Array, float32: Float32Array, float64: Float64Array,
};

/** Opens a packed blob: the header with `columns`, name → typed array. */
report.open = async function open(id) {
  const holder = document.getElementById(id);
  if (!holder) return null;
  const text = holder.textContent.trim();
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), c => c.charCodeAt(0));
  holder.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const length = new DataView(buffer).getUint32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  data.columns = {};
  for (const [name, [type, offset, count]] of Object.entries(data.arrays)) {
    data.columns[name] = new TYPES[type](buffer, 4 + length + offset, count);
  }
  return data;
};

/** A number with its sign (true minus), or "–" for none. */
report.signed = function signed(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  const text = Math.abs(value).toFixed(digits);
  return value === 0 || Number(text) === 0 ? text : (value > 0 ? "+" : "−") + text;
};

report.number = value => (value == null || Number.isNaN(value) ? "–" : String(Number(value.toPrecision(4))));

/** The class of a token or cell: p1 … p5 for positive, n1 … n5 for negative credit, "" for none. */
report.shade = function shade(value, scale) {
  if (!value || !scale) return "";
  const level = Math.min(5, Math.max(1, Math.ceil((5 * Math.abs(value)) / scale)));
  return (value > 0 ? "p" : "n") + level;
};
