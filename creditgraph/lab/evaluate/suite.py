"""Evaluation suites: tasks, and the sampling of their responses. Each is one YAML file in configs/suite."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from creditgraph.components.rollouts.requests import SamplingSettings
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.run.compose.choices import list_choices, read_yaml
from creditgraph.pipeline.run.compose.overrides import deep_merge


@dataclass(frozen=True, kw_only=True)
class SuiteTask(SamplingSettings):
    """One evaluation set and how it is sampled. `temperature` and `top_p` are not those of the greedy pass."""

    data: str = ""
    """a file of configs/data; empty: the task's own name"""
    split: str = ""
    """entry of the data section; empty: eval, or the only one"""
    template: str = ""
    """how a question becomes model input; empty: what the data file says"""
    problems: int = 0
    """number of problems, from the front; 0 uses all"""
    shuffle: bool = False
    """take `problems` in a random order of the data section's seed instead of from the front"""
    in_mean: bool = True
    """whether the task counts in the mean of tasks; off for tasks of another kind, such as programs"""
    greedy: bool = True
    """one response per problem at temperature 0: greedy pass@1"""
    samples: int = 0
    """further responses per problem at `temperature`, for avg@n, pass@k and maj@k"""
    k: tuple[int, ...] = ()
    """values of k for which pass@k and maj@k are reported, from the samples"""
    majority: bool = True
    """report maj@k for k above 2; off for tasks whose responses have no answer to vote on, such as programs"""
    verifier: dict[str, Any] = field(default_factory=dict)
    """verifier component (use) and its settings; empty: what the data file says"""
    origin: dict[str, str] = field(default_factory=dict)
    """setting → where its value comes from: an arXiv id, or "ours" """

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.problems, self.samples) < 0:
            raise ValueError(
                f"expected problems ≥ 0 and samples ≥ 0, got {self.problems} problems and {self.samples} samples."
            )
        if not self.greedy and not self.samples:
            raise ValueError("greedy is off and samples is 0; expected greedy: true, or samples > 0.")
        if self.samples and self.temperature == 0:
            raise ValueError(
                "samples at temperature 0 are all equal; set temperature > 0, or samples: 0 for the greedy pass alone."
            )
        bad = [k for k in self.k if not 1 <= k <= self.samples]
        if bad:
            raise ValueError(
                f"k: expected 1 ≤ k ≤ samples, got k = {bad[0]} and {self.samples} samples. Raise samples or lower k."
            )
        if len(set(self.k)) < len(self.k):
            raise ValueError(f"k: expected each k once, got {list(self.k)}.")
        names = {f.name for f in dataclasses.fields(self)}
        for name in self.origin:
            if name not in names:
                raise ValueError(f"origin: '{name}' is no setting of a task.{did_you_mean(name, names)}")


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """Settings of the search for problems in training data.

    13 words are the default of 2005.14165 (appendix C) and of lm-evaluation-harness; 8 words, flagged from a share of
    .7 on, are those of 2204.02311.
    """

    n: int = 13
    """words per n-gram; a question of 8 to n − 1 words is searched as a whole"""
    share: float = 0.0
    """a problem is flagged when more than this share of its n-grams is in the training data; 0 flags any overlap"""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"n: expected at least 2 words (13 and 8 are common), got {self.n}.")
        if not 0 <= self.share < 1:
            raise ValueError(f"share: expected 0 ≤ share < 1 (0: any overlap), got {self.share}.")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A checked suite.

    Attributes:
        name: name of its file.
        title: title in one line.
        version: raised whenever a change makes results incomparable.
        seed: key of every random stream of the evaluation.
        confidence: confidence level of the intervals.
        resamples: bootstrap draws.
        contamination: settings of the search in training data.
        tasks: name → task, in the order of the file.
    """

    name: str
    title: str
    version: int
    seed: int = 0
    confidence: float = 0.95
    resamples: int = 10_000
    contamination: Contamination = field(default_factory=Contamination)
    tasks: dict[str, SuiteTask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence: expected 0 < confidence < 1, such as 0.95, got {self.confidence}.")
        if self.resamples < 1 or self.version < 1:
            raise ValueError(
                f"expected resamples ≥ 1 and version ≥ 1, got {self.resamples} resamples and version {self.version}."
            )


def load_suite(
    name: str, dirs: Sequence[Path], changes: Mapping[str, Any] | None = None, only: Sequence[str] = ()
) -> Suite:
    """Reads suite/NAME.yaml; the file's `defaults` are merged under every task. All mistakes come in one ConfigError.

    Args:
        name: name of the suite.
        dirs: config folders.
        changes: settings merged over the file's, such as {"seed": 1, "tasks": {"aime_2024": {"samples": 8}}}.
        only: names of the tasks to keep; all when empty.
    """
    known = list_choices("suite", dirs)
    if name not in known:
        raise ConfigError(
            f"suite={name}: no suite of that name; expected a file of configs/suite.{did_you_mean(name, known)}"
        )
    file = read_yaml(known[name])
    problems: list[str] = []
    raw = file.get("tasks")
    if not isinstance(raw, dict) or not raw:
        raise ConfigError(
            f"{known[name]}: tasks: expected one entry per task, such as 'math_500: {{samples: 4, k: [1, 4]}}', got "
            f"{raw!r}."
        )
    changed = dict(changes or {})
    per_task: dict[str, Any] = changed.pop("tasks", None) or {}
    for place, names in (("tasks", per_task), ("tasks=", only)):
        problems += [
            f"{place}{'.' if place == 'tasks' else ''}{n}: no such task in suite {name}.{did_you_mean(n, raw)}"
            for n in names
            if n not in raw
        ]
    defaults = file.get("defaults") or {}
    tasks: dict[str, Any] = {}
    for task, settings in raw.items():
        if only and task not in only:
            continue
        merged = deep_merge(deep_merge(defaults, settings or {}), per_task.get(task) or {})
        values = {"data": task, **merged} if isinstance(merged, dict) else merged
        tasks[str(task)], mistakes = build_config(SuiteTask, values, f"suite {name}: tasks.{task}")
        problems += mistakes
    head = {k: v for k, v in file.items() if k not in ("tasks", "defaults")}
    suite, mistakes = build_config(Suite, {"name": name, **deep_merge(head, changed)}, f"suite {name}")
    if problems or mistakes:
        raise ConfigError("\n".join([*problems, *mistakes]))
    assert isinstance(suite, Suite)
    return dataclasses.replace(suite, tasks=tasks)
