"""`creditgraph replay`: one node of a finished run again, with changed settings, and what that changes."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.app.commands.run_node import print_outputs
from pipeline.run.session import Replay, describe_difference, parse_settings


def main(options: argparse.Namespace) -> int:
    """Prints notes, metrics and, per output, the difference to the record."""
    replay = Replay(Path(options.run))
    try:
        recorded, outputs, metrics = replay.run(options.node, options.iteration, parse_settings(options.set))
    finally:
        replay.close()
    for note in replay.notes:
        print(f"note: {note}")
    print_outputs(outputs, metrics, options.output)
    for name in outputs:
        if name not in recorded:
            print(f"{options.node}.{name}: not recorded, so there is nothing to compare with")
            continue
        lines = describe_difference(recorded[name], outputs[name])
        print(f"{options.node}.{name}: " + ("the same bits as recorded" if not lines else "differs from the record"))
        for line in lines:
            print(f"  {line}")
    return 0
