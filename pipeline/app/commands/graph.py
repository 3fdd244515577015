"""`creditgraph graph`: draws a graph, lists the shipped graphs and recipes, or checks all of them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_output, add_overrides
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import build_experiment, check_shipped, compose

SUMMARY = "Draw a graph, or check every shipped graph and recipe."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = OVERRIDES_HELP
    add_overrides(parser)
    add_output(parser, "FILE", "write to a file (.svg, or .mmd and .md for mermaid) instead of printing mermaid")
    parser.add_argument(
        "--check-all", action="store_true", help="check all graphs and recipes; loads no model or engine"
    )
    parser.add_argument("--list", action="store_true", help="list recipes and graphs")


def main(options: argparse.Namespace) -> int:
    """Draws, lists or checks; returns the exit code."""
    dirs = search_dirs(options.config_dir)
    if options.list:
        return _list(dirs)
    if options.check_all:
        return _check_all(dirs)
    experiment = build_experiment(
        compose(options.overrides, options.config_dir), " ".join(options.overrides) or "graph"
    )
    from creditgraph.pipeline.app.drawing import draw

    output = Path(options.output) if options.output else None
    if output is None:
        print(draw.mermaid(experiment.graph))
        return 0
    if output.suffix not in (".svg", ".mmd", ".md"):
        raise ConfigError(f"-o {output}: expected an ending of .svg, .mmd or .md, got '{output.suffix}'.")
    try:
        text = draw.svg(experiment.graph) if output.suffix == ".svg" else draw.mermaid(experiment.graph)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"-o {output}: cannot be written ({error.strerror}); expected a file in an existing folder."
        ) from error
    print(f"wrote {output}")
    return 0


def _list(dirs: list[Path]) -> int:
    for group in ("recipe", "graph", "setup", "model", "data", "engine", "learner"):
        print(f"{group}:")
        for name, file in sorted(list_choices(group, dirs).items()):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            comments = [line[2:] for line in lines if line.startswith("# ") and "@package" not in line]
            print(f"  {name:24} {comments[0] if comments else ''}")
    return 0


def _check_all(dirs: list[Path]) -> int:
    started = time.perf_counter()
    total = 0
    failed = 0
    for name, problems in check_shipped(dirs):
        total += 1
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok  '}  {name}")
        for problem in problems:
            print(f"        {problem}")
    print(f"{total - failed} of {total} graphs and recipes are valid ({time.perf_counter() - started:.1f} s)")
    return 1 if failed else 0
