"""Inputs of objectives: random rows, rows by hand, and their losses and gradients."""

import torch

from creditgraph.components.learner.objective import (
    LossInputs,
    Meters,
    ObjectiveSettings,
    aggregate,
    counts,
    loss_terms,
    prepare,
)
from creditgraph.pipeline.core.jagged import Jagged


def make_inputs(lengths=(9, 1, 70, 4), seed=0, spread=0.05, masked=True, constant=False):
    g = torch.Generator().manual_seed(seed)
    base = Jagged.from_lengths(-torch.rand(sum(lengths), generator=g) * 3, torch.tensor(lengths))
    size = len(base.values)
    mask = torch.rand(size, generator=g) > 0.25 if masked else torch.ones(size, dtype=torch.bool)
    per_token = base.with_values(torch.randn(size, generator=g))
    return LossInputs(
        logprobs=base.with_values((base.values + spread * torch.randn(size, generator=g)).requires_grad_()),
        old_logprobs=base,
        engine_logprobs=base,
        advantage=base.spread(torch.randn(len(lengths), generator=g)) if constant else per_token,
        mask=base.with_values(mask),
        group=torch.arange(len(lengths)) // 2,
        old_entropies=base.with_values(torch.rand(size, generator=g)),
    )


def losses(inputs, objective):
    """Prepared inputs, loss per token, metrics."""
    meters = Meters()
    inputs = prepare(inputs, objective, meters)
    loss = loss_terms(inputs, objective, meters)
    return inputs, loss, meters.values()


def gradient(inputs, objective):
    inputs, loss, _ = losses(inputs, objective)
    total = aggregate(loss, inputs.mask, objective, counts(inputs.mask.sum()))
    return torch.autograd.grad(total, inputs.logprobs.values)[0]


def gspo(use="gspo", **config):
    """With a clip wide enough for ratios to leave 1."""
    return ObjectiveSettings(use=use, config={"clip_low": 0.2, "clip_high": 0.2, **config})


def by_hand(logs, advantage, **more):
    """One row, ratios exp(logs) against old log-probs 0."""
    row = Jagged.from_rows([torch.tensor(logs)])
    return LossInputs(
        logprobs=row.with_values(row.values.requires_grad_()),
        old_logprobs=row.with_values(torch.zeros(len(logs))),
        engine_logprobs=row.with_values(torch.zeros(len(logs))),
        advantage=Jagged.from_rows([torch.tensor(advantage)]),
        mask=row.with_values(torch.ones(len(logs), dtype=torch.bool)),
        group=torch.zeros(1, dtype=torch.int64),
        old_entropies=row.with_values(torch.zeros(len(logs))),
        **more,
    )
