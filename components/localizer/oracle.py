"""True first errors, for tasks that know them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from components.models.load import load_tokenizer
from components.rollouts.thoughts import STEP_FRACTION, has_oracle, num_thoughts, true_first_errors
from pipeline.core.component import Component, same_rows
from pipeline.core.errors import DataError
from pipeline.core.payloads import Policy, Prompts, StepErrors, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One step per failure."""

    errors: Annotated[StepErrors, same_rows("failures")]


class OracleLocalizer(Component):
    """h* = the first thought that is wrong. Only the embedded task "chains" can tell."""

    metrics = STEP_FRACTION

    _tokenizer: Any = None

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy | None = None) -> Outputs:
        """Looks up every failure's first error; raises DataError for a task without an oracle."""
        if not has_oracle(prompts):
            tasks = sorted({str(row.get("task", "unnamed")) for row in prompts.metadata})
            raise DataError(
                f"node '{self.context.node}': localizer.oracle needs a task whose steps can be checked; found "
                f"{', '.join(tasks)}, "
                "wanted chains. Use localizer.self or localizer.uniform."
            )
        if self._tokenizer is None:
            self._tokenizer = policy.tokenizer if policy is not None else load_tokenizer(self.context.model)
        step = true_first_errors(prompts, failures, self._tokenizer)
        self.context.log(step_fraction=float(((step - 1) / num_thoughts(failures)).sum()) / max(len(failures), 1))
        return Outputs(errors=StepErrors(uid=failures.uid, step=step, source=["oracle"] * len(failures)))
