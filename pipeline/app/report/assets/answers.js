"use strict";
// The answers to one prompt over training, of two runs side by side; and the chosen rollouts as a file.
(function () {
  const { el, visible, signed, number } = report;
  const MOST_ANSWERS = 4, MOST_ROWS = 60, MOST_TOKENS = 120;
  const $ = id => document.getElementById(id);
  let pair = [0, -1];

  /** One answer, given `times` times: a button that opens it, and its last tokens, coloured by its credit. */
  function answer(store, i, times, chosen) {
    const { c } = own(store), from = Math.max(0, store.length(i) - MOST_TOKENS), scale = store.scaleOf(i), tokens = [];
    for (let t = c.offset[i] + from; t < c.offset[i + 1]; t++) {
      const kind = c.flags[t] & store.TRAINED ? report.shade(store.creditOf(t), scale) : "off";
      tokens.push(el("span", { class: `t ${kind}` }, visible(store.data.pieces[c.piece[t]])));
    }
    return el("div", { class: "answer" },
      el("button", { type: "button", "aria-current": String(i === chosen), onclick: () => store.choose(i) },
        el("span", { class: c.correct[i] === 1 ? "ok" : "bad" }, `${c.correct[i] === 1 ? "✓" : "✗"} ${number(c.reward[i])}`), ` credit ${signed(c.mean_credit[i], 2)}${times > 1 ? `, ${times} times` : ""}`),
      el("div", { class: "text" }, from ? "… " : "", tokens));
  }

  const own = store => ({ c: store.data.columns });

  function cell(store, found, chosen) {
    if (!found.length) return el("td", {}, el("span", { class: "note" }, "not asked"));
    const { c } = own(store), right = found.filter(i => c.correct[i] === 1).length;
    const same = new Map(); // text → the answers with it, the chosen one first
    for (const i of found.includes(chosen) ? [chosen, ...found.filter(i => i !== chosen)] : found) {
      const text = `${store.textOf(i)}\n${c.reward[i]}`;
      same.set(text, [...(same.get(text) || []), i]);
    }
    const distinct = [...same.values()];
    return el("td", {}, el("p", { class: "note" }, `${right} of ${found.length} right`), distinct.slice(0, MOST_ANSWERS).map(([i, ...more]) => answer(store, i, 1 + more.length, chosen)),
      distinct.length > MOST_ANSWERS ? el("p", { class: "note" }, `and ${distinct.length - MOST_ANSWERS} other answers`) : null);
  }

  /** Fills the table for the prompt of rollout `chosen`. */
  report.answers = function answers(store, chosen) {
    const { c } = own(store), prompt = c.prompt[chosen], runs = store.runs, of = new Map();
    for (let i = 0; i < c.run.length; i++) {
      if (c.prompt[i] !== prompt) continue;
      const key = `${c.run[i]} ${c.iteration[i]}`;
      of.set(key, [...(of.get(key) || []), i]);
    }
    const asked = [...new Set([...of.keys()].map(k => Number(k.split(" ")[0])))];
    const others = asked.filter(r => r !== c.run[chosen]);
    pair = [c.run[chosen], others.includes(pair[1]) ? pair[1] : others.length ? others[0] : -1];
    const draw = () => {
      const columns = pair.filter(r => r >= 0);
      const iterations = [...new Set([...of.keys()].map(k => k.split(" ").map(Number)).filter(([r]) => columns.includes(r)).map(([, k]) => k))].sort((a, b) => a - b);
      const step = Math.max(1, Math.ceil(iterations.length / MOST_ROWS));
      const shown = iterations.filter((k, place) => place % step === 0 || k === c.iteration[chosen]);
      $("answers-note").textContent = `asked in ${iterations.length} recorded iteration${iterations.length === 1 ? "" : "s"}${columns.length > 1 ? " of these runs" : ""}${shown.length < iterations.length ? `, of which ${shown.length} are shown` : ""}; the last ${MOST_TOKENS} tokens of each answer, coloured by its credit`;
      $("answers-table").replaceChildren(el("table", { class: "answers" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "iteration"), columns.map(r => el("th", { scope: "col" }, visible(runs[r]))))),
        el("tbody", {}, shown.map(k => el("tr", {}, el("th", { scope: "row" }, String(k)), columns.map(r => cell(store, of.get(`${r} ${k}`) || [], chosen)))))));
    };
    const beside = $("beside");
    beside.replaceChildren(...[-1, ...others].map(r => el("option", { value: r }, r < 0 ? "no other run" : visible(runs[r]))));
    beside.value = pair[1];
    beside.closest("label").hidden = runs.length < 2;
    beside.onchange = () => { pair[1] = Number(beside.value); draw(); };
    const only = $("only");
    only.setAttribute("aria-pressed", String(store.only === prompt));
    only.onclick = () => { store.keep(store.only === prompt ? -1 : prompt); only.setAttribute("aria-pressed", String(store.only === prompt)); };
    draw();
  };

  function row(store, i) {
    const { c } = own(store), { texts, uid } = store.data;
    const real = v => (Number.isNaN(v) ? null : Number(v.toPrecision(6)));
    return {
      run: store.runs[c.run[i]], iteration: c.iteration[i], uid: uid[i], node: texts[c.node[i]], reward: real(c.reward[i]), verdict: store.verdict(i),
      reason: texts[c.detail[i]], tokens: store.length(i), inherited: c.inherited[i], mean_credit: real(c.mean_credit[i]), why: texts[c.why[i]],
      ended_by: texts[c.finish[i]], reference_answer: texts[c.answer[i]], prompt: texts[c.prompt[i]], response: store.textOf(i),
    };
  }

  const rounded = v => (v === null ? null : Number(v.toPrecision(3)));

  function tokens(store, i) {
    const { c } = own(store), out = [];
    for (let t = c.offset[i]; t < c.offset[i + 1]; t++) {
      out.push({ text: store.data.pieces[c.piece[t]], credit: Number(store.creditOf(t).toPrecision(5)), trained: Boolean(c.flags[t] & store.TRAINED),
        entropy: rounded(store.entropyOf(t)), logprob: rounded(store.logprobOf(t)) });
    }
    return out;
  }

  /** A cell of a CSV file; text that a spreadsheet would run as a formula gets an apostrophe. */
  function field(value) {
    if (value === null) return "";
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  /** Saves the rollouts that the filters leave: CSV has a line for each, JSON their tokens too. */
  report.save = function save(store, kind) {
    const rows = store.rows.map(i => (kind === "json" ? { ...row(store, i), response_tokens: tokens(store, i) } : row(store, i)));
    const names = rows.length ? Object.keys(rows[0]) : [];
    const text = kind === "json" ? JSON.stringify(rows, null, 1) : [names, ...rows.map(r => names.map(n => r[n]))].map(line => line.map(field).join(",")).join("\r\n") + "\r\n";
    const address = URL.createObjectURL(new Blob([text], { type: kind === "json" ? "application/json" : "text/csv" }));
    el("a", { href: address, download: `rollouts.${kind}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  };
})();
