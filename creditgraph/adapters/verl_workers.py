"""verl's own model as a policy that scores texts, on the workers that train it."""

from typing import Any

import torch
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from creditgraph.adapters.workers import WorkerPolicy


class VerlPolicy(WorkerPolicy):
    """Scores by the function of verl's trainers.

    Args:
        trainer: one of them, whose workers are there.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # Every process gets as many whole micro-batches.
        rollout, workers = trainer.config.actor_rollout_ref.rollout, trainer.actor_rollout_wg
        micro = 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu or 1
        super().__init__("verl", trainer.tokenizer, workers.world_size * micro)

    def rows(self, ids: Tensor, read: Tensor, width: int, temperature: float) -> Tensor:
        """See `WorkerPolicy.rows`."""
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
        return torch.stack([computed.batch["old_log_probs"], computed.batch["entropys"]], 1)
