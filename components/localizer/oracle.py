"""True first errors, for tasks that provide them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from creditgraph.components.localizer.base import Localizer, Outputs
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.thoughts import has_oracle, num_thoughts, true_first_errors
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.streams import keys_within


class OracleLocalizer(Localizer):
    """Returns the true first wrong thought as the step; task families provide it."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How reliable the verdicts are."""

        right_share: float = 1.0
        """chance that the true step is given; else the verdict is one of the other steps, drawn uniformly"""

        def __post_init__(self) -> None:
            if not 0 <= self.right_share <= 1:
                raise ValueError(f"expected 0 ≤ right_share ≤ 1 (1 is always right), got {self.right_share}.")

    config: Config

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
        true = true_first_errors(prompts, failures, tokenizer)
        keys, count = keys_within(failures.prompt_uid), num_thoughts(failures)
        rng = self.context.rng()
        # A response of one thought has no wrong step to name.
        right = (rng.uniform(keys, "right") < self.config.right_share) | (count == 1)
        other = rng.integers(keys, 1, count.clamp(min=2), "other")
        step = torch.where(right, true, other + (other >= true).long())
        return self.outputs(failures, step, ["oracle" if r else "wrong" for r in right.tolist()])
