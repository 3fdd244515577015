"""`creditgraph check`: the contract checker for components."""

from __future__ import annotations

import argparse

SUMMARY = "Check your component against the contract."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = "example:\n  creditgraph check my_package.ideas:MyAdvantage"
    parser.add_argument("target", metavar="module:Class", help="or a registered name")


def main(options: argparse.Namespace) -> int:
    """Prints every finding; 0 when there is none."""
    from pipeline.core.contract import check_component
    from pipeline.core.registry import load_class

    findings = check_component(load_class(options.target))
    for finding in findings:
        print(f"- {finding}")
    print(f"{options.target}: " + (f"{len(findings)} to fix" if findings else "follows the component contract"))
    return 1 if findings else 0
