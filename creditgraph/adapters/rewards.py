"""A trainer's own rewards, for what a graph samples."""

from collections.abc import Hashable, Sequence
from typing import Any

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import place_of, verdicts
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories


class HostRewards(Verifier):
    """Rewards of texts that continue a trainer's responses, computed from what the trainer has on their prompts.

    Attributes:
        credit: the graph.
        rows: of each prompt, whose place ends its uid, what its rewards are computed from.
    """

    def __init__(self, credit: CreditGraph) -> None:
        self.credit = credit
        self.rows: Sequence[Any] = ()

    def keep(self, group: Sequence[Hashable], rows: Sequence[Any]) -> None:
        """Takes the first row of each group of a batch."""
        first: dict[Hashable, Any] = {}
        for name, row in zip(group, rows, strict=True):
            first.setdefault(name, row)
        self.rows = list(first.values())

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory; invalid where it is no finite number."""
        rows = [self.rows[place] for place in place_of(trajectories.prompt_uid).tolist()]
        found = self.rewards(rows, trajectories)
        return verdicts(trajectories.uid, found, self.credit.right_above, "the trainer's reward is not a finite number")

    def rewards(self, rows: Sequence[Any], trajectories: Trajectories) -> Sequence[float | None]:
        """One per trajectory, with the row of its prompt."""
        raise NotImplementedError

    def texts(self, trajectories: Trajectories) -> list[str]:
        """Responses without special tokens."""
        return list(
            self.credit.tokenizer.batch_decode(trajectories.response_tokens.to_lists(), skip_special_tokens=True)
        )
