"""Checks that a method of ours fails by its definition, and why."""

from collections.abc import Mapping
from typing import Any

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.turns.gigpo import GiGPO
from creditgraph.components.advantage.turns.turn_group import TurnGroup
from creditgraph.components.learner.objective.cispo import CISPO
from creditgraph.components.learner.objective.fipo import FIPO
from creditgraph.components.learner.objective.gspo import GSPO
from creditgraph.components.learner.objective.trace import Trace

_EARLY = "a λ-trace weighs token k by (1 − d^{T−k+1})/(1 − d), so early tokens more than late ones"
_MAXRL = "MaxRL divides by the mean of the group, the share of correct responses where rewards are 0 and 1"
_STATES = "a turn whose state others visit counts in both parts, a turn alone in its state in the episode's only"
_TWICE = "a turn's own reward counts in its comparison and in the outcome, what it leads to in the outcome only"

# Class → check of `creditgraph audit` → why its failure is wanted.
DECLARED: Mapping[type, Mapping[str, str]] = {
    CISPO: {"loss_clip": "clipping bounds a token's weight and stops no token"},
    FIPO: {"loss_gradient": "the weight that later tokens give to an advantage has no gradient of its own"},
    GiGPO: dict.fromkeys(("gradient_stop", "gradient_turns"), _STATES),
    GSPO: {"loss_token_credit": "one ratio of the whole response moves all of its tokens alike"},
    TurnGroup: {"gradient_turns": _TWICE},
    Trace: dict.fromkeys(("loss_chain", "loss_lengths"), _EARLY),
}


def declared_of(made: Any) -> dict[str, str]:
    """Declared failures of a component or objective: of the table, and of its attribute `audit_declares`."""
    if isinstance(made, GroupAdvantage) and made.config.normalize == "over_mean":
        return {"reward_shift": _MAXRL, "monotone": _MAXRL}
    table = next((checks for cls, checks in DECLARED.items() if isinstance(made, cls)), {})
    return {**table, **getattr(made, "audit_declares", {})}
