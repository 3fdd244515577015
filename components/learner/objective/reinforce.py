"""REINFORCE: −A log π_θ(y_t). No ratio and no clip.

Source: RRPO/SRPO (2605.25507) [P]. On-policy its gradient equals that of the token objective; off-policy it is not
corrected.
"""

from __future__ import annotations

from components.learner.objective.base import Inputs, Meters, Terms
from components.learner.objective.config import Objective


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss."""
    return Terms(loss=inputs.logprobs.with_values(-inputs.advantage.values * inputs.logprobs.values), meters=Meters())
