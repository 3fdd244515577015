"""OpenRLHF's own model as a policy that scores texts, on the workers that train it."""

from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.workers import WorkerPolicy


class OpenRLHFPolicy(WorkerPolicy):
    """Scores as OpenRLHF's experience maker does, at its temperature of sampling; it computes no entropies.

    Args:
        maker: the experience maker, whose workers are there.
    """

    def __init__(self, maker: Any) -> None:
        self.maker, ds = maker, maker.args.ds
        self.copies = ds.ring_attn_size * ds.tensor_parallel_size
        processes = len(maker.actor_model_group._actor_handlers) // self.copies
        rollout = maker.args.rollout
        super().__init__("OpenRLHF", maker.tokenizer, processes * rollout.micro_batch_size, rollout.temperature)

    def rows(self, ids: Tensor, read: Tensor, width: int, temperature: float) -> Tensor:
        """See `WorkerPolicy.rows`."""
        mask = read[:, 1:].clone()  # a place is that of the token after it
        mask[:, :-width] = 0
        size, group = self.maker.args.rollout.micro_batch_size, self.maker.actor_model_group
        batches = {"sequences": ids, "action_mask": mask, "attention_mask": read}
        parts = {name: list(torch.split(rows, size)) for name, rows in batches.items()}
        found = self.maker._flatten_results(self.maker._dispatch_forward(group, False, **parts), self.copies)
        return torch.cat(found)[:, -width:].unsqueeze(1)
