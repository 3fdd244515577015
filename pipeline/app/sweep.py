"""`-m`: one configuration for every combination of values, in the syntax of hydra's basic sweeper."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from creditgraph.pipeline.core.errors import ConfigError, GraphError
from creditgraph.pipeline.run.compose.choices import search_dirs
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment, compose
from creditgraph.pipeline.run.compose.overrides import hydra_overrides, parse_overrides


def combinations(overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> list[list[str]]:
    """Overrides of every run: key=a,b, key=choice(a,b) and key=range(0,3) take one value each.

    The last key varies fastest.

    >>> combinations(["run.seed=0,1", "model.path='x,y'", "run.iterations=range(1,3)"])[1]
    ['run.seed=0', "model.path='x,y'", 'run.iterations=2']

    Raises:
        ConfigError: an override that is not one, or a sweep without a finite number of values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    dirs = search_dirs(config_dirs)
    parser = OverridesParser.create()
    choices: list[list[str]] = []
    # The composed form quotes values that hydra's grammar cannot read; its last item may be a further search path.
    for text, composed in zip(overrides, hydra_overrides(parse_overrides(overrides, dirs), dirs), strict=False):
        try:
            override = parser.parse_override(composed)
        except HydraException as error:
            raise ConfigError(f"override '{text}': {str(error).splitlines()[0]}") from error
        values: list[str] = []
        if override.is_choice_sweep() or override.is_range_sweep():
            values = list(override.sweep_string_iterator())
        elif override.is_sweep_override():
            key = override.key_or_group
            raise ConfigError(
                f"override '{text}': a sweep without a list of values; expected {key}=a,b, {key}=choice(a,b) or "
                f"{key}=range(start,stop)."
            )
        # Values keep the quotes of the grammar, and the key its "+" or "~": the text is composed again.
        choices.append([f"{text.partition('=')[0]}={value}" for value in values] or [text])
    return [list(chosen) for chosen in itertools.product(*choices)]


def build_all(runs: Sequence[Sequence[str]], config_dirs: Sequence[str | Path] = ()) -> list[Experiment]:
    """The checked experiment of each run's overrides.

    Raises:
        ConfigError: runs that do not compose or whose graph is wrong; the mistakes of all runs in one message, those
            that several runs share once.
    """
    experiments = []
    mistakes: dict[str, list[str]] = {}
    for overrides in runs:
        name = " ".join(overrides) or "configuration"
        try:
            experiments.append(build_experiment(compose(overrides, config_dirs), name))
        except (ConfigError, GraphError) as error:
            if len(runs) == 1:
                raise
            for problem in getattr(error, "problems", [str(error)]):
                mistakes.setdefault(problem, []).append(name)
    if mistakes:
        wrong = len(runs) - len(experiments)
        sentences = [
            problem if len(names) == len(runs) else f"{names[0]}: {problem}" if len(names) == 1
            else f"{names[0]} and {len(names) - 1} more: {problem}"
            for problem, names in mistakes.items()
        ]  # fmt: skip
        raise GraphError(sentences, f"-m: {wrong} of {len(runs)} runs cannot start, so none does")
    return experiments


def check_distinct(runs: Sequence[Path]) -> None:
    """Raises ConfigError when two runs of a sweep have the same directory."""
    for number, run in enumerate(runs):
        if run in runs[:number]:
            raise ConfigError(f"-m: two runs would share {run}; expected run names that differ. Do not set run.name.")
