"""Tokens per second and model FLOP/s utilisation of a learner on GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from creditgraph.components.models.gpus import own_kind
from creditgraph.pipeline.core.component import Context

PASSES = ("old_logprobs", "reference", "forward_backward", "optimizer")  # phases in which the model is passed


def throughput(
    context: Context, seconds: Mapping[str, float], tokens: float, operations: tuple[float, float], frozen: bool
) -> dict[str, float]:
    """The metrics `tokens_per_second` and `mfu`; {} without a GPU, no `mfu` for one whose rate is not known.

    Args:
        context: context of the learner's node.
        seconds: wall time by phase.
        tokens: tokens of training passes, of all replicas.
        operations: operations of forward passes with and without gradient, of all replicas.
        frozen: whether most weights have no gradient (LoRA), so that a backward pass costs one forward pass, not two.
    """
    if not context.device.startswith("cuda"):
        return {}
    gpus = context.ranks.world
    training = seconds.get("forward_backward", 0.0) + seconds.get("optimizer", 0.0)
    out = {"tokens_per_second": tokens / training / gpus} if training else {}
    kind = own_kind(context.device)
    spent = sum(seconds.get(phase, 0.0) for phase in PASSES)
    useful = (2 if frozen else 3) * operations[0] + operations[1]
    if kind and spent and useful and context.model.dtype == "bfloat16":
        out["mfu"] = useful / spent / gpus / kind.matmul
    return out
