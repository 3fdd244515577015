"use strict";
// Charts, drawn by Vega-Lite as SVG; expressions are interpreted, so the page's policy needs no eval.
(function () {
  const { el } = report;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // element → () => spec

  function colors() {
    const style = getComputedStyle(document.documentElement);
    const get = name => style.getPropertyValue(name).trim();
    return { text: get("--text"), soft: get("--soft"), line: get("--line"), plus: get("--plus"), minus: get("--minus"), page: get("--page"),
      series: Array.from({ length: 11 }, (_, k) => get(`--s${k + 1}`)) };
  }
  report.colors = colors;

  // A phase has the same colour in every chart; "waiting" is hollow.
  const PHASES = { generation: 0, learning: 1, verification: 2, credit: 3, "weight update": 4, data: 5, evaluation: 7, checkpoint: 8, recording: 9, setup: 10, other: 6 };
  report.phaseColor = (phase, c) => (phase in PHASES ? c.series[PHASES[phase]] : c.series[6]);

  /** The colour of a phase; of its k-th node paler. */
  function shaded(color, page, k) {
    const parts = text => [1, 3, 5].map(i => parseInt(text.slice(i, i + 2), 16));
    const share = Math.min(0.75, 0.3 * k), over = parts(page);
    return `rgb(${parts(color).map((v, i) => Math.round(v * (1 - share) + over[i] * share)).join(",")})`;
  }

  function config() {
    const c = colors();
    return {
      background: null, aria: false, font: "system-ui, sans-serif",
      view: { stroke: c.line }, range: { category: c.series },
      axis: { labelColor: c.text, titleColor: c.text, gridColor: c.line, gridOpacity: 0.5, domainColor: c.soft, tickColor: c.soft,
        labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
      legend: { labelColor: c.text, titleColor: c.text, orient: "bottom", labelFontSize: 12, labelLimit: window.innerWidth < 500 ? 120 : 220, columns: window.innerWidth < 500 ? 2 : 3, symbolLimit: 24, symbolOpacity: 1, symbolStrokeWidth: 2 },
      title: { color: c.text }, text: { color: c.text },
    };
  }

  async function show(place, spec) {
    if (place.view) place.view.finalize();
    const full = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", autosize: { type: "fit-x", contains: "padding" },
      ...spec(), config: config() };
    const result = await vegaEmbed(place, full, { actions: false, renderer: "svg", ast: true, tooltip: { theme: dark.matches ? "dark" : "light", sanitize: v => report.visible(String(v)).replace(/&/g, "&amp;").replace(/</g, "&lt;") } });
    place.view = result.view;
    // The holder has role and label; the marks inside have roles without names.
    place.querySelector("svg")?.setAttribute("aria-hidden", "true");
  }

  /** Draws `spec()` in an element with a spoken label; again whenever light and dark change. */
  report.chart = function chart(place, label, spec) {
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", label);
    drawn.set(place, spec);
    return show(place, spec).catch(error => {
      place.removeAttribute("role");
      place.replaceChildren(el("p", { class: "note" }, `This chart could not be drawn (${error.message}).`));
    });
  };
  dark.addEventListener("change", () => { for (const [place, spec] of drawn) if (place.isConnected) show(place, spec); else drawn.delete(place); });

  function curveSpec(data, metric, along) {
    const values = [];
    for (const [label, points] of Object.entries(data.lines[metric][along])) {
      for (const [x, mean, low, high, runs] of points) values.push({ x, mean, low, high, runs, group: report.visible(label) });
    }
    const few = values.length < 60;
    const low = Math.min(...values.map(v => v.low)), high = Math.max(...values.map(v => v.high)), room = Math.max(0.1 * Math.abs(low), 0.05);
    // One value alone: an axis around it, whose ticks have different labels.
    const scale = low === high ? { domain: [low >= 0 ? Math.max(0, low - room) : low - room, low + room] } : { zero: false };
    const color = { field: "group", type: "nominal", title: null, scale: { domain: data.groups.map(g => report.visible(g.label)) } };
    const x = { field: "x", type: "quantitative", title: data.axes[along], scale: { domainMin: 0, nice: false }, axis: along === "iteration" ? { tickMinStep: 1, format: "d" } : {} };
    return {
      height: 260, data: { values }, encoding: { x, color },
      layer: [
        { mark: { type: "area", opacity: 0.22, interpolate: "linear" }, encoding: { y: { field: "low", type: "quantitative", title: report.visible(metric), scale }, y2: { field: "high" } } },
        { mark: { type: "line", strokeWidth: 2, point: few ? { size: 36 } : false }, encoding: { y: { field: "mean", type: "quantitative" }, strokeDash: { field: "group", type: "nominal", title: null, scale: { domain: color.scale.domain } } } },
        { mark: { type: "point", opacity: 0, size: 80 }, encoding: { y: { field: "mean", type: "quantitative" },
          tooltip: [{ field: "group", title: "runs" }, { field: "x", title: data.axes[along] }, { field: "mean" }, { field: "low", title: "lowest" }, { field: "high", title: "highest" }, { field: "runs", title: "seeds" }] } },
      ],
    };
  }

  function finals(data, metric) {
    return el("table", {}, el("caption", {}, `${metric}: last values`),
      el("thead", {}, el("tr", {}, ["runs", "mean", "lowest", "highest", "seeds"].map(t => el("th", { scope: "col" }, t)))),
      el("tbody", {}, data.groups.map(g => {
        const points = data.lines[metric].iteration[g.label];
        const last = points[points.length - 1];
        return el("tr", {}, el("th", { scope: "row" }, report.visible(g.label)), (last ? last.slice(1) : ["–", "–", "–", "–"]).map(v => el("td", {}, String(v))));
      })));
  }

  report.curves = function curves(data) {
    const names = Object.keys(data.lines);
    const panels = [...document.querySelectorAll("[data-curve]")];
    if (!names.length) return panels.forEach(p => p.remove());
    const along = () => document.querySelector("input[name=along]:checked").value;
    const update = [];
    panels.forEach((panel, i) => {
      const select = panel.querySelector("select");
      select.append(...names.map(n => el("option", { value: n }, report.visible(n))));
      select.value = names[Math.min(i, names.length - 1)];
      const draw = () => {
        const metric = select.value;
        panel.querySelector("details > div").replaceChildren(finals(data, metric));
        return report.chart(panel.querySelector(".chart"), `${metric} against ${data.axes[along()]}, one line per group of runs, band from lowest to highest seed`,
          () => curveSpec(data, metric, along()));
      };
      select.addEventListener("change", draw);
      update.push(draw);
      draw();
    });
    document.querySelectorAll("input[name=along]").forEach(r => r.addEventListener("change", () => update.forEach(d => d())));
  };

  report.phases = function phases(all, lanes) {
    const select = document.getElementById("phase-run");
    const place = document.getElementById("phase-chart");
    if (!place) return;
    const draw = () => {
      const rows = all[Number(select.value)];
      const order = [...new Set(rows.map(r => r[1]))].filter(n => n !== "other").concat("other");
      const nodes = order.map(report.visible), lane = order.map(n => lanes[Number(select.value)][n] || (n in { checkpoint: 0, recording: 0, setup: 0 } ? n : "other"));
      const values = rows.map(([iteration, node, seconds]) => ({ iteration, end: iteration + 1, node: report.visible(node), seconds, order: order.indexOf(node) }));
      const few = new Set(values.map(v => v.iteration)).size <= 40;
      // Of many iterations each bar begins at its number, so that the axis can begin at 0.
      const along = few ? { x: { field: "iteration", type: "ordinal", title: "iteration", axis: { labelAngle: 0, labelOverlap: true } } }
        : { x: { field: "iteration", bin: "binned", type: "quantitative", title: "iteration", scale: { domainMin: 0, nice: false }, axis: { tickMinStep: 1, format: "d" } }, x2: { field: "end" } };
      const range = c => lane.map((phase, i) => shaded(report.phaseColor(phase, c), c.page, lane.slice(0, i).filter(p => p === phase).length));
      report.chart(place, "seconds of each node per iteration, stacked", () => ({
        height: 240, data: { values }, mark: { type: "bar", strokeWidth: 0, ...(few ? {} : { stroke: null }) },
        encoding: {
          ...along,
          y: { field: "seconds", type: "quantitative", stack: true, title: "seconds" },
          color: { field: "node", type: "nominal", title: null, scale: { domain: nodes, range: range(colors()) } }, order: { field: "order" },
          tooltip: [{ field: "iteration" }, { field: "node" }, { field: "seconds", format: ".4g" }],
        },
      }));
    };
    select.addEventListener("change", draw);
    draw();
  };
})();
