"use strict";
// What each thread of each rank did when, for one iteration at a time.
(function () {
  const { el, visible } = report;
  const digits = seconds => (seconds >= 10 ? seconds.toFixed(1) : seconds >= 0.1 ? seconds.toFixed(3) : seconds.toFixed(4));

  /** Spans that touch an iteration's window, cut to it, with times from its begin. */
  function spans(data, [, begin, end]) {
    const c = data.columns, out = [];
    for (let i = 0; i < c.begin.length; i++) {
      const from = c.begin[i], to = from + c.seconds[i];
      if (to <= begin || from >= end) continue;
      out.push({
        x: Math.max(0, from - begin), x2: Math.min(end, to) - begin, track: visible(data.tracks[c.track[i]]), name: visible(data.names[c.name[i]]),
        phase: visible(data.phases[c.phase[i]]), depth: c.depth[i], iteration: c.iteration[i] < 0 ? "–" : c.iteration[i], seconds: c.seconds[i],
      });
    }
    return out;
  }

  function chartSpec(data, values, length) {
    const c = report.colors(), phases = [...new Set(values.map(v => v.phase))];
    const tracks = data.tracks.map(visible).filter(t => values.some(v => v.track === t));
    const widest = values.map(v => ({ ...v, middle: (v.x + v.x2) / 2 }));
    const x = { field: "x", type: "quantitative", title: "seconds", scale: { domain: [0, length], nice: false } };
    const y = { field: "track", type: "nominal", title: null, sort: tracks, axis: { labelLimit: 150 } };
    const fill = { field: "phase", type: "nominal", title: null, legend: { symbolStrokeColor: c.soft, symbolStrokeWidth: 1, symbolType: "square" }, scale: { domain: phases, range: phases.map(p => (p === "waiting" ? "transparent" : report.phaseColor(p, c))) } };
    const stroke = { condition: { test: "datum.phase === 'waiting'", value: c.soft }, value: c.page };
    const tooltip = [{ field: "name" }, { field: "phase" }, { field: "iteration" }, { field: "seconds", format: ".4f" }, { field: "track" }];
    const bar = (test, band) => ({ transform: [{ filter: test }], mark: { type: "bar", height: { band }, strokeWidth: 1, clip: true },
      encoding: { x, x2: { field: "x2" }, y, color: fill, stroke, strokeDash: { condition: { test: "datum.phase === 'waiting'", value: [3, 2] }, value: [1, 0] }, tooltip } });
    return {
      height: (tracks.length > 12 ? 30 : 54) * tracks.length, data: { values: widest },
      layer: [bar("datum.depth === 0", 0.86), bar("datum.depth > 0", 0.28),
        { transform: [{ filter: `${tracks.length} <= 12 && datum.depth === 0 && datum.x2 - datum.x > ${length / 9}` }], mark: { type: "text", baseline: "bottom", dy: -9, fontSize: 11, limit: 90, clip: true },
          encoding: { x: { ...x, field: "middle" }, y, text: { field: "name" }, color: { condition: { test: "datum.phase === 'waiting'", value: c.text }, value: c.page } } }],
    };
  }

  function numbers(values, length) {
    const sums = new Map();
    for (const v of values.filter(v => v.depth === 0)) {
      const key = `${v.track}\n${v.phase}`, old = sums.get(key) || [v.track, v.phase, 0, 0];
      sums.set(key, [v.track, v.phase, old[2] + v.x2 - v.x, old[3] + 1]);
    }
    const rows = [...sums.values()].sort((a, b) => a[0].localeCompare(b[0]) || b[2] - a[2]);
    return el("table", {}, el("caption", {}, `${digits(length)} s in all`),
      el("thead", {}, el("tr", {}, ["thread", "phase", "seconds", "share", "spans"].map(t => el("th", { scope: "col" }, t)))),
      el("tbody", {}, rows.map(([track, phase, seconds, count]) => el("tr", {}, el("th", { scope: "row" }, track), el("td", {}, phase),
        el("td", { class: "num" }, digits(seconds)), el("td", { class: "num" }, `${((100 * seconds) / length).toFixed(1)} %`), el("td", { class: "num" }, String(count))))));
  }

  report.timelines = async function timelines() {
    const run = document.getElementById("timeline-run");
    if (!run) return;
    const which = document.getElementById("timeline-iteration"), place = document.getElementById("timeline-chart");
    const all = {};
    for (const option of run.options) all[option.value] = await report.open(`data-timeline-${option.value}`);
    const draw = () => {
      const data = all[run.value], found = data.windows[which.selectedIndex];
      const length = Math.max(found[2] - found[1], 1e-6), values = spans(data, found);
      document.getElementById("timeline-numbers").replaceChildren(numbers(values, length));
      return report.chart(place, "spans of each thread along the seconds of an iteration, coloured by phase; the numbers are below", () => chartSpec(data, values, length));
    };
    const fill = () => {
      const found = all[run.value].windows;
      which.replaceChildren(...found.map(([i, begin, end]) => el("option", { value: i }, `${i < 0 ? "start" : i} (${digits(end - begin)} s)`)));
      which.selectedIndex = Math.min(found.length - 1, Math.max(0, found.findIndex(w => w[0] >= 0) + 1));  // the first one warms up
      return draw();
    };
    run.addEventListener("change", fill);
    which.addEventListener("change", draw);
    await fill();
  };
})();
