"""Drawing one token per row, with its log-prob and the entropy of the distribution it came from."""

import torch
from torch import Tensor

from creditgraph.components.engine.local.batches import blocks


def draw(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int, forbidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a token per row by inverse CDF in vocabulary order.

    Args:
        logits: [B, V], any float dtype.
        uniform: float64 [B] in [0, 1).
        temperature: 0 takes the most probable token; log-probs and entropies are then those of temperature 1.
        top_p, top_k: truncation of the draw; probabilities equal to the last one kept are kept too. 1.0 and 0 switch it
            off.
        forbidden: bool [V], columns that are never drawn (they stay in the softmax), or None.

    Returns:
        tokens int64 [B], log-probs float32 [B] and entropies float32 [B] of softmax(logits / temperature), before
        truncation.
    """
    parts = [_draw(logits[b], uniform[b], temperature, top_p, top_k, forbidden) for b in blocks(*logits.shape)]
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return tokens, logprobs, entropies


def _draw(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float, top_k: int, forbidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, -1)
    probs = logprobs.exp()
    entropies = -(probs * logprobs).nansum(-1)
    if forbidden is not None:
        probs = probs.masked_fill(forbidden, 0.0)
    if temperature == 0.0:
        tokens = probs.argmax(-1) if forbidden is None else logits.masked_fill(forbidden, -torch.inf).argmax(-1)
    else:
        tokens = inverse_cdf(truncate(probs, top_p, top_k), uniform)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], entropies


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """int64 [B]: the first token whose cumulative weight [B, V] exceeds uniform [B] · total; never one of weight 0."""
    total = weights.cumsum(-1, dtype=torch.float64)
    # In float64 u·total < total for every u ≤ 1 − 2⁻⁵³, so the point lies below the last cumulative sum.
    point = uniform[:, None] * total[:, -1:]
    tokens = torch.searchsorted(total, point, right=True)[:, 0]
    return tokens.clamp(max=weights.shape[1] - 1)


def truncate(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Sets everything outside top-k, then outside top-p of what is left, to zero. [B, V] → [B, V], not normalised."""
    vocab = probs.shape[1]
    if 0 < top_k < vocab:
        smallest = probs.topk(top_k, dim=-1).values[:, -1:]
        probs = torch.where(probs >= smallest, probs, 0.0)
    if top_p >= 1.0:
        return probs
    nucleus = top_p * probs.sum(-1, keepdim=True)
    # The largest 256 mostly hold the nucleus; sorting the whole vocabulary is slow.
    head = min(vocab, 256)
    ordered = probs.topk(head, dim=-1).values
    if head < vocab and bool((ordered.sum(-1, keepdim=True) < nucleus).any()):
        ordered = probs.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    last = (before < nucleus).sum(-1, keepdim=True).clamp(min=1) - 1
    return torch.where(probs >= ordered.gather(1, last), probs, 0.0)


def chosen(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 [B], of tokens [B] under softmax(logits / temperature), logits [B, V]."""
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = torch.log_softmax(logits, -1)
    return logprobs.gather(1, tokens[:, None])[:, 0], -(logprobs.exp() * logprobs).nansum(-1)
