"use strict";
// The rollout browser: filters, a windowed list, why a rollout has its credit, its tokens coloured by it, and the tree of the prompt.
(function () {
  const { el, visible, signed, number } = report;
  const TRAINED = 1, THOUGHT_END = 2, SEGMENT_END = 4, HAS_CREDIT = 8, HAS_RATIO = 16, HAS_ENTROPY = 32, HAS_LOGPROB = 64;
  const HEIGHT = 54, MOST_TOKENS = 3000;
  let data, c, runs, texts, prompts, size, asked, rows = [], current = -1, order = [], recorded = false, only = -1;
  const $ = id => document.getElementById(id);

  const creditOf = t => (c.credit ? (c.credit[t] / 32767) * data.scales.credit : 0);
  const rooted = (column, t, scale) => (column ? (column[t] / 255) ** 2 * scale : 0);
  // null where the run recorded none.
  const entropyOf = t => (c.flags[t] & HAS_ENTROPY ? rooted(c.entropy, t, data.scales.entropy) : null);
  const logprobOf = t => (c.flags[t] & HAS_LOGPROB ? -rooted(c.logprob, t, data.scales.logprob) : null);
  const textOf = i => (c.text[i] >= 0 ? data.texts[c.text[i]] : Array.from({ length: length(i) }, (_, k) => data.pieces[c.piece[c.offset[i] + k]]).join(""));
  const length = i => c.offset[i + 1] - c.offset[i];

  function index() {
    const low = data.pieces.map(p => p.toLowerCase());
    prompts = data.texts.map(t => t.toLowerCase());
    texts = new Array(c.run.length);
    for (let i = 0; i < texts.length; i++) {
      let text = c.text[i] >= 0 ? prompts[c.text[i]] : "";
      for (let t = c.offset[i]; t < c.offset[i + 1]; t++) text += low[c.piece[t]];
      texts[i] = text;
    }
    // Of each rollout its largest credit; of each prompt in how many iterations of a run it was asked.
    size = Float64Array.from(texts, (_, i) => { let most = 0; for (let t = c.offset[i]; t < c.offset[i + 1]; t++) if (c.flags[t] & TRAINED) most = Math.max(most, Math.abs(creditOf(t))); return most; });
    const seen = new Map();
    for (let i = 0; i < texts.length; i++) { const key = `${c.run[i]} ${c.prompt[i]}`; seen.set(key, (seen.get(key) || new Set()).add(c.iteration[i])); }
    asked = Uint32Array.from(texts, (_, i) => seen.get(`${c.run[i]} ${c.prompt[i]}`).size);
  }

  function verdict(i) {
    const code = c.correct[i];
    return code === 1 ? "right" : code === 0 ? "wrong" : code === 4 ? "no reward" : "invalid";
  }

  const bounds = () => ["iteration", "reward", "length", "credit"].map(n => {
    const read = (id, none) => { const v = $(id).value.trim(); return v === "" || Number.isNaN(Number(v)) ? none : Number(v); };
    return [n, read(`min-${n}`, -Infinity), read(`max-${n}`, Infinity)];
  }).filter(([, a, b]) => a > -Infinity || b < Infinity);

  function filter() {
    const begin = performance.now();
    const words = $("search").value.toLowerCase(), run = $("which-run").value, outcome = $("outcome").value;
    const limits = bounds();
    const value = { iteration: i => c.iteration[i], reward: i => c.reward[i], length, credit: i => c.mean_credit[i], size: i => size[i], asked: i => asked[i] };
    rows = [];
    for (let i = 0; i < c.run.length; i++) {
      if (run !== "" && c.run[i] !== Number(run)) continue;
      if (only >= 0 && c.prompt[i] !== only) continue;
      if (outcome !== "" && verdict(i) !== outcome) continue;
      let keep = true;
      for (const [n, a, b] of limits) { const v = value[n](i); if (!(v >= a && v <= b)) { keep = false; break; } }
      if (keep && (words === "" || texts[i].includes(words) || prompts[c.prompt[i]].includes(words))) rows.push(i);
    }
    const [by, way] = $("sort").value.split(" ");
    if (by !== "recorded") rows.sort((a, b) => ((value[by](a) || 0) - (value[by](b) || 0)) * (way === "up" ? 1 : -1) || a - b);
    order = new Int32Array(c.run.length).fill(-1);
    rows.forEach((i, place) => { order[i] = place; });
    $("count").textContent = `${rows.length.toLocaleString("en")} of ${c.run.length.toLocaleString("en")} rollouts${only >= 0 ? ", of one prompt" : ""}`;
    $("list").scrollTop = 0;
    paint();
    performance.measure("filter", { start: begin, end: performance.now() });
  }

  function paint() {
    const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 4);
    const last = Math.min(rows.length, first + Math.ceil(list.clientHeight / HEIGHT) + 8);
    const items = [el("div", { style: null, class: "fill", role: "presentation" })];
    items[0].style.height = `${rows.length * HEIGHT}px`;
    for (let place = first; place < last; place++) {
      const i = rows[place];
      const where = ` · ${length(i)} tokens · iteration ${c.iteration[i]} · ${visible(data.texts[c.node[i]])}${runs.length > 1 ? ` · ${visible(runs[c.run[i]])}` : ""}`;
      const item = el("div", { class: "item", role: "option", id: `r${i}`, "aria-selected": String(i === current), "aria-setsize": rows.length, "aria-posinset": place + 1 },
        el("div", {}, el("span", { class: c.correct[i] === 1 ? "ok" : "bad" }, `${c.correct[i] === 1 ? "✓" : "✗"} ${number(c.reward[i])}`), ` · credit ${signed(c.mean_credit[i], 2)}${c.episode[i] >= 0 ? ` · turn ${c.turn[i] + 1}` : ""}${where}`),
        el("div", { class: "sub" }, visible(texts[i].slice(0, 90)).replaceAll("\n", " ")));
      item.style.top = `${place * HEIGHT}px`;
      item.addEventListener("click", () => choose(i, true, true));
      items.push(item);
    }
    list.replaceChildren(...items);
    if (!rows.length) list.append(el("p", { class: "note pad", role: "option", "aria-selected": "false", "aria-disabled": "true" }, "No rollout matches; widen the filters."));
    if (current >= 0 && order[current] >= first && order[current] < last) list.setAttribute("aria-activedescendant", `r${current}`);
    else list.removeAttribute("aria-activedescendant");
  }

  /** Shows a rollout; `link` puts it into the page's address too. */
  function choose(i, scroll = true, link = false) {
    current = i;
    if (link) history.replaceState(null, "", address(i));
    const list = $("list"), place = order[i];
    if (scroll && place >= 0) {
      const top = place * HEIGHT;
      if (top < list.scrollTop) list.scrollTop = top;
      else if (top + HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + HEIGHT - list.clientHeight;
    }
    paint();
    detail(i);
  }

  function keys(event) {
    const page = Math.max(1, Math.floor($("list").clientHeight / HEIGHT) - 1);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[event.key];
    if (!step || !rows.length) return;
    event.preventDefault();
    const at = current >= 0 && order[current] >= 0 ? order[current] : -Math.sign(step);
    choose(rows[Math.min(rows.length - 1, Math.max(0, at + step))], true, true);
  }

  const address = i => `#rollout=${encodeURIComponent(runs[c.run[i]])}:${data.uid[i]}`;

  /** Opens the rollout that the page's address names; false when it names none. */
  function follow() {
    const found = /^#rollout=(.*):(\d+)$/.exec(location.hash);
    if (!found) return false;
    let name = found[1];
    try { name = decodeURIComponent(name); } catch { /* an odd address names no run */ }
    const i = data.uid.findIndex((uid, k) => uid === found[2] && runs[c.run[k]] === name);
    if (i < 0) {
      $("count").textContent += `; rollout ${found[2]} of ${visible(name)}, which the address names, is not in this page`;
      return false;
    }
    if (order[i] < 0) clear();
    choose(i);
    $("rollouts").scrollIntoView();
    return true;
  }

  const outcome = i => [
    el("span", { class: c.correct[i] === 1 ? "ok" : "bad" }, `${c.correct[i] === 1 ? "✓" : "✗"} reward ${number(c.reward[i])} (${verdict(i)})`),
    data.texts[c.detail[i]] ? `: ${visible(data.texts[c.detail[i]])}` : "", data.texts[c.answer[i]] ? ` · reference answer ${visible(data.texts[c.answer[i]])}` : "",
  ];

  const facts = i => [
    ["ended by", data.texts[c.finish[i]]], ["tokens", `${length(i)}, ${c.inherited[i]} of them inherited`], ["policy version", c.version[i] < 0 ? "not recorded" : String(c.version[i])],
    ["mean credit", `${signed(c.mean_credit[i])} over trained tokens`],
    ...(c.step[i] ? [["first error", `thought ${c.step[i]} (${data.texts[c.step_source[i]]})`]] : []), ["uid", data.uid[i]],
  ];

  function scaleOf(i) {
    if ($("scale").value === "run") return data.scales.credit;
    let most = 0;
    for (let t = c.offset[i]; t < c.offset[i + 1]; t++) most = Math.max(most, Math.abs(creditOf(t)));
    return most;
  }

  function tokenViews(i, from, to) {
    const scale = scaleOf(i), start = c.offset[i];
    const out = [];
    let body = null, sum = 0, number_ = 1;
    for (let t = start; t < start + from; t++) if (c.flags[t] & THOUGHT_END) number_++;
    const open = () => { body = el("div", { class: "body" }); sum = 0; };
    const close = () => { out.push(el("div", { class: "thought" }, el("div", { class: "no", title: "thought" }, String(number_)), body, el("div", { class: "sum", title: "summed credit of this thought" }, `Σ ${signed(sum, 2)}`))); };
    open();
    for (let t = start + from; t < start + to; t++) {
      const value = creditOf(t), flags = c.flags[t];
      const kind = flags & TRAINED ? report.shade(value, scale) : "off";
      body.append(el("span", { class: `t ${kind}${flags & SEGMENT_END && t + 1 < c.offset[i + 1] ? " cut" : ""}`, "data-t": t - start }, visible(data.pieces[c.piece[t]])));
      sum += flags & TRAINED ? value : 0;
      if (flags & THOUGHT_END) { close(); number_++; open(); }
    }
    if (body.childNodes.length) close();
    return out;
  }

  const known = (value, show) => (value === null ? "not recorded" : show(value));

  function describe(i, k) {
    const t = c.offset[i] + k, flags = c.flags[t];
    let thought = 1;
    for (let j = c.offset[i]; j < t; j++) if (c.flags[j] & THOUGHT_END) thought++;
    const credit = !(flags & HAS_CREDIT) ? "no credit recorded" : `credit ${signed(creditOf(t), 4)}${flags & TRAINED ? "" : " (not trained on)"}`;
    const ratio = flags & HAS_RATIO && c.ratio ? signed((c.ratio[t] / 32767) * data.scales.ratio, 4) : flags & HAS_RATIO ? "0" : recorded ? "not computed (the learner left this row out)" : "not recorded";
    return `Token ${k + 1} of ${length(i)}, thought ${thought}${k < c.inherited[i] ? ", inherited" : ""}: “${visible(data.pieces[c.piece[t]])}” · ${credit} · ` +
      `entropy ${known(entropyOf(t), v => `${v.toFixed(3)} nats`)} · log-prob ${known(logprobOf(t), v => signed(v, 3))} · log-ratio ${ratio}`;
  }

  function tokenBox(i) {
    const readout = el("div", { class: "readout", "aria-live": "polite", id: "readout" }, "Point at a token, or focus the text and move with the arrow keys.");
    const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "response, tokens coloured by credit; arrow keys move from token to token", "aria-describedby": "readout" });
    let shown = 0, at = -1, marked = null;
    const more = () => {
      const next = Math.min(length(i), shown + MOST_TOKENS);
      const views = tokenViews(i, shown, next);
      shown = next;
      box.querySelector("button")?.remove();
      box.append(...views);
      if (shown < length(i)) box.append(el("button", { type: "button", onclick: more }, `show ${Math.min(MOST_TOKENS, length(i) - shown).toLocaleString("en")} more of ${length(i).toLocaleString("en")} tokens`));
    };
    const move = (k, scroll) => {
      while (k >= shown && shown < length(i)) more();
      at = Math.min(length(i) - 1, Math.max(0, k));
      marked?.classList.remove("now");
      marked = box.querySelector(`[data-t="${at}"]`);
      if (!marked) return;
      marked.classList.add("now");
      if (scroll) marked.scrollIntoView({ block: "nearest" });
      readout.textContent = describe(i, at);
    };
    more();
    if (!length(i)) box.append(el("p", { class: "note" }, "an empty response"));
    box.addEventListener("pointerover", e => { const k = e.target.dataset?.t; if (k !== undefined) move(Number(k), false); });
    box.addEventListener("keydown", e => {
      const from = Math.max(at, 0);
      const to = { ArrowRight: at + 1, ArrowLeft: from - 1, ArrowDown: from + 10, ArrowUp: from - 10, Home: 0, End: length(i) - 1 }[e.key];
      if (to === undefined || e.target !== box || !length(i)) return;
      e.preventDefault();
      move(to, true);
    });
    return [box, readout];
  }

  const along = i => ({ field: "x", type: "quantitative", title: "token", scale: { domain: [0, length(i)], nice: false } });

  function creditStrip(i) {
    const values = [];
    for (let k = 0; k < length(i); k++) { const v = creditOf(c.offset[i] + k); if (v) values.push({ x: k, x2: k + 1, credit: v, sign: v > 0 ? "positive" : "negative" }); }
    if (!values.length) return el("p", { class: "note" }, "No token of this response has credit.");
    const place = el("div", { class: "chart" });
    report.chart(place, "credit of each token, as bars", () => ({
      height: 90, data: { values }, mark: { type: "rect", stroke: null },
      encoding: { x: along(i), x2: { field: "x2" }, y: { field: "credit", type: "quantitative", title: "credit" }, y2: { datum: 0 },
        color: { field: "sign", type: "nominal", legend: null, scale: { domain: ["positive", "negative"], range: [report.colors().plus, report.colors().minus] } },
        tooltip: [{ field: "x", title: "token from 0" }, { field: "credit", format: "+.4f" }] },
    }));
    return place;
  }

  function valueStrip(i) {
    const first = c.value_offset[i], many = c.value_offset[i + 1] - first;
    if (!many) return el("p", { class: "note" }, "No segment values are recorded for it.");
    const values = [{ x: 0, value: c.value[first] }];
    for (let k = 0, s = 0; k < length(i) && s + 1 < many; k++) if (c.flags[c.offset[i] + k] & SEGMENT_END) values.push({ x: k + 1, value: c.value[first + ++s] });
    values.push({ x: length(i), value: c.value[first + many - 1] });
    const place = el("div", { class: "chart" });
    report.chart(place, "value at segment boundaries, as a step line", () => ({
      height: 90, data: { values }, mark: { type: "line", interpolate: "step-after", strokeWidth: 2, color: report.colors().series[0], point: { color: report.colors().series[0] } },
      encoding: { x: along(i), y: { field: "value", type: "quantitative", title: "segment value" }, tooltip: [{ field: "x", title: "token" }, { field: "value", format: ".4f" }] },
    }));
    return place;
  }

  function tree(i) {
    const family = [];
    for (let j = 0; j < c.run.length; j++) if (c.run[j] === c.run[i] && c.iteration[j] === c.iteration[i] && c.problem[j] === c.problem[i]) family.push(j);
    const children = new Map();
    for (const j of family) { const p = c.parent[j]; children.set(p, [...(children.get(p) || []), j]); }
    const thoughts = (j, upTo) => { let n = 0; for (let t = c.offset[j]; t < c.offset[j] + upTo; t++) if (c.flags[t] & THOUGHT_END) n++; return n; };
    const label = j => {
      const kids = (children.get(j) || []).length;
      const what = c.parent[j] >= 0 ? `after ${thoughts(j, c.inherited[j])} kept thoughts (${c.inherited[j]} tokens)` : kids || c.step[j] ? "root" : "chain";
      const outcome = c.correct[j] === 4 ? (c.step[j] ? "failed" : "no reward") : `reward ${number(c.reward[j])} ${c.correct[j] === 1 ? "✓" : "✗"}`;
      return `${what}: ${outcome}, credit ${signed(c.mean_credit[j], 2)}${c.step[j] ? `, first error at thought ${c.step[j]} (${visible(data.texts[c.step_source[j]])})` : ""}`;
    };
    const node = (j, depth) => el("li", {}, el("button", { type: "button", "aria-current": String(j === i), onclick: () => store.choose(j) }, label(j)),
      children.has(j) && depth < 40 ? el("ul", {}, children.get(j).map(k => node(k, depth + 1))) : null);
    const roots = children.get(-1) || [];
    return el("details", { open: family.length <= 40 }, el("summary", {}, `${family.length} responses to this prompt in this iteration`), el("ul", { class: "tree" }, roots.map(j => node(j, 0))));
  }

  /** Whether a response continues another one, or is continued: its tree then comes first. */
  const reset = i => c.parent[i] >= 0 || c.parent.some(p => p === i);

  function detail(i) {
    const scroll = window.scrollY, why = data.texts[c.why[i]];
    $("detail").replaceChildren(
      el("h3", { tabindex: "-1" }, `Rollout ${data.uid[i]} of iteration ${c.iteration[i]}${runs.length > 1 ? ` of ${visible(runs[c.run[i]])}` : ""} `, el("a", { href: address(i), title: "the address of this rollout in this page" }, "link")),
      el("p", {}, outcome(i)),
      el("details", {}, el("summary", {}, "more about it"), el("dl", {}, facts(i).map(([k, v]) => [el("dt", {}, k), el("dd", {}, visible(v))]).flat())),
      el("h4", {}, "Why it has this credit"),
      why ? el("div", { class: "why", tabindex: "0", role: "group", "aria-label": "why it has this credit" }, visible(why).replaceAll("⏎\n", "\n")) : el("p", { class: "note" }, c.parent.some(p => p === i) ? "Responses below continue it from an earlier token; it is not trained on itself." : "Its credit is not recorded, or the component that gave it does not say why (Component.explain)."),
      ...report.turns(store, i),
      ...(reset(i) ? [el("h4", {}, "Resets and siblings"), tree(i)] : []),
      el("h4", {}, "Prompt"), el("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "prompt" }, visible(data.texts[c.prompt[i]])),
      el("h4", {}, "Response"), ...(c.text[i] >= 0 ? [el("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "recorded text" }, visible(data.texts[c.text[i]]))] : []),
      ...tokenBox(i), el("h4", {}, "Credit (blue raises a token, orange lowers it) and values along the response"), creditStrip(i), valueStrip(i), ...(reset(i) ? [] : [el("h4", {}, "Siblings"), tree(i)]));
    report.answers(store, i);
    window.scrollTo({ top: scroll });
  }

  /** The rollout to open first: a failure whose resets differ in reward, else a wrong response whose credit varies. */
  function story() {
    const mixed = new Map();
    for (let j = 0; j < c.run.length; j++) if (c.parent[j] >= 0) mixed.set(c.parent[j], (mixed.get(c.parent[j]) || new Set()).add(c.reward[j]));
    const varies = i => {
      let low = Infinity, high = -Infinity;
      for (let t = c.offset[i]; t < c.offset[i + 1]; t++) if (c.flags[t] & TRAINED) { low = Math.min(low, c.credit[t]); high = Math.max(high, c.credit[t]); }
      return high > low;
    };
    const rank = i => (mixed.has(i) && mixed.get(i).size > 1 ? 3 : verdict(i) !== "wrong" || !size[i] ? 0 : c.credit && varies(i) ? 2 : 1);
    let best = rows[0], most = -1;
    for (const i of rows) { const k = rank(i); if (k > most) { most = k; best = i; } if (k === 3) break; }
    return best;
  }

  function clear() {
    document.querySelectorAll(".filters input").forEach(x => { x.value = ""; });
    $("which-run").value = ""; $("outcome").value = ""; $("sort").value = "size down"; only = -1;
    filter();
  }

  // What the other scripts of this page read.
  const store = {
    get data() { return data; }, get runs() { return runs; }, get rows() { return rows; }, get only() { return only; },
    TRAINED, creditOf, entropyOf, logprobOf, textOf, length, verdict, scaleOf,
    choose: i => { if (order[i] < 0) clear(); choose(i, true, true); $("detail").querySelector("h3").focus(); },
    keep: prompt => { only = prompt; filter(); },
  };

  report.rollouts = function rollouts(found, names) {
    if (!found || !found.columns.run.length) return;
    data = found; c = found.columns; runs = names;
    index();
    recorded = c.flags.some(f => f & HAS_RATIO);
    names.forEach((n, k) => $("which-run").append(el("option", { value: k }, visible(n))));
    for (const id of ["search", "which-run", "outcome", "sort", ...["iteration", "reward", "length", "credit"].flatMap(n => [`min-${n}`, `max-${n}`])]) $(id).addEventListener("input", filter);
    $("scale").addEventListener("input", () => current >= 0 && detail(current));
    $("reset").addEventListener("click", () => { clear(); if (current >= 0) detail(current); });
    $("export-json").addEventListener("click", () => report.save(store, "json"));
    $("export-csv").addEventListener("click", () => report.save(store, "csv"));
    window.addEventListener("hashchange", follow);
    $("list").addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
    $("list").addEventListener("keydown", keys);
    filter();
    if (!follow()) choose(story());
    $("rollouts").dataset.ready = "true";
  };
})();
