"""Settings of `learner.hf`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.learner.settings import LearnerSettings

Recompute = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class HFSettings(LearnerSettings):
    """Settings of `learner.hf`: those of every learner, and what transformers adds."""

    recompute: Recompute = "none"
    """activations recomputed in the backward pass: none; full, all but the layers' inputs: least memory, about a third
    more time"""
