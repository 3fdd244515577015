"""A trainer's own model as a policy that scores texts, on the workers that train it."""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged

AT_ONCE = 1024
"""rows that are sent to the workers at a time, padded to the longest of them"""


class WorkerPolicy(Policy):
    """Scores with the model that is trained, as a trainer computes the log-probs of its responses.

    It needs no server, so the trainer's may sleep. Texts that continue responses are a server's.

    Args:
        name: of the trainer, in errors.
        tokenizer: of the model.
        multiple: numbers of rows that workers take are multiples of it.
        temperature: the only one at which they score; None without such a limit.
    """

    version = 0

    def __init__(self, name: str, tokenizer: Any, multiple: int, temperature: float | None = None) -> None:
        self.name, self.tokenizer, self.multiple, self.temperature = name, tokenizer, multiple, temperature

    @abstractmethod
    def rows(self, ids: Tensor, read: Tensor, width: int, temperature: float) -> Tensor:
        """Scores rows by a function of the trainer.

        Args:
            ids, read: int64 [B, T], prompts padded on the left and responses padded on the right; 1 at tokens.
            width: of the responses.
            temperature: of the distributions.

        Returns:
            float32 [B, 2, width], log-probs and entropies [nats], or [B, 1, width] of a trainer that computes none of
            these, which are NaN then.
        """

    def generate(self, requests: Requests) -> Completions:
        """Not by workers."""
        raise RunError(
            f"{self.name}'s workers score texts and sample none; name a server that samples by --endpoint=URL."
        )

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Policy.score`; without further tokens."""
        if top:
            raise RunError(
                f"{self.name}'s workers: asked for {top} further tokens, which they do not give. Choose another graph."
            )
        if self.temperature not in (None, temperature):
            raise RunError(
                f"{self.name}'s workers: asked for log-probs at temperature {temperature:g}, but they give those at "
                f"{self.temperature:g}."
            )
        before, after = context.to_lists(), tokens.to_lists()
        found: list[Tensor] = [torch.zeros(2, 0)]
        size = max(1, AT_ONCE // self.multiple) * self.multiple
        for first in range(0, len(before), size):
            rows = [*range(first, min(first + size, len(before)))]
            filled = rows + rows[-1:] * (math.ceil(len(rows) / self.multiple) * self.multiple - len(rows))
            scores = self.rows(*_padded([before[i] for i in filled], [after[i] for i in filled]), temperature)
            if scores.shape[1] == 1:
                scores = torch.cat([scores, torch.full_like(scores, torch.nan)], 1)
            found += [scores[place, :, : len(after[i])].float().cpu() for place, i in enumerate(rows)]
        flat = torch.cat(found, 1)
        return Scores(logprobs=tokens.with_values(flat[0]), entropies=tokens.with_values(flat[1]))


def _padded(before: list[list[int]], after: list[list[int]]) -> tuple[Tensor, Tensor, int]:
    """Ids, 1 at tokens, and the width of the responses."""
    prompts = Jagged.from_rows([row[::-1] for row in before], torch.int64)
    responses = Jagged.from_rows(after, torch.int64)
    ids = torch.cat([prompts.to_padded().flip(1), responses.to_padded()], 1)
    read = torch.cat([_ones(prompts).flip(1), _ones(responses)], 1)
    return ids, read, responses.to_padded().shape[1]


def _ones(rows: Jagged) -> Tensor:
    return rows.with_values(torch.ones_like(rows.values)).to_padded()
