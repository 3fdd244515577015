"""Names of TRL and verl: each is answered by a setting that exists."""

import re

import pytest

from creditgraph.pipeline.core.foreign import OURS, all_ours, ours
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

# Recipes whose nodes have, between them, every setting that is named; each is composed once.
BASES = (
    ["recipe=toy_grpo"],
    ["recipe=toy_grpo", "engine=vllm"],
    ["recipe=your_own"],
    ["recipe=toy_grpo", "learner.objective.use=ppo_clip"],
)


def _exists(name: str, resolved: list) -> bool:
    """Whether a node's `Config`, the run, the model or a data section has this setting."""
    return any(_in(name, experiment) for experiment in resolved)


def _in(name: str, experiment) -> bool:
    section, *path = name.split(".")
    if section == "data":
        from creditgraph.components.data.sources import Source

        return path[0] in experiment.data and path[1] in Source.__dataclass_fields__
    value = {"run": experiment.run, "model": experiment.model}.get(section)
    if value is None:
        value = experiment.graph[section].config if section in experiment.graph else None
    for part in path:
        if part == "use" and value is not None and len(path) == 1:
            return True
        value = getattr(value, part, "absent") if value is not None else "absent"
        if value == "absent":
            return False
    return True


@pytest.fixture(scope="module")
def experiments() -> list:
    return [build_experiment(compose(base)) for base in BASES]


def test_every_target_exists(experiments) -> None:
    missing = []
    for name, target in OURS.items():
        for part in target.split(", or "):
            key, equals, value = part.partition("=")
            if equals and value != "NAME" and "." not in key:
                compose(["recipe=toy_grpo", part])  # a choice of a group
            elif value != "NAME" and not _exists(key, experiments):
                missing.append(f"{name} → {part}")
    assert missing == []


def test_a_choice_in_the_table_is_one(experiments) -> None:
    chosen = [part for target in OURS.values() for part in target.split(", or ") if re.search(r"\.\w+=\w+$", part)]
    assert chosen == ["learner.objective.use=gspo"]
    build_experiment(compose(["recipe=toy_grpo", *chosen]))


def test_several_foreign_names_of_a_section_are_all_answered() -> None:
    said = all_ours("actor_rollout_ref", {"actor": {"optim": {"lr": 1e-6}}, "rollout": {"n": 8, "unknown": 1}})
    assert said == (
        " Here actor_rollout_ref.actor.optim.lr is called learner.optimizer.lr, "
        "actor_rollout_ref.rollout.n is called sampler.group_size."
    )
    assert ours("nothing_known") == all_ours("mine", {"x": 1}) == ""
