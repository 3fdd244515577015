"""Which tokens have high entropy: H_t ≥ τ, τ the k-th largest entropy of the scope, k = ⌈keep·n⌉ (ties are all kept).

Source: the 80/20 rule (2506.01939): only the top 20 % of tokens carry the loss. S-trace (2605.05965) masks low-entropy
tokens out of the eligibility trace [R]. H is the entropy of the sampling distribution; n counts trained tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.learner.objective.base import AllSum, Inputs
from components.learner.objective.config import EntropyMask
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import known_entropies

COLUMN = "high_entropy"


def add_column(inputs: Inputs, settings: EntropyMask, all_sum: AllSum) -> Inputs:
    """Adds column "high_entropy"; with `denominator: kept` and a mask on the loss, low-entropy tokens leave the loss mask too."""
    if settings.keep >= 1:
        return inputs
    entropies, mask = inputs.old_entropies.values, inputs.mask.values
    known_entropies(entropies[mask], "objective.entropy_mask")
    if settings.scope == "batch":
        high = entropies >= kth_largest(entropies[mask], settings.keep, all_sum)
    else:
        row_ids = inputs.mask.row_ids
        scope = row_ids if settings.scope == "sequence" else torch.unique(inputs.group, return_inverse=True)[1][row_ids]
        high = _high_by_scope(entropies, mask, scope, settings.keep)
    high &= mask
    changed = inputs.replace(columns=inputs.columns | {COLUMN: inputs.mask.with_values(high)})
    if settings.where != "trace" and settings.denominator == "kept":
        return changed.replace(mask=inputs.mask.with_values(high))
    return changed


def kth_largest(values: Tensor, keep: float, all_sum: AllSum) -> Tensor:
    """The ⌈keep·n⌉-th largest of the float32 values of all replicas, exactly, by counting alone; −inf without values.

    Non-negative floats sort like their bit patterns, so 31 halvings of the integer range find the value.
    """
    bits = values.float().clamp(min=0).view(torch.int32).long()
    count = all_sum(torch.tensor(float(len(bits)), dtype=torch.float64, device=values.device))
    wanted = torch.ceil(count * keep - 1e-9)
    low, high = 0, 0x7F800000  # +0 and +inf
    while low < high:
        middle = (low + high + 1) // 2
        above = all_sum((bits >= middle).sum().double())
        low, high = (middle, high) if bool(above >= wanted) else (low, middle - 1)
    if not float(count):
        return torch.tensor(-torch.inf, device=values.device)
    return torch.tensor(low, dtype=torch.int32, device=values.device).view(torch.float32)


def _high_by_scope(entropies: Tensor, mask: Tensor, scope: Tensor, keep: float) -> Tensor:
    if not bool(mask.any()):
        return mask.clone()
    chosen, where = entropies[mask], scope[mask]
    order = torch.argsort(chosen, descending=True, stable=True)
    order = order[torch.argsort(where[order], stable=True)]
    sizes = torch.bincount(where, minlength=int(scope.max()) + 1)
    starts = Jagged.from_lengths(chosen, sizes).offsets[:-1]
    last = (starts + torch.ceil(sizes * keep - 1e-9).long().clamp(min=1) - 1).clamp(max=len(chosen) - 1)
    return entropies >= chosen[order][last][scope]
