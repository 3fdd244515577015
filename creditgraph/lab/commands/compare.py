"""`creditgraph compare`: which methods learn faster than GRPO at equal sampled tokens, on the embedded task.

Each run is a `creditgraph train` in --output, continued until it has sampled its tokens; finished ones are kept, so the
command can be stopped and started again, or given more seeds, methods or tokens. Prints the table and writes table.md,
result.json and compare.png. docs/lab.md explains the columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_config_dir, add_output, add_settings
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.run.run_directory import write_aside, write_json

SUMMARY = "Train methods at equal sampled tokens and test which learn faster than GRPO."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph compare                                   # every listed method, three seeds, 400k tokens\n"
        "  creditgraph compare --methods srpo vineppo --tokens 1000000 --seeds 0 1 2 3 4 --jobs 2\n"
        "  creditgraph compare --set learner.optimizer.lr=3e-4   # settings for all runs\n"
        "  creditgraph compare --report                          # table and figure of the finished runs"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="methods or recipes, settings after commas; grpo comes first anyway",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run per method and seed")
    parser.add_argument("--tokens", type=float, default=400_000, help="sampled tokens per run, evaluation not counted")
    parser.add_argument(
        "--threshold", type=float, help="accuracy to reach; by default three quarters of what grpo gains"
    )
    parser.add_argument("--every", type=int, default=10, help="iterations between evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    add_settings(parser, "settings for all runs")
    add_config_dir(parser, "graph/, recipe/ …")
    add_output(parser, "DIR", "folder for runs and results", type=Path, default=Path("runs/compare"))
    parser.add_argument("--report", action="store_true", help="train nothing")


def main(options: argparse.Namespace) -> int:
    """Trains, writes table and figure; exit code 1 when a run failed."""
    if options.tokens <= 0 or options.jobs < 1 or options.every < 1:
        raise ConfigError("expected --tokens above 0, --jobs and --every of at least 1.")
    from creditgraph.lab.bench.compare_report import analyse, as_json, draw, table
    from creditgraph.lab.bench.methods import choose_methods
    from creditgraph.lab.bench.training_runs import Plan, train_all
    from creditgraph.lab.bench.warm import Warm
    from creditgraph.pipeline.run.metrics import plain

    started = time.monotonic()
    folder = options.output.resolve()
    settings = (f"evaluator.every={options.every}", "run.record.every=0", *options.set)
    plan = Plan(budget=options.tokens, folder=folder, overrides=settings, config_dirs=tuple(options.config_dir))
    methods = choose_methods(options.methods, options.config_dir, to_train=True)
    for method in methods:
        method.experiment(*settings, config_dirs=options.config_dir)  # a mistake shows before anything is trained
    failed = {}
    if not options.report:
        with Warm() as warm:
            failed = train_all(plan, methods, options.seeds, options.jobs, warm.run, _say)
    curves = {m.name: {s: plan.curve(m, s) for s in options.seeds} for m in methods}
    if not any(len(c.tokens) for by_seed in curves.values() for c in by_seed.values()):
        why = next((f"{name}: {problem}" for name, problem in failed.items()), "train first, without --report")
        raise RunError(f"no run in {folder} has been evaluated ({why}).")
    rows, threshold = analyse(curves, options.tokens, options.threshold)
    notes = [f"Failed: {name} ({problem})." for name, problem in failed.items()]
    text = "\n".join([table(rows, options.tokens, threshold), *notes])
    write_aside(folder / "table.md", text + "\n", "--output DIR")
    result = {"settings": vars(options), "threshold": threshold, "methods": as_json(rows, curves), "failed": failed}
    write_json(folder / "result.json", plain(result), "--output DIR")
    draw(curves, options.tokens, threshold, folder / "compare.png")
    print(f"{text}\n\n{time.monotonic() - started:.0f} s; wrote {folder}/{{table.md,result.json,compare.png}}")
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
