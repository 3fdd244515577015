"""`creditgraph resets`: will resets pay for this policy on these problems? Before any training.

docs/lab.md explains the numbers.
"""

import argparse
import json
from pathlib import Path

from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_config_dir, add_trust
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Whether resets to the first error will pay for a policy, measured on samples before training."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph resets recipe=toy_srpo                        # the recipe's model and problems\n"
        "  creditgraph resets recipe=toy_srpo data=chains_late --samples 32\n"
        "  creditgraph resets runs/toy_grpo-s0                       # the newest checkpoint of a run\n\n"
        + OVERRIDES_HELP
    )
    parser.add_argument("arguments", nargs="+", metavar="RUN|key=value", help="a run, or a recipe with settings")
    parser.add_argument("--prompts", type=int, default=32, help="problems (default: 32)")
    parser.add_argument(
        "--samples", type=int, default=16, help="suffixes per failure, fewest responses per problem (default: 16)"
    )
    parser.add_argument("--seed", type=int, default=0, help="key of all draws (default: 0)")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    add_config_dir(parser, "graph/, recipe/ …")


def main(options: argparse.Namespace) -> int:
    """Prints tables and advice."""
    if options.prompts < 2 or options.samples < 8:
        raise ConfigError("expected --prompts of at least 2 (for standard errors) and --samples of at least 8.")
    # The name of a run may hold settings.
    runs = [text for text in options.arguments if "=" not in text or Path(text).is_dir()]
    if len(runs) > 1 or (runs and len(options.arguments) > 1):
        raise ConfigError("expected one run directory, or recipe=NAME with settings, not both.")
    from transformers.utils import logging

    from creditgraph.lab.resets.gate import measure
    from creditgraph.lab.resets.show import numbers, predict, tables
    from creditgraph.pipeline.app.credit.sessions import learner_of
    from creditgraph.pipeline.core.sockets import Wire
    from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
    from creditgraph.pipeline.run.metrics import plain
    from creditgraph.pipeline.run.replay import Replay

    logging.disable_progress_bar()
    weights = None
    if runs:
        with Replay(Path(runs[0])) as replay:
            experiment = replay.experiment
            weights = replay.value(Wire(learner_of(replay.graph).name, "weights"), replay.newest_checkpoint())
    else:
        experiment = build_experiment(compose(options.arguments, options.config_dir), "resets")
    gate = measure(experiment, weights, options.prompts, options.samples, options.seed)
    predicted = predict(gate)
    if options.json:
        print(json.dumps(plain(numbers(gate, predicted)), indent=1))
    else:
        print(tables(runs[0] if runs else " ".join(options.arguments), gate, predicted))
    return 0
