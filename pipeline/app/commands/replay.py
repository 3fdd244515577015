"""`creditgraph replay`: one node of a finished run again, with changed settings, and what that changes."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.app.commands.run_node import print_outputs
from pipeline.run.compose import parse_settings
from pipeline.run.differences import describe_difference
from pipeline.run.replay import Replay


def main(options: argparse.Namespace) -> int:
    """Prints notes, metrics and, per output, the difference to the record."""
    replay = Replay(Path(options.run))
    try:
        again = replay.again(options.node, options.iteration, parse_settings(options.set))
    finally:
        replay.close()
    for note in replay.notes:
        print(f"note: {note}")
    print_outputs(again.outputs, again.metrics, options.output)
    for name in again.outputs:
        if name not in again.recorded:
            print(f"{options.node}.{name}: not recorded, so there is nothing to compare with")
            continue
        lines = describe_difference(again.recorded[name], again.outputs[name])
        print(f"{options.node}.{name}: " + ("the same bits as recorded" if not lines else "differs from the record"))
        for line in lines:
            print(f"  {line}")
    return 0
