"""`creditgraph check`: the contract checker for components and environments."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.arguments import add_settings

SUMMARY = "Check your component or environment against its contract, by its declarations and by running it."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n  creditgraph check my_package.ideas:MyAdvantage -s strength=0.5\n"
        "  creditgraph check my_game.py:Game --problems problems.jsonl"
    )
    parser.add_argument("target", metavar="module:Class", help="or a registered name, or path/to/file.py:Class")
    add_settings(parser, "a setting for the two runs")
    parser.add_argument(
        "--problems", type=Path, help="what an environment is reset with: JSON lines; by default of the embedded task"
    )
    parser.add_argument("--static", action="store_true", help="read the declarations only; run nothing")


def main(options: argparse.Namespace) -> int:
    """Prints every finding; 0 when there is none."""
    from creditgraph.components.environment.base import EnvironmentComponent
    from creditgraph.pipeline.app.trial import try_component
    from creditgraph.pipeline.core.component import Component
    from creditgraph.pipeline.core.contract import check_component
    from creditgraph.pipeline.core.registry import load_class
    from creditgraph.pipeline.run.compose.overrides import parse_settings

    cls = load_class(options.target)
    settings = parse_settings(options.set)
    is_component = isinstance(cls, type) and issubclass(cls, Component)
    plays = not is_component and callable(getattr(cls, "step", None))
    findings = [] if plays else check_component(cls)
    note = "declarations only"
    if not options.static and (plays or (is_component and issubclass(cls, EnvironmentComponent))):
        found, note = _play(cls, options.target, settings, options.problems)
        findings += [f"{cls.__name__}{text}" for text in found]
    elif not options.static and is_component:
        trial = try_component(cls, options.target, settings)
        findings += [f"{cls.__name__}{text}" for text in trial.findings]
        note = trial.note
    for finding in findings:
        print(f"- {finding}")
    follows = f"follows the {'environment' if plays else 'component'} contract"
    print(f"{options.target}: {f'{len(findings)} to fix' if findings else follows} ({note})")
    return 1 if findings else 0


def _play(cls: Any, target: str, settings: dict[str, Any], problems: Path | None) -> tuple[list[str], str]:
    """Findings and note of scripted episodes, in a class with the three methods or a component that makes them."""
    from creditgraph.components.environment.custom import Custom, check_class
    from creditgraph.pipeline.app.environment_check import check_environment, embedded_problems, read_problems
    from creditgraph.pipeline.core.component import Component, Context, set_up
    from creditgraph.pipeline.core.errors import ConfigError
    from creditgraph.pipeline.core.registry import build_component

    if issubclass(cls, Component):
        component = build_component(target, settings, target)
    else:
        try:
            check_class(cls, target)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        component = Custom(Custom.Config(name=target, arguments=settings))
    set_up(component, Context(node="checked"))
    try:
        return check_environment(component.make, read_problems(problems) if problems else embedded_problems())
    finally:
        component.close()
