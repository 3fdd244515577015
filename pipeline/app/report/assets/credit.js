"use strict";
// A table per rollout: thoughts down, methods across; each cell has the thought's tokens, coloured by the method's credit.
(async function () {
  const { el, visible, signed, shade } = report;
  const { cards } = await report.open("data-credit");

  function cell(card, method, start, end) {
    const credit = card.credit[method].slice(start, end);
    const mean = credit.reduce((a, b) => a + b, 0) / Math.max(1, credit.length);
    const tokens = credit.map((value, k) => el("span", { class: `t ${shade(value, card.scale[method])}` }, visible(card.pieces[start + k])));
    return el("td", {}, el("div", { class: "body" }, tokens, el("span", { class: "num" }, signed(mean, 2))));
  }

  function table(card) {
    const methods = Object.keys(card.credit);
    const ends = card.ends.length ? card.ends : [card.pieces.length];
    const place = el("table", { class: "methods" }, el("thead", {}, el("tr", {}, ["thought", ...methods].map(n => el("th", { scope: "col" }, visible(n))))),
      el("tbody", {}, ends.map((end, k) => {
        const wrong = k + 1 === card.error;
        return el("tr", { class: wrong ? "wrong" : "" }, el("th", { scope: "row" }, String(k + 1), wrong ? el("span", { class: "bad" }, " ✗ first wrong") : null),
          methods.map(method => cell(card, method, k ? ends[k - 1] : 0, end)));
      })));
    place.style.setProperty("--columns", methods.length);
    return place;
  }

  cards.forEach((card, i) => document.getElementById(`methods-${i}`).replaceChildren(table(card)));
  document.documentElement.dataset.ready = "true";
})();
