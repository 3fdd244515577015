"""More credit for the tokens that plan (HICRA)."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.advantage.explanations import decimal
from creditgraph.components.advantage.group import Outputs
from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.rollouts.segments import close_segments, rank_in_row, segment_of_token
from creditgraph.components.text.stops import decode_rows
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Credit, Trajectories, check_aligned


@takes_lists
def amplified(advantage: Tensor, planning: Tensor, alpha: float) -> Tensor:
    """A + α |A| where `planning`, else A; all [n]. What is right gains by it, and what is wrong is blamed less."""
    return torch.where(planning, advantage + alpha * advantage.abs(), advantage)


@takes_lists
def most_uncertain(entropies: Jagged, mask: Jagged, share: float) -> Tensor:
    """bool [total]: the `share` of each row's tokens in `mask` of highest entropy, rounded up; the first of equals."""
    rank = rank_in_row(entropies.with_values(torch.where(mask.values, entropies.values, -torch.inf)))
    count = (share * mask.sum().double()).ceil()
    return mask.values & (rank.values < count[mask.row_ids])


class Amplify(Component):
    """Turns the credit of planning tokens from A into A + α |A| and leaves the others as they are.

    Source: HICRA (2509.03646; the formula and α are second-hand). Its planning tokens belong to "strategic grams",
    phrases that are found by clustering correct solutions; that list is not built here. Our reading: `entropy` takes
    the tokens with the highest sampling entropy of each response, `keywords` all tokens of the thoughts in which one of
    `keywords` occurs. A response without thoughts is one thought.
    """

    paper = "2509.03646"
    metrics = (Metric("planning_share", "share", "trained tokens whose credit is amplified"),)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Which tokens plan, and how much more they count."""

        alpha: float = 0.2
        """α of A + α |A|"""
        tokens: Literal["entropy", "keywords"] = "entropy"
        """how planning tokens are found"""
        share: float = 0.2
        """part of each response's trained tokens that plan, by `entropy`"""
        keywords: tuple[str, ...] = ("wait", "alternatively", "let's", "first", "instead", "check")
        """strings of which one marks a thought as planning, by `keywords`; upper and lower case are one"""

        def __post_init__(self) -> None:
            if self.alpha < 0 or not 0 <= self.share <= 1:
                raise ValueError(f"expected alpha ≥ 0 and 0 ≤ share ≤ 1, got {self.alpha} and {self.share}.")
            if not all(self.keywords) or (self.tokens == "keywords" and not self.keywords):
                raise ValueError(f"expected one or more non-empty keywords, got {list(self.keywords)}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Entropies, if they mark planning tokens."""
        return frozenset({"entropies"} if config.tokens == "entropy" else ())

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first used."""
        return load_tokenizer(self.context.model)

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Amplifies the credit of one batch."""
        check_aligned(trajectories, credit)
        settings = self.config
        if settings.tokens == "entropy":
            known_entropies(trajectories.entropies.values, "advantage.amplify")
            planning = most_uncertain(trajectories.entropies, credit.mask, settings.share)
        else:
            planning = self._marked(trajectories)
        trained = credit.mask.values
        self.context.log(planning_share=float((planning & trained).sum()) / max(int(trained.sum()), 1))
        advantage = amplified(credit.advantage.values, planning, settings.alpha)
        return Outputs(credit=credit.replace(advantage=credit.advantage.with_values(advantage)))

    def _marked(self, trajectories: Trajectories) -> Tensor:
        """bool [total]: tokens of the thoughts in which a keyword occurs."""
        tokens = trajectories.response_tokens
        if not len(tokens.values):
            return torch.zeros(0, dtype=torch.bool)
        ends = close_segments(trajectories.thought_ends, tokens.lengths)
        rows = zip(tokens.to_lists(), ends.to_lists(), strict=True)
        thoughts = decode_rows(self.tokenizer, [row[a:b] for row, bounds in rows for a, b in pairwise([0, *bounds])])
        words = [word.lower() for word in self.config.keywords]
        marked = torch.tensor([any(word in thought.lower() for word in words) for thought in thoughts])
        return marked[segment_of_token(ends, tokens)]

    def explain(self, outputs: dict[str, Any], **inputs: Any) -> list[str]:
        """How many tokens were amplified."""
        changed = outputs["credit"].advantage.values != inputs["credit"].advantage.values
        counts = inputs["credit"].advantage.with_values(changed).sum().tolist()
        return [f"A + {decimal(self.config.alpha)}·|A| on {count} planning tokens, A on the others" for count in counts]
