"""How per-token loss terms become one number, independent of how the batch was cut.

With trained-token mask m, T_i = Σ_t m_{i,t}, B rows:

    token_mean            Σ_{i,t} m x / Σ m                (DAPO, 2503.14476)
    seq_mean_token_mean   (1/B) Σ_i (1/T_i) Σ_t m x        (GRPO, GSPO, SRPO)
    seq_mean_token_sum    (1/B) Σ_i Σ_t m x
    constant              Σ_{i,t} m x / (B · L_max)        (Dr.GRPO, 2503.20783)

Σ m and B are of the whole training batch of one optimiser step: all micro-batches of all replicas. They are counted
here locally, summed by the caller, and received back; a row with T_i = 0 adds nothing to the numerator. It still counts
in B, unless `drop_empty`: then B is the number of rows with T_i > 0. (A zero-variance group that should leave B has its
mask set to False by the advantage node, and `drop_empty` on here. With `token_mean` masked rows have left the
denominator already.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.learner.objective.settings import ObjectiveSettings
from pipeline.core.jagged import Jagged


def counts(mask: Jagged, settings: ObjectiveSettings) -> Tensor:
    """Local denominators, float64 [2]: rows B and trained tokens Σ m."""
    per_row = mask.sum()
    rows = (per_row > 0).sum() if settings.drop_empty else torch.tensor(len(mask))
    return torch.stack([rows.to(per_row.device), per_row.sum()]).double()


def weights(mask: Jagged, settings: ObjectiveSettings, denominators: Tensor) -> Jagged:
    """Weight of each token's term, float32 over tokens, from global `denominators` (see `counts`); 0 where masked."""
    # At least 1: a step without any trained token has loss 0, not NaN.
    rows, tokens = (max(float(x), 1.0) for x in denominators)
    trained = mask.values.float()
    if settings.aggregate == "token_mean":
        return mask.with_values(trained / tokens)
    if settings.aggregate == "seq_mean_token_sum":
        return mask.with_values(trained / rows)
    if settings.aggregate == "constant":
        return mask.with_values(trained / (rows * settings.constant_length))
    share = 1.0 / (mask.sum().clamp(min=1).double() * rows)
    return mask.with_values(trained * mask.spread(share.float()).values)


def aggregate(loss: Jagged, mask: Jagged, settings: ObjectiveSettings, denominators: Tensor) -> Tensor:
    """This part's share of the loss; the sum over all parts of the batch is the loss."""
    weight = weights(mask, settings, denominators)
    # where, not a product: a masked token may hold inf or NaN.
    return torch.where(mask.values, loss.values, 0.0).mul(weight.values).sum()
