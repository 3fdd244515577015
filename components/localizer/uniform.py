"""Random resets: a uniformly drawn step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from components.rollouts.thoughts import STEP_FRACTION, num_thoughts
from pipeline.core.component import Component, same_rows
from pipeline.core.payloads import Policy, Prompts, StepErrors, Trajectories
from pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One step per failure."""

    errors: Annotated[StepErrors, same_rows("failures")]


class UniformLocalizer(Component):
    """h* ~ Uniform{1 … K}, K thoughts; no model call (RRPO). Takes the inputs of every localizer, so `use` alone
    changes it."""

    paper = "2605.25507"
    metrics = STEP_FRACTION

    def run(self, *, failures: Trajectories, prompts: Prompts | None = None, policy: Policy | None = None) -> Outputs:
        """Draws one step per failure, keyed by its prompt and its place among the failures of that prompt."""
        count = num_thoughts(failures)
        step = 1 + self.context.rng().integers(keys_within(failures.prompt_uid), 0, count)
        self.context.log(step_fraction=float(((step - 1) / count).sum()) / max(len(failures), 1))
        return Outputs(errors=StepErrors(uid=failures.uid, step=step, source=["uniform"] * len(failures)))
