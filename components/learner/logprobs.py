"""Log-probs and entropies of given tokens from hidden states and the output head, without whole logits.

For N tokens and vocabulary V the logits [N, V] are made one chunk of tokens at a time, in the forward pass and once
more in the backward pass; what is kept between them is [N]-sized. Peak extra memory is a few chunks, whatever N is.

The vocabulary may be sharded over tensor-parallel ranks. Each rank then makes the logits of its own shard and keeps
four numbers per token: maximum, sum of exponentials, their logit-weighted sum and the target's logit. Ranks exchange
those numbers, never logits: two reductions per call, whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Elements of one fp32 logits chunk: 64 MiB on a CPU, 512 MiB on a GPU, where larger matrix products are faster.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
# Logit of excluded vocabulary entries. Not −inf, because 0 · −inf is NaN in the entropy.
LEAST = -1e30


@dataclass(frozen=True, eq=False, kw_only=True)
class VocabShard:
    """The part of the vocabulary that this rank has.

    Attributes:
        start: first vocabulary entry.
        size: entries; rows of the head's weight beyond are padding.
        group: the tensor-parallel group; None when one rank has the whole vocabulary.
        reduce_hidden: whether to sum the gradient of the hidden states over the group. False if an earlier operation
            does, such as the gather of sequence parallel.
    """

    start: int
    size: int
    group: Any = None
    reduce_hidden: bool = True

    @property
    def ranks(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else int(dist.get_world_size(self.group))


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """The output head of a causal language model.

    Attributes:
        weight: [V, D]; with a shard, this rank's rows of it.
        bias: [V], or None.
        softcap: logits become softcap·tanh(logits / softcap); 0 switches it off (Gemma).
        scale: factor on the logits, before the soft cap (Cohere, Granite).
        shard: which part of the vocabulary the rows are; None when they are all of it.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0
    shard: VocabShard | None = None

    @staticmethod
    def of(model: Any) -> Head:
        """Reads the head of a transformers causal LM, tied or untied."""
        module = model.get_output_embeddings()
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"{type(model).__name__}: expected a torch.nn.Linear as output head, from which log-probs are computed "
                f"chunk by chunk, got {type(module).__name__}. Use a causal language model with a plain linear head."
            )
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        divisor = float(getattr(config, "logits_scaling", None) or 1.0)
        return Head(
            weight=module.weight,
            bias=module.bias,
            softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            scale=scale / divisor,
        )


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float = 1.0, chunk: int = 0, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, softmax(logits / temperature).

    Args:
        hidden: [N, D], last hidden states at the places that predict the targets; the same on every rank of a group.
        targets: int [N], or [N, K] for several targets of each place.
        head: the output head.
        temperature: above 0.
        chunk: tokens per chunk; 0 means `CHUNK_ELEMENTS` / V.
        wide: whether products of 16-bit tensors are kept in float32: logits, and the weight's gradient, whose sum over
            chunks then does not depend on their size. Otherwise products are rounded to the tensors' dtype.

    Returns:
        log-probs, of the shape of `targets`, and entropies [N] in nats, float32, equal on all ranks of a group; both
        carry gradients to `hidden`, the head's weight and bias.
    """
    if hidden.dim() != 2 or targets.dim() not in (1, 2) or targets.shape[:1] != hidden.shape[:1]:
        raise ValueError(
            f"token_logprobs: expected hidden [N, D] and targets [N] or [N, K], got {tuple(hidden.shape)} and "
            f"{tuple(targets.shape)}."
        )
    if temperature <= 0:
        raise ValueError(
            f"token_logprobs: expected temperature > 0 (log-probs of greedy decoding use 1), got {temperature}."
        )
    size = chunk or max(1, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 24) // len(head.weight))
    apply: Any = _TokenLogprobs.apply
    several = targets.long().reshape(len(targets), targets.shape[1:].numel())
    logprobs, entropies = apply(hidden, head.weight, head.bias, several, _Constants(head, temperature, size, wide))
    return logprobs.reshape(targets.shape), entropies


class _Constants:
    """Constants of the forward and the backward pass."""

    def __init__(self, head: Head, temperature: float, size: int, wide: bool) -> None:
        self.wide = wide
        self.softcap = head.softcap
        self.scale = head.scale
        self.shard = head.shard
        self.temperature = temperature
        self.size = size

    def parts(self, count: int) -> list[slice]:
        """The chunks of `count` tokens."""
        return [slice(start, start + self.size) for start in range(0, count, self.size)]

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tempered logits [n, V] in float32, and with a soft cap its tanh, which the backward pass needs, else None."""
        logits = self.product(hidden, weight.t()).float()
        if bias is not None:
            logits += bias.float()
        factor = self.scale if self.softcap else self.scale / self.temperature
        if factor != 1.0:
            logits *= factor
        bent = None
        if self.softcap:
            bent = logits.div_(self.softcap).tanh_()
            logits = bent * self.softcap
            logits /= self.temperature
        if self.shard is not None:
            logits[:, self.shard.size :] = LEAST
        return logits, bent

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Matrix product, of 16-bit tensors in float32 if `wide`."""
        if not self.wide or a.dtype == torch.float32:
            return a @ b
        # CUDA's 16-bit products have float32 sums anyway; elsewhere the factors are widened.
        return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()

    def place(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        """Rows of the weight that belong to targets, and which targets are in this shard; None: all are."""
        if self.shard is None:
            return targets, None
        local = targets - self.shard.start
        return local.clamp(0, rows - 1), (local >= 0) & (local < self.shard.size)


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log-softmax gather with recomputation.

    With z the tempered logits, p = softmax z, H = −Σ p log p:
    d log p_y / dz_j = 1[j = y] − p_j, and dH/dz_j = −p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, constants: _Constants
    ) -> tuple[Tensor, Tensor]:
        local, inside = constants.place(targets, len(weight))
        top, total, weighted = (torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3))
        chosen = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        for part in constants.parts(len(targets)):
            logits, _ = constants.logits(hidden[part], weight, bias)
            chosen[part] = logits.gather(1, local[part])
            top[part] = logits.amax(1)
            logits -= top[part, None]
            exponentials = logits.exp()
            total[part] = exponentials.sum(1)
            # Σ e^z z with z relative to the maximum. A logit of −inf adds nothing.
            weighted[part] = exponentials.mul_(logits.clamp_(min=LEAST)).sum(1)
        if inside is not None:
            chosen.masked_fill_(~inside, 0.0)
        if constants.shard is not None and constants.shard.ranks > 1 and len(targets):
            top, total, weighted, chosen = _over_shards(top, total, weighted, chosen, constants.shard.group)
        # H = log Σ exp z − Σ p z.
        log_total = total.log()
        norms = log_total + top
        entropies = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, local, inside, norms, entropies)
        ctx.constants = constants
        ctx.set_materialize_grads(False)
        return chosen - norms[:, None], entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, inside, norms, entropies = ctx.saved_tensors
        constants: _Constants = ctx.constants
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        d_bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if need_bias else None
        for part in constants.parts(len(local)):
            logits, bent = constants.logits(hidden[part], weight, bias)
            logits -= norms[part, None]
            d_logprobs, d_entropies = (None if g is None else g[part] for g in grads)
            mine = None if inside is None else inside[part]
            d_z = _d_logits(logits, local[part], entropies[part], d_logprobs, d_entropies, mine)
            if bent is not None:
                d_z *= bent.square_().neg_().add_(1)
            d_z *= constants.scale / constants.temperature
            if d_bias is not None:
                d_bias += d_z.sum(0)
            narrow = d_z.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(narrow, weight, out=d_hidden[part])
            if d_weight is not None and d_weight.dtype == narrow.dtype:
                d_weight.addmm_(narrow.t(), hidden[part])
            elif d_weight is not None:
                d_weight += constants.product(narrow.t(), hidden[part])
        shard = constants.shard
        if d_hidden is not None and shard is not None and shard.reduce_hidden and shard.ranks > 1 and len(local):
            dist.all_reduce(d_hidden, group=shard.group)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None


def _over_shards(
    top: Tensor, total: Tensor, weighted: Tensor, chosen: Tensor, group: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four numbers of each token over the whole vocabulary, from those relative to each rank's own maximum."""
    common = top.clone()
    dist.all_reduce(common, dist.ReduceOp.MAX, group=group)
    shift = top - common
    scale = shift.exp()
    weighted = scale * (weighted + shift.clamp(min=LEAST) * total)
    sums = torch.cat([torch.stack([scale * total, weighted]), chosen.t()])
    dist.all_reduce(sums, group=group)
    return common, sums[0], sums[1], sums[2:].t()


def _d_logits(
    log_p: Tensor,
    targets: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor | None,
    d_entropies: Tensor | None,
    inside: Tensor | None,
) -> Tensor:
    """Gradient [n, V] with respect to tempered logits; overwrites `log_p`.

    `targets`, `d_logprobs` and `inside` (bool, targets in this shard) are [n, K], the others [n].
    """
    own = torch.zeros(targets.shape, device=log_p.device) if d_logprobs is None else d_logprobs
    by_logprob = own.sum(1)
    if d_entropies is None:
        out = log_p.exp_().mul_(-by_logprob[:, None])
    else:
        p = log_p.exp()
        # −p·(g_logp + g_H·(log p + H))
        out = (
            log_p.clamp_(min=LEAST)
            .add_(entropies[:, None])
            .mul_(d_entropies[:, None])
            .add_(by_logprob[:, None])
            .mul_(p)
            .neg_()
        )
    out.scatter_add_(1, targets, own if inside is None else own.masked_fill(~inside, 0.0))
    return out
