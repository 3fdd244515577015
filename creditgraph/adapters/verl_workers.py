"""verl's own model as a policy that scores texts, on the workers that train it."""

import math
from typing import Any

import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Scores
from creditgraph.pipeline.core.jagged import Jagged

AT_ONCE = 1024
"""rows that are sent to the workers at a time, padded to the longest of them"""


class WorkerPolicy(Policy):
    """Scores with the model that is trained, as verl computes the log-probs of its responses.

    It needs no server, so the trainer's may sleep. Texts that continue responses are a server's.

    Args:
        trainer: one of verl's trainers, whose workers are there.
    """

    version = 0

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.tokenizer = trainer, trainer.tokenizer

    def generate(self, requests: Requests) -> Completions:
        """Not by workers."""
        raise RunError("verl's workers score texts and sample none; name a server that samples by --endpoint=URL.")

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Policy.score`; without further tokens."""
        if top:
            raise RunError(
                f"verl's workers: asked for {top} further tokens, which they do not give. Choose another graph."
            )
        before, after = context.to_lists(), tokens.to_lists()
        # Every process gets as many whole micro-batches.
        rollout, workers = self.trainer.config.actor_rollout_ref.rollout, self.trainer.actor_rollout_wg
        micro = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu or 1
        multiple = workers.world_size * micro
        found: list[torch.Tensor] = []
        size = max(1, AT_ONCE // multiple) * multiple
        for first in range(0, len(before), size):
            rows = [*range(first, min(first + size, len(before)))]
            rows += rows[-1:] * (math.ceil(len(rows) / multiple) * multiple - len(rows))
            found += self._scored([before[i] for i in rows], [after[i] for i in rows], temperature)
        kept = [row[:, : len(ids)] for row, ids in zip(found, after, strict=False)]
        flat = torch.cat([torch.zeros(2, 0), *kept], 1)
        return Scores(logprobs=tokens.with_values(flat[0]), entropies=tokens.with_values(flat[1]))

    def _scored(self, before: list[list[int]], after: list[list[int]], temperature: float) -> list[torch.Tensor]:
        """Of each row float32 [2, T], log-probs and entropies, by the function of verl's trainer."""
        prompts, responses = (
            Jagged.from_rows([row[::-1] for row in before], torch.int64),
            Jagged.from_rows(after, torch.int64),
        )
        ids = torch.cat([prompts.to_padded().flip(1), responses.to_padded()], 1)
        read = torch.cat([_ones(prompts).flip(1), _ones(responses)], 1)
        width = responses.to_padded().shape[1]
        data = DataProto.from_dict(
            tensors={
                "input_ids": ids,
                "attention_mask": read,
                "position_ids": (read.cumsum(1) - 1).clamp(min=0),
                "prompts": ids[:, :-width],
                "responses": ids[:, -width:],
                "response_mask": read[:, -width:],
            },
            meta_info={"temperature": temperature, "global_token_num": read.sum(1).tolist()},
        )
        # Of a trainer with a queue too, whose own takes keys of it.
        computed, _ = RayPPOTrainer._compute_old_log_prob(self.trainer, data)
        return list(torch.stack([computed.batch["old_log_probs"], computed.batch["entropys"]], 1).float().cpu())


def _ones(rows: Jagged) -> torch.Tensor:
    return rows.with_values(torch.ones_like(rows.values)).to_padded()
