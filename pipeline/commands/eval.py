"""`creditgraph eval`: the newest checkpoint of a run on its held-out split."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.replaying import Replay, parse_settings
from pipeline.run_directory import write_aside


def main(options: argparse.Namespace) -> int:
    """Runs every evaluator that has a final pass on the newest weights; prints the metrics and writes RUN/eval.json."""
    replay = Replay(Path(options.run), parse_settings(options.overrides))
    try:
        names = [n.name for n in replay.graph.nodes if getattr(n.cls, "final_pass", False)]
        if not names:
            raise ConfigError(f"{options.run}: its graph has no evaluator with a final pass; add a node such as evaluator.accuracy.")
        done = replay.newest_checkpoint() + 1
        metrics: dict[str, float] = {"iteration": float(done)}
        for name in names:
            metrics |= replay.run(name, done, iterations=done)[2]
    finally:
        replay.close()
    for note in replay.notes:
        print(f"note: {note}")
    for name, value in metrics.items():
        print(f"{name} = {value:.6g}")
    target = Path(options.run) / "eval.json"
    write_aside(target, json.dumps({"overrides": options.overrides, "metrics": metrics}, indent=1) + "\n")
    print(f"wrote {target}")
    return 0
