"""Importance weights learner/engine and rejected rows: by hand, against a slow loop, and against the exact gradient."""

import itertools
import math

import pytest
import torch
from loss_inputs import gradient, make_inputs

from creditgraph.components.learner.objective import (
    Importance,
    LossInputs,
    Meters,
    ObjectiveSettings,
    aggregate,
    counts,
    prepare,
)
from creditgraph.components.learner.objective import loss_terms as terms
from creditgraph.components.learner.objective.importance import WEIGHT, correct
from creditgraph.pipeline.core.jagged import Jagged

ROWS = [[0.5, 3.0], [-0.2, -0.2, -0.2], [-10.0, 0.4]]  # log π_old − log π_engine


def make_rows(logs=ROWS, masked=()):
    old = Jagged.from_rows([torch.zeros(len(row)) for row in logs])
    mask = torch.ones(len(old.values), dtype=torch.bool)
    mask[list(masked)] = False
    return LossInputs(
        logprobs=old.with_values(old.values.clone().requires_grad_()),
        old_logprobs=old,
        engine_logprobs=Jagged.from_rows([-torch.tensor(row) for row in logs]),
        advantage=old.with_values(torch.ones(len(old.values))),
        mask=old.with_values(mask),
        group=torch.arange(len(logs)),
        old_entropies=old,
    )


def test_weights_per_token_by_hand():
    # e^.5 and e^3 capped at 2; no gradient through the weight.
    inputs = make_rows([[0.5, 3.0]])
    objective = ObjectiveSettings(use="reinforce", importance=Importance(cap=2.0))
    assert gradient(inputs, objective).tolist() == pytest.approx([-math.exp(0.5) / 2, -2.0 / 2])
    meters = Meters()
    correct(inputs, objective.importance, meters)
    assert meters.values() == {
        "importance_capped": 0.5,
        "importance_weight": pytest.approx((math.exp(0.5) + 2) / 2),
    }


def test_weights_per_sequence_by_hand():
    # Products e^3.5 (capped at 4), e^−.6, e^−9.6; the masked token adds nothing to its row's product.
    settings = Importance(cap=4.0, level="sequence")
    columns = correct(make_rows(), settings, Meters()).columns
    assert columns[WEIGHT].values.tolist() == pytest.approx([4.0] * 2 + [math.exp(-0.6)] * 3 + [math.exp(-9.6)] * 2)
    columns = correct(make_rows(masked=[1]), settings, Meters()).columns
    assert columns[WEIGHT].values[:2].tolist() == pytest.approx([math.exp(0.5)] * 2)


def test_a_masked_token_without_a_log_prob_adds_nothing():
    inputs = make_rows(masked=[1])
    inputs.engine_logprobs.values[1] = math.nan
    for level in ("token", "sequence"):
        weight = correct(inputs, Importance(cap=9.0, level=level), Meters()).columns[WEIGHT].values
        assert weight[0] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_against_a_slow_loop(level):
    settings = Importance(cap=1.02, level=level)
    for seed in range(20):
        inputs = make_inputs(lengths=(9, 1, 70, 4, 30), seed=seed)
        noise = torch.randn(len(inputs.mask.values), generator=torch.Generator().manual_seed(seed))
        inputs = inputs.replace(engine_logprobs=inputs.mask.with_values(inputs.old_logprobs.values + 0.03 * noise))
        out = correct(inputs, settings, Meters())
        for row in range(5):
            mask = inputs.mask.row(row).tolist()
            old, engine = inputs.old_logprobs.row(row).tolist(), inputs.engine_logprobs.row(row).tolist()
            logs = [a - b if m else 0.0 for a, b, m in zip(old, engine, mask, strict=True)]
            assert out.mask.row(row).tolist() == mask
            weights = [math.exp(sum(logs))] * len(logs) if level == "sequence" else list(map(math.exp, logs))
            assert out.columns[WEIGHT].row(row).tolist() == pytest.approx([min(w, 1.02) for w in weights], rel=1e-5)


def expected_gradient(level):
    """E over the engine's two-token sequences of the gradient, with logits of the learner as leaf."""
    g = torch.Generator().manual_seed(0)
    engine = torch.log_softmax(torch.randn(2, 3, generator=g, dtype=torch.float64), -1)
    logits = torch.randn(2, 3, generator=g, dtype=torch.float64).requires_grad_()
    reward = torch.randn(3, 3, generator=g, dtype=torch.float64)
    own = torch.log_softmax(logits, -1)
    rows = list(itertools.product(range(3), range(3)))
    exact = torch.autograd.grad(sum(own[0, a].exp() * own[1, b].exp() * reward[a, b] for a, b in rows), logits)[0]
    total = torch.zeros_like(logits)
    for a, b in rows:
        own = torch.log_softmax(logits, -1)
        inputs = make_rows([[0.0, 0.0]]).replace(
            logprobs=Jagged.from_rows([torch.stack([own[0, a], own[1, b]])]),
            old_logprobs=Jagged.from_rows([torch.stack([own[0, a], own[1, b]]).detach()]),
            engine_logprobs=Jagged.from_rows([torch.stack([engine[0, a], engine[1, b]])]),
            advantage=Jagged.from_rows([reward[a, b].repeat(2)]),
        )
        importance = Importance(cap=1e6, level=level)
        settings = ObjectiveSettings(use="reinforce", importance=importance, aggregate="seq_mean_token_sum")
        inputs = prepare(inputs, settings, Meters())
        loss = aggregate(terms(inputs, settings, Meters()), inputs.mask, settings, counts(inputs.mask.sum()))
        total -= torch.autograd.grad(loss, logits)[0] * (engine[0, a] + engine[1, b]).exp()
    return total, exact


def test_sequence_weights_give_the_policy_gradient_of_the_learner_and_token_weights_do_not():
    total, exact = expected_gradient("sequence")
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-7)  # weights are float32
    total, exact = expected_gradient("token")
    assert (total - exact).abs().max() > 0.01


def test_wrong_settings():
    with pytest.raises(ValueError, match=r"expected cap ≥ 0 \(0 is off\), got -1"):
        Importance(cap=-1.0)
