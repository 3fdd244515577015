"""Sequence ratio: one ratio per trajectory, s = exp(mean_t l_t) over trained tokens, at every one of them.

Source: GSPO (2507.18071), clip 3e-4/4e-4, four mini-batches, no KL [P]. `sequence_form: token` is GSPO-token:
s_t = sg[s]·π_θ(y_t)/sg[π_θ(y_t)], the same value with a gradient that each token's own advantage scales.

The gated form takes the mean over gated tokens only, exp(Σ g l / Σ g) with g = column "gate" of the credit times the
mask (2605.05226, used with IBPO 2605.16302) [P]; without such a column the gate is the mask and both forms agree. A row
whose gate is empty has ratio 1 and no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.learner.objective.base import Inputs, Meters, Terms
from components.learner.objective.config import Objective
from components.learner.objective.ratio import clipped_loss, ratio_meters, safe_exp


def terms(inputs: Inputs, objective: Objective) -> Terms:
    """Per-token loss, equal over a row where the advantage is."""
    return _terms(inputs, objective, inputs.mask.values)


def gated_terms(inputs: Inputs, objective: Objective) -> Terms:
    """The same with the mean over gated tokens."""
    gate = inputs.columns.get("gate")
    return _terms(inputs, objective, inputs.mask.values if gate is None else inputs.mask.values & (gate.values != 0))


def _terms(inputs: Inputs, objective: Objective, gate: Tensor) -> Terms:
    meters = Meters()
    mask, advantage = inputs.mask.values, inputs.advantage.values
    log_ratio = inputs.logprobs.values - inputs.old_logprobs.values
    share = gate.float() / inputs.mask.spread(inputs.mask.with_values(gate).sum().clamp(min=1)).values
    # where, not a product: a masked token may hold inf. Summed in float64 so that a row's cut from its batch changes no
    # bit.
    weighted = torch.where(gate, log_ratio, 0.0).double() * share
    mean = inputs.mask.spread(inputs.mask.with_values(weighted).sum()).values.float()
    if objective.sequence_form == "token":
        mean = mean.detach() + log_ratio - log_ratio.detach()
    ratio = safe_exp(mean, mask, meters)
    ratio_meters(meters, ratio, advantage, mask, objective)
    return Terms(loss=inputs.logprobs.with_values(clipped_loss(ratio, advantage, objective)), meters=meters)
