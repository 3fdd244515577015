"""Mask of tokens with high entropy: H_t ≥ τ, τ the k-th largest entropy of the scope, k = ⌈keep·n⌉ (ties are kept).

Source: the 80/20 rule (2506.01939): only the top 20 % of tokens carry the loss. S-trace (2605.05965) masks low-entropy
tokens out of the eligibility trace (our reading). H is the entropy of the sampling distribution; n counts trained
tokens. With fewer than k tokens of positive entropy τ is 0, and all tokens would tie: the mask would do nothing. Tokens
of entropy 0 are therefore left out; metric `high_entropy_ties` counts them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from creditgraph.components.learner.objective.base import LossInputs
from creditgraph.components.learner.objective.meters import AllSum
from creditgraph.pipeline.core.handles import known_entropies
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import Stream, keys_within

HIGH = "high_entropy"
"""column of bools: trained tokens of high entropy"""
TIES = "high_entropy_ties"
"""column of bools: trained tokens of entropy 0 that reach the threshold and are left out"""
IN_LOSS = "in_loss"
"""the same column, when the mask acts on the loss"""
IN_TRACE = "in_trace"
"""the same column, when the mask acts on eligibility traces: an objective with a trace leaves the other tokens out"""


@dataclass(frozen=True, kw_only=True)
class EntropyMask:
    """Keeps tokens of high sampling entropy, or others to compare them with."""

    keep: float = 1.0
    """share of trained tokens kept; 1 switches the mask off, 0.2 is the 80/20 rule"""
    order: Literal["high", "low", "random"] = "high"
    """which tokens are kept: those of the highest entropy, or, to compare with, of the lowest one or drawn at random"""
    scope: Literal["batch", "sequence", "group"] = "batch"
    """tokens over which the threshold is determined"""
    where: Literal["trace", "trace_and_loss", "loss"] = "trace"
    """S-trace masks the history ("trace"), 80/20 the loss"""
    denominator: Literal["all", "kept"] = "all"
    """whether a masked loss is averaged over all trained tokens, or over the kept ones"""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"expected 0 < keep ≤ 1 (1 keeps all tokens), got {self.keep}.")

    def check(self, use: str, has_trace: bool) -> None:
        """Raises ValueError if objective `use` does not support `where`."""
        if self.keep == 1:
            return
        if self.where == "trace" and not has_trace:
            raise ValueError(
                f"entropy_mask.where is 'trace', but objective '{use}' has no trace to mask; set where: loss, or "
                "choose an objective with a trace (use: trace)."
            )
        if has_trace and (self.where, self.denominator) == ("loss", "kept"):
            raise ValueError(
                "entropy_mask.where 'loss' with denominator 'kept' takes masked tokens out of the credit mask, which "
                f"also masks the trace of objective '{use}'; set where: trace_and_loss, or denominator: all."
            )


def add_columns(inputs: LossInputs, settings: EntropyMask, all_sum: AllSum, stream: Stream) -> LossInputs:
    """Adds the columns above; with `denominator: kept`, low-entropy tokens leave the mask of the loss too."""
    if settings.keep >= 1:
        return inputs
    entropies = inputs.old_entropies.values
    mask = inputs.mask.values
    known_entropies(entropies[mask], "objective.entropy_mask")
    rank = {"high": lambda: entropies, "low": lambda: -entropies, "random": lambda: drawn(inputs, stream)}[
        settings.order
    ]()
    if settings.scope == "batch":
        high = (rank >= threshold(rank[mask], settings.keep, all_sum)) & mask
    else:
        scope = inputs.mask.row_ids
        if settings.scope == "group":
            scope = torch.unique(inputs.group, return_inverse=True)[1][scope]
        high = high_by_scope(rank, mask, scope, settings.keep) & mask
    ties = high & (entropies <= 0) & (settings.order == "high")
    column = inputs.mask.with_values(high & ~ties)
    inputs = inputs.with_columns(**{HIGH: column, TIES: inputs.mask.with_values(ties)})
    if settings.where != "loss":
        inputs = inputs.with_columns(**{IN_TRACE: column})
    if settings.where != "trace":
        inputs = inputs.with_columns(**{IN_LOSS: column})
        if settings.denominator == "kept":
            inputs = inputs.replace(mask=column)
    return inputs


def drawn(inputs: LossInputs, stream: Stream) -> Tensor:
    """A uniform number for each token, float32 [total], keyed by the group, its rows' order and the token's place."""
    rows = stream.seeds(keys_within(inputs.group.cpu()), "entropy_mask") >> 1  # so that places can be added
    keys = rows[inputs.mask.row_ids.cpu()] + inputs.mask.positions.cpu()
    return stream.uniform(keys, "entropy_mask").float().to(inputs.mask.values.device)


def threshold(entropies: Tensor, keep: float, all_sum: AllSum) -> Tensor:
    """The ⌈keep·n⌉-th largest of the entropies of all replicas, float32 []: exact, from two histograms that are summed.

    Args:
        entropies: float32 [tokens], those of this replica's trained tokens, without NaN.
        keep: share of the n tokens.
        all_sum: sums a tensor over replicas.
    """
    # The bits of a float32, as a number without sign that sorts like the float; + 0 makes −0 a 0.
    bits = (entropies.float() + 0.0).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    keys = torch.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 1 << 31)
    upper = all_sum(torch.bincount(keys >> 16, minlength=1 << 16))
    first, rank = _bin(upper, max(math.ceil(int(upper.sum()) * keep - 1e-9), 1))
    lower = all_sum(torch.bincount(keys[keys >> 16 == first] & 0xFFFF, minlength=1 << 16))
    key = first << 16 | _bin(lower, rank)[0]
    return torch.tensor(key ^ (1 << 31 if key >> 31 else 0xFFFFFFFF)).to(torch.int32).view(torch.float32)


def _bin(histogram: Tensor, rank: int) -> tuple[int, int]:
    """The bin of the rank-th largest number, and its rank among the numbers of that bin."""
    down = histogram.flip(0)
    reached = down.cumsum(0)
    place = min(int((reached < rank).sum()), len(down) - 1)
    return len(down) - 1 - place, rank - int(reached[place] - down[place])


def high_by_scope(entropies: Tensor, mask: Tensor, scope: Tensor, keep: float) -> Tensor:
    """bool [total]: entropies of at least the ⌈keep·n⌉-th largest of the n trained tokens of their scope.

    Args:
        entropies: float [total].
        mask: bool [total], trained tokens.
        scope: int64 [total], from 0.
        keep: share of the trained tokens.
    """
    if not bool(mask.any()):
        return mask.clone()
    chosen = entropies[mask]
    where = scope[mask]
    # Sorted by scope, and within it by descending entropy; the threshold is at place ⌈keep·n⌉ − 1.
    order = torch.argsort(chosen, descending=True, stable=True)
    order = order[torch.argsort(where[order], stable=True)]
    sizes = torch.bincount(where, minlength=int(scope.max()) + 1)
    starts = Jagged.from_lengths(chosen, sizes).offsets[:-1]
    # Minus 1e-9, so that rounding does not raise an exact product.
    last = (starts + torch.ceil(sizes.double() * keep - 1e-9).long().clamp(min=1) - 1).clamp(max=len(chosen) - 1)
    return entropies >= chosen[order][last][scope]
