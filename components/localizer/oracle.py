"""True first errors, for tasks that provide them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from components.localizer.base import Localizer, Outputs
from components.models.load import load_tokenizer
from components.rollouts.thoughts import has_oracle, true_first_errors
from components.tasks import TASKS
from pipeline.core.errors import DataError
from pipeline.core.handles import Policy
from pipeline.core.payloads import Prompts, Trajectories


class OracleLocalizer(Localizer):
    """Returns the true first wrong thought as the step; task families provide it."""

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded if the graph wires no policy."""
        return load_tokenizer(self.context.model)

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy | None = None) -> Outputs:
        """Looks up every failure's first error; raises DataError for a task without an oracle."""
        if not has_oracle(prompts):
            found = ", ".join(sorted({str(row.get("task", "unnamed")) for row in prompts.metadata}))
            raise DataError(
                f"node '{self.context.node}': localizer.oracle expected problems of a task family "
                f"({', '.join(TASKS)}), whose steps can be verified, got {found}. Use localizer.self or "
                "localizer.uniform."
            )
        # The policy's tokenizer is already loaded; loading another one takes a second.
        tokenizer = policy.tokenizer if policy is not None else self.tokenizer
        step = true_first_errors(prompts, failures, tokenizer)
        return self.outputs(failures, step, ["oracle"] * len(failures))
