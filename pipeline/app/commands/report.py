"""`creditgraph report`: one self-contained HTML page of one or more runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.app.report.page import write_report
from pipeline.app.report.source import read_run
from pipeline.app.report.text import visible
from pipeline.app.report.timelines import merge_traces
from pipeline.core.errors import RunError
from pipeline.run.timeline.timeline import trace_files


def main(options: argparse.Namespace) -> int:
    """Writes the page; says what is missing and where it lies."""
    runs = [read_run(Path(path)) for path in options.runs]
    target = Path(options.output) if options.output else runs[0].path / "report.html"
    if options.trace:
        return merge(runs[0].path, Path(options.trace))
    size = write_report(runs, target, options.title or "")
    for run in runs:
        for note in run.notes:
            print(f"note: {visible(run.name)}: {visible(note)}")
    print(f"wrote {target} ({size / 1e6:.1f} MB)")
    return 0


def merge(run: Path, target: Path) -> int:
    """Writes one trace of all ranks."""
    if not trace_files(run):
        raise RunError(f"{run}: no traces/rank-N.json; expected a run that was trained with run.trace.enabled=true.")
    print(f"wrote {target} ({merge_traces(run, target):,} events); open it at ui.perfetto.dev")
    return 0
