"""Renders a report as one HTML file that runs only its own scripts and loads nothing from a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from creditgraph.pipeline.app.progress import duration
from creditgraph.pipeline.app.report.cards import config_differences, graph_card, overview
from creditgraph.pipeline.app.report.curves import AXES, all_lines, phases
from creditgraph.pipeline.app.report.pack import pack, pack_rollouts
from creditgraph.pipeline.app.report.rollouts import collect
from creditgraph.pipeline.app.report.source import RunSource
from creditgraph.pipeline.app.report.timelines import timeline
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import MissingExtraError, extra
from creditgraph.pipeline.run.run_directory import write_aside
from creditgraph.pipeline.run.timeline.spans import phase_of

ASSETS = Path(__file__).parent / "assets"
RECORDED_BYTES = 24e6  # of Parquet whose rollouts fit a file of 20 MB
LIMIT = 20e6


def write_report(runs: Sequence[RunSource], target: Path, title: str = "") -> int:
    """Writes the page of some runs; returns its size in bytes."""
    text = report_html(runs, title)
    write_aside(target, text, "-o FILE")
    return len(text.encode())


def report_html(runs: Sequence[RunSource], title: str = "", live: str = "") -> str:
    """The page of some runs; of a served page `live` is the state of the runs that it shows."""
    graphs = [graph_card(run) for run in runs]
    # The compressed size is known only afterwards, so fewer rollouts are read until the page is small enough.
    bytes_read = RECORDED_BYTES
    while True:
        rollouts = collect(runs, bytes_read)
        blob = pack_rollouts(rollouts) if len(rollouts) else ""
        if len(blob) <= LIMIT * 0.8 or bytes_read < 1e5:
            break
        bytes_read *= 0.6 * LIMIT / len(blob)
    spans = [timeline(run) for run in runs]
    cards = [overview(run) for run in runs]
    curves = all_lines(runs)
    vega = ""
    if curves["lines"]:
        try:
            vega = vega_bundle()
        except MissingExtraError as error:
            runs[0].note(f"its curves are left out: {error}")
            curves["lines"] = {}
    main = {
        "names": [run.name for run in runs],
        "curves": curves,
        "phases": [phases(run) for run in runs],
        "lanes": [{n.name: phase_of(n) for n in run.graph.nodes} if run.graph else {} for run in runs],
        "graphs": [{k: v for k, v in card.items() if k != "svg"} if card else None for card in graphs],
    }
    blobs = {"data-main": pack(main, {})} | ({"data-rollouts": blob} if blob else {})
    blobs |= {f"data-timeline-{i}": pack(*spans_of_run) for i, spans_of_run in enumerate(spans) if spans_of_run}
    has_curves = bool(curves["lines"])
    has_phases = has_curves and any(main["phases"])
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}"
    sections = [
        ("runs", "Runs"),
        *([("curves", "Learning curves")] if has_curves else []),
        ("rollouts", "Rollouts"),
        *([("phases", "Time per phase")] if has_phases else []),
    ]
    sections += [("timeline", "Timeline")] if any(spans) else []
    sections += [("graph", "Graph")] if any(graphs) else []
    sections += [("data", "Data"), ("configuration", "Configuration")]
    return render(
        "report.jinja",
        scripts=(
            "core.js",
            "charts.js",
            "timeline.js",
            "graph.js",
            "answers.js",
            "turns.js",
            "rollouts.js",
            "start.js",
            *(["live.js"] if live else []),
        ),
        vega=vega,
        blobs=blobs,
        title=title or (f"Run {runs[0].name}" if len(runs) == 1 else count),
        subtitle=f"{count}, {len(rollouts):,} rollouts, {rollouts.total:,} response tokens",
        skip=("rollouts", "rollouts"),
        sections=sections,
        runs=cards,
        graphs=graphs,
        timelines=[bool(s) for s in spans],
        axes=AXES,
        has_curves=has_curves,
        has_phases=has_phases,
        num_rollouts=len(rollouts),
        differences=config_differences(runs),
        live=live,
    )


def render(
    template: str,
    scripts: Sequence[str],
    blobs: Mapping[str, str],
    title: str,
    vega: str = "",
    live: str = "",
    **values: Any,
) -> str:
    """A page of a template, with the library `vega` if it has charts.

    Its Content-Security-Policy allows these scripts by their hash, requests to its server if it is a `live` page, and
    nothing else.
    """
    texts = [(ASSETS / name).read_text(encoding="utf-8") for name in scripts]
    if vega:
        texts.insert(0, vega)
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in texts)
    connect = "; connect-src 'self'" if live else ""
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        f"form-action 'none'{connect}"
    )
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "decimal": _decimal, "count": _count, "duration": _duration}
    css = (ASSETS / "report.css").read_text(encoding="utf-8")
    page = environment.get_template(template).render(
        policy=policy, css=Markup(css), scripts=texts, blobs=blobs, title=visible(title), live=live, **values
    )
    return page.encode("utf-8", "replace").decode()  # recorded text may hold lone surrogates


@cache
def vega_bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    with extra("plots", "the charts of a report"):
        import vl_convert

    text: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # Inside <script>, these would end or change the element.
    return text.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _duration(value: float | None) -> str:
    return "–" if value is None else duration(value)
