"""`creditgraph eval`: a suite of tasks on runs and models, or the held-out split of one run."""

import argparse
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from creditgraph.pipeline.app.arguments import add_overrides, add_trust
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.run_directory import write_json

SUMMARY = "Evaluate checkpoints of runs, or models, on a suite of tasks; or a run with the evaluator of its graph."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph eval run=runs/toy_srpo-s0 suite=toy\n"
        "  creditgraph eval run=runs/a,runs/b model=qwen3_4b suite=math engine=vllm tasks=aime_2024,math_500\n"
        "  creditgraph eval model=tiny suite=math data.math_500.path=math_500.jsonl tasks=math_500\n"
        "  creditgraph eval runs/toy_srpo-s0 evaluator.samples=8 evaluator.num_problems=0\n"
        "docs/lab.md has all settings."
    )
    add_overrides(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="delete the records of an earlier evaluation of the same name"
    )
    parser.add_argument("--compare", action="store_true", help="only compare existing results; sample nothing")


def main(options: argparse.Namespace) -> int:
    """Evaluates on the suite of suite=NAME or, without one, with the evaluators of the run's graph."""
    runs, settings = split_arguments(options.overrides)
    if any(text.startswith("suite=") for text in settings):
        from creditgraph.lab.evaluate.command import evaluate_suite

        arguments = [*([f"run={','.join(runs)}"] if runs else []), *settings]
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        with _exit_on_signals():
            evaluate_suite(arguments, options.config_dir, options.fresh, options.compare, partial(print, flush=True))
        return 0
    named = [text.partition("=")[2] for text in settings if text.startswith("run=")]
    runs += named
    if len(runs) != 1 or options.fresh or options.compare:
        raise ConfigError(
            "eval: expected suite=NAME with run=RUN or model=NAME (several separated by commas), or one RUN alone for "
            "the evaluator of its own graph; for example creditgraph eval run=runs/toy_srpo-s0 suite=toy."
        )
    return evaluate_own(Path(runs[0]), [text for text in settings if not text.startswith("run=")])


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 (a job's time limit, preemption) raise SystemExit, so that the engine is closed first."""
    from creditgraph.pipeline.run.stops import EXIT_CODES

    def leave(number: int, frame: FrameType | None) -> None:
        print(f"creditgraph eval: {signal.Signals(number).name}; start again to continue.", file=sys.stderr, flush=True)
        sys.exit(EXIT_CODES["preempted"])

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Bare run directories and key=value settings; a run's name may hold a "=", so an existing directory is a run.

    >>> split_arguments(["runs/a", "suite=toy"])
    (['runs/a'], ['suite=toy'])
    """
    runs = [text for text in arguments if "=" not in text or Path(text).is_dir()]
    return runs, [text for text in arguments if text not in runs]


def evaluate_own(run: Path, overrides: Sequence[str]) -> int:
    """Runs every evaluator that has a final pass on the newest weights; prints the metrics and writes RUN/eval.json."""
    from creditgraph.pipeline.run.compose.overrides import parse_settings
    from creditgraph.pipeline.run.replay import Replay

    replay = Replay(run, parse_settings(overrides))
    try:
        names = [n.name for n in replay.graph.nodes if n.cls.final_pass]
        if not names:
            raise ConfigError(
                f"{run}: its graph has no evaluator with a final pass; add a node such as evaluator.accuracy, or "
                "evaluate a suite with suite=NAME."
            )
        done = replay.newest_checkpoint() + 1
        metrics: dict[str, float] = {"iteration": float(done)}
        for name in names:
            metrics |= replay.again(name, done, iterations=done).metrics
    finally:
        replay.close()
    for note in replay.notes:
        print(f"note: {note}")
    for name, value in metrics.items():
        print(f"{name} = {value:.6g}")
    target = run / "eval.json"
    write_json(target, {"overrides": list(overrides), "metrics": metrics})
    print(f"wrote {target}")
    return 0
