"""Log-probs and entropies over a vocabulary cut across tensor-parallel ranks, without whole logits.

Each rank makes the logits of its part of the vocabulary one chunk of tokens at a time, in the forward pass and once
more in the backward pass, and keeps four numbers per token: maximum, sum of exponentials, their logit-weighted sum and
the target's logit.
Ranks exchange those numbers, never logits: two reductions per call, whatever its length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from components.learner.logprobs import CHUNK_ELEMENTS, d_logits, temper

# Logit of padded vocabulary entries. Not −inf: 0 · −inf is NaN in the entropy.
PADDED = -1e30


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_start: int = 0,
    true_vocab: int = 0,
    temperature: float = 1.0,
    group: Any = None,
    reduce_hidden: bool = True,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, softmax(logits / temperature), over the whole vocabulary.

    Args:
        hidden: [N, D], last hidden states at the places that predict the targets, the same on every rank of `group`.
        weight: [V / ranks, D], this rank's rows of the output head.
        targets: int [N], below `true_vocab`.
        vocab_start: first vocabulary entry of this rank.
        true_vocab: entries of the vocabulary; rows beyond are padding and take no part. 0: all are entries.
        temperature: above 0.
        group: the tensor-parallel group; None when one rank holds the whole vocabulary.
        reduce_hidden: sum the gradient of `hidden` over the group. False when something before does it, as the gather
            of sequence parallel does.
        chunk: tokens per chunk; 0 takes `CHUNK_ELEMENTS` / (V / ranks).

    Returns:
        log-probs [N] and entropies [N] in nats, float32, equal on all ranks; both carry gradients to `hidden` and
        `weight`.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"vocab_parallel_logprobs: hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}; wanted [N, D] "
            "and [N]."
        )
    if temperature <= 0:
        raise ValueError(f"vocab_parallel_logprobs: temperature {temperature}; wanted a number above 0.")
    rows = weight.shape[0]
    size = chunk or max(1, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 24) // rows)
    real = rows if not true_vocab else min(max(true_vocab - vocab_start, 0), rows)
    local = targets.long() - vocab_start
    inside = (local >= 0) & (local < real)
    apply: Any = _VocabParallel.apply
    logprobs, entropies = apply(
        hidden, weight, local.clamp(0, rows - 1), inside, real, temperature, group, reduce_hidden, size
    )
    return logprobs, entropies


def _masked_logits(hidden: Tensor, weight: Tensor, real: int, temperature: float) -> Tensor:
    logits, _ = temper(hidden, weight, None, 0.0, 1.0 / temperature)
    logits[:, real:] = PADDED
    return logits


def _reduce(x: Tensor, op: Any, group: Any) -> Tensor:
    if group is not None and dist.get_world_size(group) > 1 and x.numel():
        dist.all_reduce(x, op, group=group)
    return x


class _VocabParallel(torch.autograd.Function):
    """Chunked log-softmax gather with recomputation; the derivatives are those of components.learner.logprobs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        local: Tensor,
        inside: Tensor,
        real: int,
        temperature: float,
        group: Any,
        reduce_hidden: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(local)
        top, total, weighted, chosen = (torch.zeros(count, dtype=torch.float32, device=hidden.device) for _ in range(4))
        for start in range(0, count, size):
            part = slice(start, start + size)
            logits = _masked_logits(hidden[part], weight, real, temperature)
            chosen[part] = logits.gather(1, local[part, None]).squeeze(1)
            top[part] = logits.amax(1)
            logits -= top[part, None]
            exponentials = logits.exp()
            total[part] = exponentials.sum(1)
            weighted[part] = exponentials.mul_(logits.clamp_(min=PADDED)).sum(1)
        # Sums relative to this rank's maximum, brought to the common one.
        common = _reduce(top.clone(), dist.ReduceOp.MAX, group)
        shift = top - common
        scale = shift.exp()
        weighted = scale * (weighted + shift.clamp(min=PADDED) * total)
        sums = _reduce(
            torch.stack([scale * total, weighted, chosen.masked_fill(~inside, 0.0)]), dist.ReduceOp.SUM, group
        )
        log_total = sums[0].log()
        norms = log_total + common
        # H = log Σ exp z − Σ p z, with z relative to the maximum.
        logprobs, entropies = sums[2] - norms, log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, local, inside, norms, entropies)
        ctx.constants = (real, temperature, group, reduce_hidden, size)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, inside, norms, entropies = ctx.saved_tensors
        real, temperature, group, reduce_hidden, size = ctx.constants
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        for start in range(0, len(local), size):
            part = slice(start, start + size)
            log_p = _masked_logits(hidden[part], weight, real, temperature).sub_(norms[part, None])
            d_logprobs, d_entropies = (None if g is None else g[part] for g in grads)
            d = d_logits(log_p, local[part], entropies[part], d_logprobs, d_entropies, inside[part])
            narrow = d.mul_(1.0 / temperature).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(narrow, weight, out=d_hidden[part])
            if d_weight is not None and d_weight.dtype == narrow.dtype:
                d_weight.addmm_(narrow.t(), hidden[part])
            elif d_weight is not None:
                d_weight += narrow.t() @ hidden[part]
        if d_hidden is not None and reduce_hidden:
            _reduce(d_hidden, dist.ReduceOp.SUM, group)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None, None, None
