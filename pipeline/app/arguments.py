"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import Any

from creditgraph.pipeline.app.completion import complete_override, with_completer

OVERRIDES_HELP = """\
Overrides are key=value:
  recipe=toy_srpo                 a file of configs/recipe (creditgraph graph --list shows all)
  engine=local  model=tiny        another choice of a config group
  learner.optimizer.lr=1e-4       a setting of a node (creditgraph components NAME lists them)
  sampler.use=sampler.chains      another component for a node
  run.seed=1  run.iterations=20   a setting of the run (creditgraph components run lists them)
A folder ./configs (or --config-dir) adds your own graph/, recipe/, model/, data/ files."""


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Settings as key=value, and folders with configuration files."""
    overrides = parser.add_argument("overrides", nargs="*", metavar="key=value", help="see below")
    with_completer(overrides, complete_override)
    add_config_dir(parser, "graph/, recipe/ …")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """--trust, which `creditgraph.pipeline.run.trust` reads."""
    parser.add_argument(
        "--trust", action="store_true", help="load code that the run's config.yaml names, though the run is not yours"
    )


def add_settings(parser: argparse.ArgumentParser, what: str) -> None:
    """-s/--set setting=value, of a command whose other arguments are no settings."""
    parser.add_argument("-s", "--set", action="append", default=[], metavar="setting=value", help=what)


def add_output(parser: argparse.ArgumentParser, metavar: str, what: str, **more: Any) -> None:
    """-o/--output, the file or folder that a command writes."""
    parser.add_argument("-o", "--output", metavar=metavar, help=what, **more)


def add_config_dir(parser: argparse.ArgumentParser, groups: str) -> None:
    """Folders with configuration files of the user's own."""
    parser.add_argument(
        "-c", "--config-dir", action="append", default=[], metavar="DIR", help=f"a folder with {groups} files"
    )
