"""`creditgraph check`: the contract checker for components."""

from __future__ import annotations

import argparse

SUMMARY = "Check your component against the contract: its declarations, and two runs on a small batch."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = "example:\n  creditgraph check my_package.ideas:MyAdvantage -o strength=0.5"
    parser.add_argument("target", metavar="module:Class", help="or a registered name")
    parser.add_argument(
        "-o", dest="set", action="append", default=[], metavar="setting=value", help="a setting for the two runs"
    )
    parser.add_argument("--static", action="store_true", help="read the declarations only; run nothing")


def main(options: argparse.Namespace) -> int:
    """Prints every finding; 0 when there is none."""
    from pipeline.app.trial import try_component
    from pipeline.core.component import Component
    from pipeline.core.contract import check_component
    from pipeline.core.registry import load_class
    from pipeline.run.compose.overrides import parse_settings

    cls = load_class(options.target)
    findings = check_component(cls)
    note = "declarations only"
    if not options.static and issubclass(cls, Component):
        trial = try_component(cls, options.target, parse_settings(options.set))
        findings += [f"{cls.__name__}{text}" for text in trial.findings]
        note = trial.note
    for finding in findings:
        print(f"- {finding}")
    verdict = f"{len(findings)} to fix" if findings else "follows the component contract"
    print(f"{options.target}: {verdict} ({note})")
    return 1 if findings else 0
