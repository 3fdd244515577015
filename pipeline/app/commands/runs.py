"""`creditgraph runs`: the runs of a folder, one line each; of two runs, what differs."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from creditgraph.pipeline.app.text import columns

if TYPE_CHECKING:
    from creditgraph.pipeline.app.overview import RunRow

SUMMARY = "List the runs of a folder: state, results, and the settings in which they differ."
_HEAD = ("run", "differs in", "state", "iterations", "accuracy", "reward", "tokens", "written")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph runs                       the runs of ./runs\n"
        "  creditgraph runs runs/sweep --csv      one line of CSV per run, with every differing setting as a column\n"
        "  creditgraph diff runs/a runs/b         the settings in which two runs differ, and their results"
    )
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="default: runs")
    parser.add_argument("--csv", action="store_true", help="print comma-separated values instead of a table")


def main(options: argparse.Namespace) -> int:
    """Prints the table."""
    from creditgraph.pipeline.app.overview import find_runs, rows_of

    paths = list(dict.fromkeys(path for folder in options.folders for path in find_runs(Path(folder))))
    rows = rows_of(paths)
    if options.csv:
        write_csv(rows)
    else:
        print(as_table(rows))
    return 0


def as_table(rows: Sequence[RunRow]) -> str:
    """One line per run, under the name of its recipe."""
    from creditgraph.pipeline.app.overview import age, short_names, text_of

    lines: list[Sequence[str]] = []
    for recipe, members in groupby(rows, key=lambda row: row.recipe):
        group = list(members)
        lines.append((recipe,))
        short = short_names(list(group[0].differs))
        for row in group:
            results = row.results
            lines.append((
                f"  {row.path}",
                " ".join(f"{short[name]}={text_of(value)}" for name, value in row.differs.items()),
                row.state,
                f"{row.done} of {row.planned}" if row.planned is not None else str(row.done),
                _arrow(results.accuracy_before, results.accuracy_after),
                "" if results.reward_last is None else f"{results.reward_last:.3f}",
                "" if results.sampled_tokens is None else f"{results.sampled_tokens:,}",
                age(row.changed),
            ))  # fmt: skip
    return columns([_HEAD, *lines])


def _arrow(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    return f"{before:.3f}" if before == after else f"{before:.3f} → {after:.3f}"


def write_csv(rows: Sequence[RunRow]) -> None:
    """Prints one line per run; differing settings are columns under their whole names."""
    from creditgraph.pipeline.app.overview import text_of, value_of

    names = list(dict.fromkeys(name for row in rows for name in row.differs))
    writer = csv.writer(sys.stdout)
    writer.writerow(
        ["run", "recipe", "state", "iterations", "planned", "accuracy_before", "accuracy_after", "reward_first",
         "reward_last", "sampled_tokens", "trained_tokens", "optimizer_steps", "seconds", *names]
    )  # fmt: skip
    for row in rows:
        r = row.results
        numbers = (r.accuracy_before, r.accuracy_after, r.reward_first, r.reward_last)
        counts = (r.sampled_tokens, r.trained_tokens, r.optimizer_steps)
        known = ["" if v is None else v for v in (row.planned, *numbers, *counts, round(r.seconds, 1))]
        values = [text_of(value_of(row.config, name)) for name in names]
        writer.writerow([row.path, row.recipe, row.state, row.done, *known, *values])
