"use strict";
// The picture of the graph; each node opens its settings, wires and what was recorded of its inputs and outputs.
(function () {
  const { el, visible } = report;

  function fields(summary) {
    return el("table", {}, el("thead", {}, el("tr", {}, ["field", "kind", "holds"].map(t => el("th", { scope: "col" }, t)))),
      el("tbody", {}, summary.fields.map(([name, kind, what]) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, name)), el("td", {}, kind), el("td", {}, visible(what))))));
  }

  function examples(summary) {
    if (!summary.rows3.length) return null;
    return el("details", {}, el("summary", {}, `first ${summary.rows3.length} of ${summary.rows} rows`),
      summary.rows3.map(row => el("dl", { class: "row" }, row.map(([name, text]) => [el("dt", {}, name), el("dd", {}, visible(text))]))));
  }

  function payload(card, output, iteration) {
    const found = (card.recorded[output] || {})[String(iteration)];
    if (!found) {
      const why = iteration < 0 ? "the initial value, before the first iteration" : output in card.recorded ? "not recorded in this iteration" : "not recorded (a handle or weights, or not in run.record.outputs)";
      return el("p", { class: "note" }, why);
    }
    return el("div", {}, el("p", {}, `${found.class}${found.rows == null ? "" : `, ${found.rows} rows`}`), fields(found), examples(found));
  }

  function panel(card, name, iteration) {
    const node = card.nodes[name];
    const settings = node.settings.length
      ? el("details", {}, el("summary", {}, `${node.settings.length} settings, ${node.settings.filter(s => s[2]).length} changed`),
          el("ul", { class: "plain" }, node.settings.map(([k, v, changed]) => el("li", {}, el(changed ? "strong" : "span", {}, el("code", {}, `${k} = ${visible(v)}`)), changed ? " (changed)" : ""))))
      : el("p", { class: "note" }, "no settings");
    const part = (title, entries) => [el("h4", {}, title), entries.length ? entries : el("p", { class: "note" }, "none")];
    return [
      el("h3", { tabindex: "-1" }, visible(name), " ", el("code", {}, visible(node.use))), el("p", {}, visible(node.summary)), settings,
      part("Inputs", node.inputs.map(([socket, wire, output, delay]) => el("section", { class: "io" }, el("h5", {}, `${socket} ← ${wire}`), payload(card, output, iteration - delay)))),
      part("Outputs", node.outputs.map(output => el("section", { class: "io" }, el("h5", {}, output), payload(card, output, iteration)))),
    ].flat(2);
  }

  report.graphs = function graphs(cards) {
    cards.forEach((card, i) => {
      const host = document.getElementById(`graph-${i}`);
      if (!card || !host) return;
      const root = host.shadowRoot;
      const side = document.getElementById(`node-${i}`);
      const select = document.getElementById(`graph-iteration-${i}`);
      select.append(...card.iterations.map(k => el("option", { value: k }, `iteration ${k}`)));
      select.value = card.iterations[card.iterations.length - 1];
      select.closest("label").hidden = !card.iterations.length;
      let current = null;
      const show = (name, focus) => {
        current = name;
        side.replaceChildren(...panel(card, name, Number(select.value)));
        root.querySelectorAll("[data-name]").forEach(g => g.setAttribute("aria-pressed", String(g.dataset.name === name)));
        if (focus) side.querySelector("h3").focus({ preventScroll: window.innerWidth > 900 });
      };
      root.querySelectorAll("g").forEach(group => {
        const name = group.querySelector("text.name");
        if (!name || !(name.textContent in card.nodes)) return;
        group.dataset.name = name.textContent;
        group.setAttribute("role", "button");
        group.setAttribute("tabindex", "0");
        group.setAttribute("aria-pressed", "false");
        group.setAttribute("aria-label", `node ${name.textContent}`);
        group.addEventListener("click", () => show(group.dataset.name, window.innerWidth <= 900));
        group.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); show(group.dataset.name, true); } });
      });
      select.addEventListener("change", () => current && show(current, false));
      const first = Object.keys(card.nodes).filter(n => card.nodes[n].outputs.some(o => (Object.values(card.recorded[o] || {})[0] || {}).class === "Credit")).pop();
      if (first) show(first, false);
    });
  };
})();
