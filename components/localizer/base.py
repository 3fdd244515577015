"""The base of localizers: their outputs and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from creditgraph.components.rollouts.thoughts import STEP_FRACTION, num_thoughts
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import StepErrors, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One step per failure."""

    errors: Annotated[StepErrors, same_rows("failures")]


class Localizer(Component):
    """Base of localizers, which all accept `failures`, `prompts` and `policy`, so that `use` changes the method."""

    metrics: ClassVar[tuple[Metric, ...]] = (STEP_FRACTION,)

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Thoughts."""
        return frozenset({"thoughts"})

    def outputs(self, failures: Trajectories, step: Tensor, source: list[str]) -> Outputs:
        """Logs and returns the localised step, int64 [N] from 1, of each failure and how it was localised."""
        fraction = (step - 1) / num_thoughts(failures)
        self.context.log(step_fraction=float(fraction.sum()) / max(len(failures), 1))
        return Outputs(errors=StepErrors(uid=failures.uid, step=step, source=source))
