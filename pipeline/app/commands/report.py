"""`creditgraph report`: one self-contained HTML page of one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_output, add_trust
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import RunError

SUMMARY = "Write one self-contained HTML page of runs: curves, graph, rollouts with their credit, configuration."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = "example:\n  creditgraph report runs/toy_srpo-s0 runs/toy_srpo-s1 -o srpo.html"
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs, or folders of them; those that differ by seed alone share a line"
    )
    add_output(parser, "FILE", "default: report.html in the first run")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this host")
    parser.add_argument("--title", help="heading of the page")
    parser.add_argument(
        "--trace", metavar="FILE", help="instead of a page: the first run's timeline, all ranks, for ui.perfetto.dev"
    )


def main(options: argparse.Namespace) -> int:
    """Writes the page; prints its path and what is missing."""
    import webbrowser

    from creditgraph.pipeline.app.overview import find_runs
    from creditgraph.pipeline.app.report.page import write_report
    from creditgraph.pipeline.app.report.source import read_run

    runs = [read_run(run) for path in options.runs for run in find_runs(Path(path))]
    target = Path(options.output) if options.output else runs[0].path / "report.html"
    if options.trace:
        return merge(runs[0].path, Path(options.trace))
    size = write_report(runs, target, options.title or "")
    for run in runs:
        for note in run.notes:
            print(f"note: {visible(run.name)}: {visible(note)}")
    print(f"wrote {target} ({size / 1e6:.1f} MB)")
    if options.open:
        webbrowser.open(target.resolve().as_uri())
    return 0


def merge(run: Path, target: Path) -> int:
    """Writes one trace of all ranks."""
    from creditgraph.pipeline.app.report.timelines import merge_traces
    from creditgraph.pipeline.run.timeline.files import trace_files

    if not trace_files(run):
        raise RunError(f"{run}: no traces/rank-N.json; expected a run that was trained with run.trace.enabled=true.")
    print(f"wrote {target} ({merge_traces(run, target):,} events); open it at ui.perfetto.dev")
    return 0
