"""`creditgraph diff A B`: the settings in which runs differ, and their results."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.text import columns, cut

SUMMARY = "Show the settings in which runs differ, and their results side by side."
_RESULTS = {
    "iterations": "iterations",
    "accuracy before": "accuracy_before",
    "accuracy after": "accuracy_after",
    "reward, last tenth": "reward_last",
    "sampled tokens": "sampled_tokens",
    "optimiser steps": "optimizer_steps",
    "seconds": "seconds",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = "example:\n  creditgraph diff runs/toy_grpo-s0 runs/toy_srpo-s0"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, or folders of them")


def main(options: argparse.Namespace) -> int:
    """Prints a column per run: first the settings that are not the same, then the results."""
    from creditgraph.pipeline.app.overview import differing, find_runs, rows_of, text_of, value_of

    paths = [path for folder in options.runs for path in find_runs(Path(folder))]
    by_path = {row.path: row for row in rows_of(paths)}
    runs = [by_path[path] for path in dict.fromkeys(paths)]
    names = differing([run.config for run in runs])
    settings = [[name, *(cut(text_of(value_of(run.config, name)), 60) for run in runs)] for name in names]
    results = [[label, *(_number(getattr(run.results, field)) for run in runs)] for label, field in _RESULTS.items()]
    print(columns([["", *(str(run.path) for run in runs)], *(settings or [["no setting differs"]]), *results]))
    return 0


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
