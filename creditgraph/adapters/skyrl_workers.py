"""SkyRL's own model as a policy that scores texts, on the workers that train it."""

from typing import Any

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from torch import Tensor

from creditgraph.adapters.workers import WorkerPolicy


class SkyRLPolicy(WorkerPolicy):
    """Scores by the function of SkyRL's trainer, at its temperature of sampling; it computes no entropies.

    Args:
        trainer: SkyRL's, whose workers are there.
    """

    def __init__(self, trainer: Any) -> None:
        temperature = trainer.cfg.trainer.algorithm.temperature
        super().__init__("SkyRL", trainer.tokenizer, trainer.dispatch.get_lcm_dp_size(), temperature)
        self.trainer = trainer

    def rows(self, ids: Tensor, read: Tensor, width: int, temperature: float) -> Tensor:
        """See `WorkerPolicy.rows`."""
        batch = TrainingInputBatch({"sequences": ids, "attention_mask": read})
        batch.metadata = {"response_length": width}
        found: Tensor = self.trainer._execute_forward_pass("policy", batch, "logprobs", None)
        return found.unsqueeze(1)
