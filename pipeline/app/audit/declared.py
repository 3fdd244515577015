"""Checks that a method of ours fails by its definition, and why."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from creditgraph.components.advantage.counterfactual import Counterfactual
from creditgraph.components.advantage.gae import GAE
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.prime import Prime
from creditgraph.components.advantage.retry import RetryAdvantage
from creditgraph.components.advantage.trees.tree import TreeAdvantage
from creditgraph.components.advantage.turns.gigpo import GiGPO
from creditgraph.components.advantage.turns.turn_group import TurnGroup
from creditgraph.components.learner.objective.cispo import CISPO
from creditgraph.components.learner.objective.fipo import FIPO
from creditgraph.components.learner.objective.gspo import GSPO
from creditgraph.components.learner.objective.trace import Trace
from creditgraph.pipeline.core.registry import known_components, load_class

_EARLY = "a λ-trace weighs token k by (1 − d^{T−k+1})/(1 − d), so early tokens more than late ones"
_MAXRL = "MaxRL divides by the mean of the group, the share of correct responses where rewards are 0 and 1"
_STATES = "a turn whose state others visit counts in both parts, a turn alone in its state in the episode's only"
_BATCH = "it is whitened over the batch"
_TWICE = "a turn's own reward counts in its comparison and in the outcome, what it leads to in the outcome only"

# Class → check of `creditgraph audit` → why its failure is wanted.
DECLARED: Mapping[type, Mapping[str, str]] = {
    CISPO: {"loss_clip": "clipping bounds a token's weight and stops no token"},
    Counterfactual: {"records_baseline": "rewards are shaped by what a revision gains"},
    FIPO: {"loss_gradient": "the weight that later tokens give to an advantage has no gradient of its own"},
    GAE: {"records_baseline": f"the baseline is a critic's, or {_BATCH}"},
    GiGPO: dict.fromkeys(("gradient_stop", "gradient_turns"), _STATES),
    GSPO: {"loss_token_credit": "one ratio of the whole response moves all of its tokens alike"},
    Prime: {"records_baseline": _BATCH},
    RetryAdvantage: {"records_silent": "in its first stage a KL term alone holds the first attempts"},
    TreeAdvantage: {"records_outside": "tokens that rows of a tree share are trained on once, in one of them"},
    TurnGroup: {"gradient_turns": _TWICE},
    Trace: dict.fromkeys(("loss_chain", "loss_lengths"), _EARLY),
}


def declared_of(made: Any) -> dict[str, str]:
    """Declared failures of a component or objective: of the table, and of its attribute `audit_declares`."""
    if isinstance(made, GroupAdvantage) and made.config.normalize == "over_mean":
        return {"reward_shift": _MAXRL, "monotone": _MAXRL}
    return {**_of_class(type(made)), **getattr(made, "audit_declares", {})}


def declared_of_run(run: Path, node: str) -> Mapping[str, str]:
    """What the table has of the class of a run's node; {} for one that is not ours, whose code is not loaded."""
    try:
        use = str(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["nodes"][node]["use"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}
    return _of_class(load_class(use)) if use in known_components() else {}


def _of_class(kind: type) -> Mapping[str, str]:
    return next((checks for cls, checks in DECLARED.items() if issubclass(kind, cls)), {})
