"""`creditgraph creditbench`: the credit of methods beside true values, per thought of a response or turn of an episode.

Prints the table and writes table.md, result.json and creditbench.png to --output. docs/lab.md explains the
columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_config_dir, add_output, add_settings, add_trust
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.run_directory import make_folder, write_aside, write_json

SUMMARY = "Compare the credit of methods with true values, per thought or turn."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph creditbench                                   # every method, three seeds, the untrained model\n"
        "  creditgraph creditbench --quick                           # two methods, one seed, a few seconds\n"
        "  creditgraph creditbench --methods srpo vineppo,value.continuations=20 --seeds 0 1 2 3 4\n"
        "  creditgraph creditbench --run runs/toy_grpo-s0            # at the newest checkpoint of a run\n"
        "  creditgraph creditbench --suite turns                     # credit per turn in an environment\n"
        "  creditgraph creditbench --predict RESULTS --scores SCORES               # which score predicts the gain?"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="methods or recipes, settings after commas; the baseline comes first anyway",
    )
    parser.add_argument(
        "--suite",
        choices=["responses", "turns", "stop"],
        default="responses",
        help="what is judged: thoughts of responses, turns of episodes (a thought each), or stop-or-continue's turns",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="one batch of prompts and rollouts per seed"
    )
    parser.add_argument("--samples", type=int, default=48, help="continuations per thought or turn boundary (even)")
    parser.add_argument(
        "--max-rows", type=int, default=128, help="trajectories or episodes per method and seed that get true values"
    )
    parser.add_argument("--run", type=Path, help="run directory whose newest checkpoint is the policy")
    parser.add_argument("--iteration", type=int, help="with --run: the checkpoint after this iteration, from 0")
    parser.add_argument(
        "--predict",
        nargs="+",
        type=Path,
        metavar="RESULTS",
        help="measure nothing: results.json of tools/evidence, or folders of creditgraph compare, against --scores",
    )
    parser.add_argument(
        "--scores",
        type=Path,
        metavar="SCORES",
        help="with --predict: scores.json of tools/evidence, or DIR/CELL[/STATE]/result.json",
    )
    add_settings(parser, "settings for all methods, such as prompts.batch=32")
    add_config_dir(parser, "graph/, recipe/ …")
    add_output(parser, "DIR", "folder for the results", type=Path, default=Path("runs/creditbench"))
    parser.add_argument("--quick", action="store_true", help="one method, one seed, 4 prompts, 8 continuations")


def main(options: argparse.Namespace) -> int:
    """Measures, writes table and figure; with --predict, compares what was measured with the gains of training."""
    if bool(options.predict) != bool(options.scores):
        raise ConfigError("--predict RESULTS needs --scores, and --scores needs --predict.")
    if options.iteration is not None and options.run is None:
        raise ConfigError("--iteration is that of a checkpoint; expected --run with it.")
    if options.predict:
        return _predict(options)
    if options.quick:
        options.methods = options.methods or (["srpo_oracle"] if options.suite == "responses" else ["tree_turns"])
        options.seeds = options.seeds[:1]
        options.samples = 8
        options.set = ["prompts.batch=4", *options.set]
    if options.samples < 2 or options.samples % 2 or options.max_rows < 1:
        raise ConfigError("expected --samples even and at least 2, and --max-rows at least 1.")
    import torch
    from transformers.utils import logging

    from creditgraph.lab.bench.credit_bench import CreditBench, Options
    from creditgraph.lab.bench.credit_report import draw, table
    from creditgraph.lab.bench.methods import SUITES, choose_methods
    from creditgraph.pipeline.run.metrics import plain

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    started = time.monotonic()
    methods = choose_methods(options.methods, options.config_dir, suite=SUITES[options.suite])
    settings = Options(
        samples=options.samples,
        max_rows=options.max_rows,
        run=options.run,
        iteration=options.iteration,
        overrides=tuple(options.set),
        config_dirs=tuple(options.config_dir),
    )
    make_folder(options.output, "--output DIR")  # what cannot be written shows before anything is measured
    bench = CreditBench(methods, options.seeds, settings, lambda text: print(text, file=sys.stderr, flush=True))
    result = bench.measure()
    seconds = time.monotonic() - started
    text = table(result)
    write_aside(options.output / "table.md", text + "\n", "--output DIR")
    result = {"settings": vars(options), "seconds": seconds, **result}
    write_json(options.output / "result.json", plain(result), "--output DIR")
    draw(result, options.output / "creditbench.png")
    print(f"{text}\n\n{seconds:.0f} s; wrote {options.output}/{{table.md,result.json,creditbench.png}}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from creditgraph.lab.prediction.cells import read_cells
    from creditgraph.lab.prediction.study import repeatability_line, study, study_table

    cells, notes = read_cells(options.predict, options.scores)
    for note in notes:
        print(f"note: {note}")
    print(study_table(study(cells)))
    if line := repeatability_line(cells):
        print(f"\n{line}")
    return 0
