"""`creditgraph evidence`: does a method of one's own learn more than a baseline? In minutes, with controls.

Each run is a `creditgraph train` in --output; finished ones are kept, so the command can be stopped and started again.
docs/evidence.md explains the verdicts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_config_dir, add_output
from creditgraph.pipeline.core.errors import ConfigError

SUMMARY = "Whether a recipe learns more than a baseline: a verdict in minutes, with an exit code."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph evidence recipe=NAME                          # against GRPO, two families, about five minutes\n"
        "  creditgraph evidence recipe=NAME prompts.batch=8 --against grpo_4_steps\n"
        "  creditgraph evidence recipe=NAME --full                   # every family, about an hour\n\n"
        "exit code: 0 helps, 3 hurts, 4 no difference above .03, 5 too noisy; 1 a run failed, 2 a wrong call\n\n"
        + OVERRIDES_HELP
    )
    parser.add_argument("arguments", nargs="+", metavar="key=value", help="recipe=NAME, and settings of it")
    parser.add_argument("--against", default="grpo", metavar="NAME[,SETTING…]", help="its baseline (default: grpo)")
    parser.add_argument("--full", action="store_true", help="every declared family, rates swept for both")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="some cells; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    add_output(parser, "DIR", "folder for runs and results", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--declaration", type=Path, help="cells of your own; by default those that are shipped")
    parser.add_argument("--estimate", action="store_true", help="train nothing: processor seconds that are left")
    parser.add_argument("--again", action="store_true", help="forget the method's finished runs, after a change of it")
    add_config_dir(parser, "graph/, recipe/ …")


def main(options: argparse.Namespace) -> int:
    """Trains what is missing; prints a row per family and the verdict."""
    recipe, *settings = sorted(options.arguments, key=lambda text: not text.startswith("recipe="))
    if not recipe.startswith("recipe=") or options.jobs < 1:
        raise ConfigError("evidence: expected recipe=NAME, settings as key=value, and --jobs of at least 1.")
    from creditgraph.lab.bench.methods import TURNS, choose_methods
    from creditgraph.lab.bench.warm import Warm
    from creditgraph.lab.evidence.declaration import DECLARED, chosen_cells, read_declaration
    from creditgraph.lab.evidence.measure import Lab, compose_all, estimate, forget, measure_all, trainer
    from creditgraph.lab.evidence.trial import CODES, is_of_turns, judge, run_name, trial, trial_text, unfair
    from creditgraph.lab.evidence.verdicts import Results, read_results

    dirs = tuple(Path(folder).resolve() for folder in options.config_dir)
    name = ",".join([recipe.removeprefix("recipe="), *settings])
    own = choose_methods([name], dirs)[-1]
    turns = is_of_turns(own, dirs)
    default = TURNS[0].recipe if turns else options.against
    against = choose_methods([default if options.against == "grpo" else options.against], dirs)[-1]
    if problem := unfair(own, against, dirs):
        _say(f"note: {problem}")
    declared = trial(read_declaration(options.declaration or DECLARED), own, against, options.full, turns)
    names = list(chosen_cells(declared, options.cells))
    with Warm() as warm:
        lab = Lab(
            declaration=declared,
            folder=options.output.resolve(),
            train=trainer(options.jobs, warm.run, _say),
            config_dirs=dirs,
        )
        if options.estimate:
            print(estimate(lab, names, options.jobs))
            return 0
        if wrong := compose_all(lab, names):
            raise ConfigError("\n".join(wrong.values()))
        if options.again:
            forget(lab.folder, names, run_name(own))
        kept = lab.folder / f"{run_name(own)}.json"
        complete = measure_all(lab, names, kept, _say)
    results = Results(declared, read_results(kept))
    print(trial_text(results, own, against, options.full))
    _say(f"wrote {kept}")
    return CODES[judge(results, own, options.full).word] if complete else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
