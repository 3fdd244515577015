"""Unsloth: the loss that its GRPO trainer computes in place of TRL's. Its advantages are TRL's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .entry import Function, Table, with_bounds, without_bounds

table = Table("unsloth_zoo", "unslothai/unsloth-zoo", left_out={})


LOSS = "unsloth_zoo.rl_replacements:grpo_compute_loss"


def _loss(kind: str, label: str = "", clip: bool = True, **more: Any) -> None:
    settings = {"loss_type": kind, "max_completion_length": 8} | more
    names = {"epsilon_low": 0.2, "epsilon_high": 0.28} if clip else {}

    @table.add(LOSS, loss=True, label=label or kind, **names)
    def make(found: Function) -> Function:
        def loss_of(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Any:
            given = {"epsilon_low": low, "epsilon_high": high, "num_items_in_batch": mask.sum()}
            return found(None, logprobs, old, None, mask.long(), mask, 0.0, advantages, **settings, **given)[0]

        return with_bounds(loss_of) if clip else without_bounds(loss_of, 5.0 if kind == "cispo" else 0.28)


for _kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
    _loss(_kind)
for _kind in ("cispo", "sapo"):
    _loss(_kind, clip=False)
for _kind in ("grpo", "luspo"):
    _loss(_kind, f"{_kind}, ratio of the sequence", importance_sampling_level="sequence")
_loss("grpo", "grpo, dual clip 3", delta=3.0)


@table.add(LOSS, loss=True, label="grpo, KL", epsilon_low=0.2, epsilon_high=0.28, beta=0.04)
def _kl(found: Function) -> Function:
    def call(
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        epsilon_low: float,
        epsilon_high: float,
        beta: float,
    ) -> Any:
        rows = (ref_logprobs, logprobs, old_logprobs, None, mask.long(), mask, beta, advantages)
        return found(*rows, epsilon_low=epsilon_low, epsilon_high=epsilon_high)[0]

    return call
