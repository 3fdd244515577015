"use strict";
(async function () {
  const { el, visible, signed, shade } = report;
  const { cards, specs } = await report.open("data-credit");

  /** The drawing in the page's colours. */
  function tinted(spec) {
    const c = report.colors(), style = getComputedStyle(document.documentElement);
    const range = ["--n5", "--page", "--p5"].map(n => style.getPropertyValue(n).trim());
    const text = JSON.stringify(spec, (key, value) => (key === "range" ? range : key === "color" && typeof value === "string" ? c.text : value));
    return { ...JSON.parse(text), autosize: { type: "pad" } };
  }

  function numbers(card) {
    const names = Object.keys(card.credit);
    const ends = card.ends.length ? card.ends : [card.pieces.length];
    return el("table", {}, el("thead", {}, el("tr", {}, ["thought", ...names].map(n => el("th", { scope: "col" }, visible(n))))),
      el("tbody", {}, ends.map((end, k) => {
        const start = k ? ends[k - 1] : 0;
        const mean = row => row.slice(start, end).reduce((a, b) => a + b, 0) / Math.max(1, end - start);
        return el("tr", {}, el("th", { scope: "row" }, `${k + 1}${k + 1 === card.error ? " (first wrong)" : ""}: ${visible(card.pieces.slice(start, end).join("").slice(0, 300))}`),
          names.map(n => { const v = mean(card.credit[n]); return el("td", { class: "num" }, el("span", { class: shade(v, card.scale[n]) }, signed(v))); }));
      })));
  }

  for (const [i, card] of cards.entries()) {
    await report.chart(document.getElementById(`map-${i}`), "heat map of credit, methods down, tokens across; the numbers are below", () => tinted(specs[i]));
    document.getElementById(`numbers-${i}`).replaceChildren(numbers(card));
  }
  document.documentElement.dataset.ready = "true";
})();
