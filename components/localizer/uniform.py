"""Random resets: a uniformly drawn step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from components.rollouts.thoughts import num_thoughts
from pipeline.core.component import Component, same_rows
from pipeline.core.payloads import Policy, Prompts, StepErrors, Trajectories
from pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One step per seed."""

    errors: Annotated[StepErrors, same_rows("seeds")]


class UniformLocalizer(Component):
    """h* ~ Uniform{1 … K}, K thoughts; no model call (RRPO). Takes the inputs of every localizer, so `use` alone
    changes it."""

    paper = "2605.25507"

    def run(self, *, seeds: Trajectories, prompts: Prompts | None = None, policy: Policy | None = None) -> Outputs:
        """Draws one step per seed, keyed by its prompt and its place among the seeds of that prompt."""
        count = num_thoughts(seeds)
        step = 1 + self.context.rng().integers(keys_within(seeds.prompt_uid), 0, count)
        self.context.log(step_fraction=float(((step - 1) / count).sum()) / max(len(seeds), 1))
        return Outputs(errors=StepErrors(uid=seeds.uid, step=step, source=["uniform"] * len(seeds)))
