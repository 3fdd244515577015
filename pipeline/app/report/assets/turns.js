"use strict";
// An episode as its turns: what was observed, what was written, coloured by its credit, and what came of it.
(function () {
  const { el, visible, signed, number } = report;
  const MOST_TOKENS = 200;

  /** The tokens of a turn, the last of them if they are many, coloured on the scale of the whole episode. */
  function body(store, i, scale) {
    const c = store.data.columns, from = Math.max(0, store.length(i) - MOST_TOKENS), tokens = [];
    for (let t = c.offset[i] + from; t < c.offset[i + 1]; t++) {
      const kind = c.flags[t] & store.TRAINED ? report.shade(store.creditOf(t), scale) : "off";
      tokens.push(el("span", { class: `t ${kind}` }, visible(store.data.pieces[c.piece[t]])));
    }
    return [from ? "… " : "", tokens];
  }

  /** What a turn's prompt has beyond the turn before and its response; all of it where it does not continue them. */
  function observed(store, i, before) {
    const c = store.data.columns, text = store.data.texts[c.prompt[i]];
    const known = before < 0 ? "" : store.data.texts[c.prompt[before]] + store.textOf(before);
    return known && text.startsWith(known) ? text.slice(known.length) : text;
  }

  /** The section of the episode that rollout `i` is a turn of; nothing for other rollouts. */
  report.turns = function turns(store, i) {
    const c = store.data.columns, texts = store.data.texts;
    if (c.episode[i] < 0) return [];
    const found = [];
    for (let j = 0; j < c.run.length; j++) if (c.episode[j] === c.episode[i]) found.push(j);
    found.sort((a, b) => c.turn[a] - c.turn[b]);
    const sums = found.map(j => { let sum = 0; for (let t = c.offset[j]; t < c.offset[j + 1]; t++) if (c.flags[t] & store.TRAINED) sum += store.creditOf(t); return sum; });
    let scale = 0;
    for (const j of found) for (let t = c.offset[j]; t < c.offset[j + 1]; t++) if (c.flags[t] & store.TRAINED) scale = Math.max(scale, Math.abs(store.creditOf(t)));
    const total = found.reduce((sum, j) => sum + c.turn_reward[j], 0), fault = texts[c.turn_fault[i]];
    const row = (j, k) => el("tr", { "aria-current": String(j === i) },
      el("th", { scope: "row" }, el("button", { type: "button", "aria-current": String(j === i), onclick: () => store.choose(j) }, String(c.turn[j] + 1))),
      el("td", { class: "text" }, visible(observed(store, j, k ? found[k - 1] : -1).slice(-600)) || "–"), el("td", { class: "text" }, body(store, j, scale)),
      el("td", {}, number(c.turn_reward[j])), el("td", {}, signed(c.mean_credit[j])), el("td", {}, signed(sums[k], 2)), el("td", { class: "text" }, visible(texts[c.turn_state[j]]) || "–"));
    const heads = ["turn", "observation", "response, coloured by credit", "reward", "mean credit", "Σ credit", "state before it"];
    const ended = fault ? `cut off (${visible(fault)})` : c.turn_done[found[found.length - 1]] ? "ended by the environment" : "not ended";
    return [el("h4", {}, "Its episode"), el("p", { class: "sub" }, `${found.length} turn${found.length > 1 ? "s" : ""}, return ${number(total)}, ${ended}. This rollout is turn ${c.turn[i] + 1}.`),
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "the turns of its episode" }, el("table", { class: "turns" }, el("thead", {}, el("tr", {}, heads.map(h => el("th", { scope: "col" }, h)))), el("tbody", {}, found.map(row))))];
  };
})();
