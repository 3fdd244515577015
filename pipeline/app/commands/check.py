"""`creditgraph check`: the contract checker for components."""

from __future__ import annotations

import argparse

from pipeline.core.contract import check_component
from pipeline.core.registry import load_class


def main(options: argparse.Namespace) -> int:
    """Prints every finding; 0 when there is none."""
    findings = check_component(load_class(options.target))
    for finding in findings:
        print(f"- {finding}")
    print(f"{options.target}: " + (f"{len(findings)} to mend" if findings else "follows the component contract"))
    return 1 if findings else 0
