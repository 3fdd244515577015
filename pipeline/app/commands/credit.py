"""`creditgraph credit`: the credit of several recipes for the same recorded rollouts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_config_dir, add_output, add_trust
from creditgraph.pipeline.app.text import visible
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Compare the credit of several recipes for the recorded rollouts of a run, token by token."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = "example:\n  creditgraph credit recipe=toy_grpo,toy_rredcot,toy_s_trace runs/toy_grpo-s0"
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="recipe=a,b,c RUN",
        help="recipes, settings for all of them (key=value), and a run",
    )
    parser.add_argument(
        "--iteration", type=int, help="from 0; default: the newest recorded one whose policy can be restored exactly"
    )
    parser.add_argument("--rows", type=int, default=6, help="rollouts to show")
    parser.add_argument(
        "--samples", type=int, default=64, help="continuations per thought for the true advantage; 0 leaves it out"
    )
    add_output(parser, "FILE", "default: credit.html in the run")
    add_config_dir(parser, "graph/, recipe/ …")


def main(options: argparse.Namespace) -> int:
    """Writes the page; prints each method's note."""
    recipes, overrides, run = _split(options.arguments)
    if options.rows < 1:
        raise ConfigError(f"--rows {options.rows}: expected at least 1.")
    if options.samples < 0 or options.samples % 2:
        raise ConfigError(f"--samples {options.samples}: expected 0 (no true advantage) or an even number.")
    from creditgraph.pipeline.app.credit.side_by_side import compare
    from creditgraph.pipeline.app.report.credit import write_credit

    comparison = compare(run, recipes, overrides, options.config_dir, options.iteration, options.rows, options.samples)
    for note in comparison.notes:
        print(f"note: {visible(note)}")
    width = max(len(c.name) for c in comparison.columns)
    for column in comparison.columns:
        correlation = column.pearson
        shown = "" if math.isnan(correlation) else f"  correlation with the true advantage {correlation:+.2f}"
        print(f"{visible(column.name):<{width}}{shown}" + (f"  ({visible(column.note)})" if column.note else ""))
    target = Path(options.output) if options.output else run / "credit.html"
    size = write_credit(comparison, target, f"Credit for rollouts of {run.resolve().name}")
    print(f"wrote {target} ({size / 1e6:.1f} MB)")
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str], Path]:
    """Recipes, overrides and the run directory, in any order."""
    recipes: list[str] = []
    overrides: list[str] = []
    runs: list[str] = []
    for text in arguments:
        key, equals, value = text.partition("=")
        if equals and key == "recipe":
            recipes += [name for name in value.split(",") if name and name not in recipes]
        elif equals and not Path(text).is_dir():
            overrides.append(text)
        else:
            runs.append(text)
    if not recipes:
        raise ConfigError(
            "no recipe; expected recipe=NAME[,NAME …] and a run directory, for example recipe=toy_grpo,toy_rredcot "
            "runs/toy_grpo-s0."
        )
    if len(runs) != 1:
        raise ConfigError(f"expected one run directory, got {len(runs)}{': ' + ', '.join(runs) if runs else ''}.")
    return recipes, overrides, Path(runs[0])
