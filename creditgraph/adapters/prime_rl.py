"""A graph's objective as the loss of prime-rl; its advantages have no public hook.

    [trainer.loss]
    type = "custom"
    import_path = "creditgraph.adapters.prime_rl.loss"
    kwargs = { graph = "p_trace" }

prime-rl calls the loss with one sample at a time, whose log-ratio is that of trainer and inference. Written after
reading its loss (commit 559b44772); not yet run with prime-rl.
"""

from functools import cache
from typing import Any

import torch

from creditgraph.adapters.estimator import Loss


@cache
def _loss(graph: str, overrides: tuple[str, ...]) -> Loss:
    return Loss(graph, *overrides)


def loss(inputs: Any, graph: str, overrides: tuple[str, ...] = ()) -> Any:
    """The sum of a sample's token losses, as prime-rl's `LossOutputs`; prime-rl divides by the tokens of the batch."""
    from prime_rl.trainer.rl.loss import LossOutputs

    rows = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    losses, metrics = _loss(graph, tuple(overrides))(*(row.unsqueeze(0) for row in rows))
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    return LossOutputs(loss=losses.sum(), metrics={name: torch.tensor(value) for name, value in metrics.items()})
