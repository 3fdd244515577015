"""Log-probs and entropies of given tokens from hidden states and the output head, without whole logits.

For N tokens and vocabulary V the logits [N, V] are made one chunk of tokens at a time, in the forward pass and once
more in the backward pass; what is kept between them is [N]-sized. Peak extra memory is a few chunks, whatever N is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Elements of one fp32 logits chunk: 64 MiB on a CPU, 512 MiB on a GPU, where larger matrix products pay.
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}


@dataclass(frozen=True, eq=False, kw_only=True)
class Head:
    """The output head of a causal language model.

    Attributes:
        weight: [V, D].
        bias: [V], or None.
        softcap: logits become softcap·tanh(logits / softcap); 0 switches it off (Gemma).
        scale: factor on the logits, before the soft cap (Cohere, Granite).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0

    @staticmethod
    def of(model: Any) -> Head:
        """Reads the head of a transformers causal LM, tied or untied."""
        module = model.get_output_embeddings()
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"{type(model).__name__}: the output head is {type(module).__name__}; wanted a torch.nn.Linear, from "
                "which log-probs are "
                "computed chunk by chunk. Use a causal language model with a plain linear head."
            )
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        return Head(
            weight=module.weight,
            bias=module.bias,
            softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            scale=scale,
        )


def token_logprobs(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float = 1.0, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, softmax(logits / temperature).

    Args:
        hidden: [N, D], last hidden states at the places that predict the targets.
        targets: int [N].
        head: the output head.
        temperature: above 0.
        chunk: tokens per chunk; 0 takes `CHUNK_ELEMENTS` / V.

    Returns:
        log-probs [N] and entropies [N] in nats, float32; both carry gradients to `hidden`, the head's weight and bias.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"token_logprobs: hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}; wanted [N, D] and [N]."
        )
    if temperature <= 0:
        raise ValueError(
            f"token_logprobs: temperature {temperature}; wanted a number above 0 (log-probs of greedy decoding use 1)."
        )
    vocab = head.weight.shape[0]
    size = chunk or max(1, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 24) // vocab)
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(
        hidden, head.weight, head.bias, targets.long(), head.softcap, head.scale, temperature, size
    )
    return logprobs, entropies


def temper(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, factor: float
) -> tuple[Tensor, Tensor | None]:
    """Logits [n, V] in float32, and with a soft cap its tanh, which the backward pass needs, else None.

    `factor` is scale / temperature without a soft cap, scale alone with one.
    """
    logits = (hidden @ weight.t()).float()
    if bias is not None:
        logits += bias.float()
    if factor != 1.0:
        logits *= factor
    if not softcap:
        return logits, None
    bent = logits.div_(softcap).tanh_()
    return bent * softcap, bent


class _TokenLogprobs(torch.autograd.Function):
    """Chunked log-softmax gather with recomputation.

    With z the tempered logits, p = softmax z, H = −Σ p log p:
    d log p_y / dz_j = 1[j = y] − p_j, and dH/dz_j = −p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float,
        scale: float,
        temperature: float,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        count = len(targets)
        logprobs, entropies, norms = (torch.empty(count, dtype=torch.float32, device=hidden.device) for _ in range(3))
        factor = scale if softcap else scale / temperature
        for start in range(0, count, size):
            part = slice(start, start + size)
            logits, _ = temper(hidden[part], weight, bias, softcap, factor)
            if softcap:
                logits /= temperature
            chosen = logits.gather(1, targets[part, None]).squeeze(1)
            top = logits.amax(1, keepdim=True)
            logits -= top
            shifted_sum = logits.exp()
            total = shifted_sum.sum(1)
            # Σ p z with z relative to the maximum: H = log Σ exp z − Σ p z. A logit of −inf has p = 0 and adds nothing.
            expected = shifted_sum.mul_(logits.clamp_(min=-1e30)).sum(1) / total
            log_total = total.log()
            norms[part] = log_total + top.squeeze(1)
            logprobs[part] = chosen - norms[part]
            entropies[part] = log_total - expected
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.constants = (softcap, scale, temperature, size)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        softcap, scale, temperature, size = ctx.constants
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        d_bias = (
            torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
            if need_bias and bias is not None
            else None
        )
        factor = scale if softcap else scale / temperature
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits, bent = temper(hidden[part], weight, bias, softcap, factor)
            if softcap:
                logits /= temperature
            logits -= norms[part, None]
            d_z = d_logits(logits, targets[part], entropies[part], *(None if g is None else g[part] for g in grads))
            if bent is not None:
                d_z *= bent.square_().neg_().add_(1)
            d_z *= scale / temperature
            if d_bias is not None:
                d_bias += d_z.sum(0)
            narrow = d_z.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(narrow, weight, out=d_hidden[part])
            if d_weight is not None and d_weight.dtype == narrow.dtype:
                d_weight.addmm_(narrow.t(), hidden[part])
            elif d_weight is not None:
                d_weight += narrow.t() @ hidden[part]
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def d_logits(
    log_p: Tensor,
    targets: Tensor,
    entropies: Tensor,
    d_logprobs: Tensor | None,
    d_entropies: Tensor | None,
    inside: Tensor | None = None,
) -> Tensor:
    """Gradient [n, V] with respect to tempered logits; overwrites `log_p`.

    `inside` (bool [n]) tells which targets are among the V entries at hand, when those are a part of the vocabulary.
    """
    n = len(targets)
    zeros = torch.zeros(n, device=log_p.device)
    by_logprob = zeros if d_logprobs is None else d_logprobs
    if d_entropies is None:
        out = log_p.exp_().mul_(-by_logprob[:, None])
    else:
        p = log_p.exp()
        # −p·(g_logp + g_H·(log p + H))
        out = (
            log_p.clamp_(min=-1e30)
            .add_(entropies[:, None])
            .mul_(d_entropies[:, None])
            .add_(by_logprob[:, None])
            .mul_(p)
            .neg_()
        )
    own = by_logprob if inside is None else by_logprob.masked_fill(~inside, 0.0)
    out.scatter_add_(1, targets[:, None], own[:, None])
    return out
