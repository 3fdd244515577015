import dataclasses
import math
import sys
from dataclasses import dataclass

import pytest
import torch

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.objective import (
    KL,
    OBJECTIVES,
    EntropyMask,
    LossInputs,
    Meters,
    Objective,
    ObjectiveSettings,
    aggregate,
    counts,
    kl_estimate,
    loss_terms,
    prepare,
    weights,
)
from creditgraph.components.learner.objective.gspo import GSPO
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.settings import build_config

AGGREGATES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]


def make_inputs(lengths=(3, 5, 1, 4), seed=0, spread=0.3, on_policy=False, masked=True):
    g = torch.Generator().manual_seed(seed)
    base = Jagged.from_lengths(-torch.rand(sum(lengths), generator=g) * 3, torch.tensor(lengths))
    change = torch.zeros(len(base.values)) if on_policy else spread * torch.randn(len(base.values), generator=g)
    mask = torch.rand(len(base.values), generator=g) > 0.3 if masked else torch.ones(len(base.values), dtype=torch.bool)
    return LossInputs(
        logprobs=base.with_values((base.values + change).requires_grad_()),
        old_logprobs=base,
        engine_logprobs=base.with_values(base.values + 0.1 * torch.randn(len(base.values), generator=g)),
        advantage=base.spread(torch.randn(len(lengths), generator=g)),
        mask=base.with_values(mask),
        group=torch.arange(len(lengths)) // 2,
        old_entropies=base.with_values(torch.rand(len(base.values), generator=g)),
        entropies=base.with_values(torch.rand(len(base.values), generator=g).requires_grad_()),
        reference_logprobs=base.with_values(base.values + 0.5 * torch.randn(len(base.values), generator=g)),
    )


def one_row(new, old, advantage, **more):
    def row(values):
        return Jagged.from_rows([torch.tensor(values, dtype=torch.float32)])

    new = row(new)
    return LossInputs(
        logprobs=new.with_values(new.values.requires_grad_()),
        old_logprobs=row(old),
        engine_logprobs=row(old),
        advantage=row(advantage),
        mask=Jagged.from_rows([torch.ones(len(old), dtype=torch.bool)]),
        group=torch.zeros(1, dtype=torch.int64),
        old_entropies=row([0.0] * len(old)),
        **more,
    )


def losses(inputs, settings):
    """Loss per token, and metrics."""
    meters = Meters()
    loss = loss_terms(inputs, settings, meters)
    return loss, meters.values()


def total(inputs, objective, denominators=None):
    denominators = counts(inputs.mask.sum()) if denominators is None else denominators
    return aggregate(losses(inputs, objective)[0], inputs.mask, objective, denominators)


def gradient(inputs, objective, denominators=None):
    return torch.autograd.grad(total(inputs, objective, denominators), inputs.logprobs.values)[0]


# --- token and reinforce ---


def test_token_by_hand():
    # Ratios 1.5, 0.5, 1.5, 0.5 with A = 1, 1, −1, −1 and clip .2: objectives min(1.5, 1.2), min(.5, .8), min(−1.5,
    # −1.2), min(−.5, −.8).
    logs = [math.log(1.5), math.log(0.5)] * 2
    loss, metrics = losses(one_row(logs, [0.0] * 4, [1.0, 1.0, -1.0, -1.0]), ObjectiveSettings(use="ppo_clip"))
    assert loss.values.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8])
    assert metrics["clip_fraction"] == 0.5
    assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.25
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    # k3 of KL(old ‖ new), ρ − 1 − log ρ, mean of (.5 − log 1.5) and (−.5 − log .5)
    assert metrics["approx_kl"] == pytest.approx((-math.log(1.5) - math.log(0.5)) / 2)


def test_dual_clip_by_hand():
    # Ratio 5, A = −2: without dual clip the loss is 10, with c = 3 it is 6 and has no gradient. A = 2 is untouched by
    # it: −1.2·2.
    inputs = one_row([math.log(5)] * 2, [0.0] * 2, [-2.0, 2.0])
    assert losses(inputs, ObjectiveSettings())[0].values.tolist() == pytest.approx([10.0, -2.4])
    dual = ObjectiveSettings(config={"dual_clip": 3.0})
    loss, metrics = losses(inputs, dual)
    assert loss.values.tolist() == pytest.approx([6.0, -2.4])
    assert gradient(inputs, dual).tolist() == [0.0, 0.0]
    assert metrics["clip_fraction_dual"] == 0.5


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
def test_token_equals_loop(reference, dual_clip):
    inputs = make_inputs(spread=0.8)
    result = losses(inputs, ObjectiveSettings(config={"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual_clip}))[0]
    for row in range(len(result)):
        args = (inputs.logprobs.row(row), inputs.old_logprobs.row(row), inputs.advantage.row(row))
        torch.testing.assert_close(result.row(row), torch.stack(reference.token_loss(*args, 0.2, 0.3, dual_clip)))


def test_reinforce_by_hand():
    loss, _ = losses(one_row([-1.0, -2.0], [0.0, 0.0], [0.5, -1.0]), ObjectiveSettings(use="reinforce"))
    # −.5·(−1) = .5 and −(−1)(−2) = −2
    assert loss.values.tolist() == [0.5, -2.0]


@pytest.mark.parametrize("how", AGGREGATES)
def test_reinforce_is_token_on_policy(how):
    more = {"aggregate": how, "constant_length": 8 if how == "constant" else 0}
    inputs = make_inputs(on_policy=True)
    a, b = (
        gradient(inputs, ObjectiveSettings(use="reinforce", **more)),
        gradient(inputs, ObjectiveSettings(use="ppo_clip", **more)),
    )
    torch.testing.assert_close(a, b)
    assert float(a.abs().sum()) > 0


def test_overflowing_ratio_is_finite_and_counted():
    loss, metrics = losses(one_row([0.0, -1.0], [-500.0, -1.0], [-1.0, 1.0]), ObjectiveSettings())
    assert bool(torch.isfinite(loss.values).all())
    assert metrics["ratio_overflow"] == 0.5


# --- optional terms ---


def test_kl_by_hand():
    d = torch.tensor([math.log(2.0), 0.0, -math.log(2.0)])
    zero = torch.zeros(3)
    assert kl_estimate(d, zero, "k1").tolist() == pytest.approx(d.tolist())
    assert kl_estimate(d, zero, "k2").tolist() == pytest.approx([math.log(2) ** 2 / 2, 0, math.log(2) ** 2 / 2])
    # e^{−d} − 1 + d: ½ − 1 + log 2, 0, 2 − 1 − log 2
    assert kl_estimate(d, zero, "k3").tolist() == pytest.approx([math.log(2) - 0.5, 0, 1 - math.log(2)], abs=1e-7)


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", math.log(2)), ("k3", 0.5)])
def test_kl_gradient_by_hand(estimator, slope):
    # d = log 2: k1' = 1, k2' = d, k3' = 1 − e^{−d} = ½
    d = torch.tensor([math.log(2.0)], requires_grad=True)
    kl_estimate(d, torch.zeros(1), estimator).sum().backward()
    assert float(d.grad) == pytest.approx(slope)


def test_kl_estimators_average_to_the_kl():
    # Over a whole distribution k1 and k3 are exact: Σ p d = Σ p (e^{−d} − 1 + d) = KL.
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, generator=g).softmax(0) for _ in range(2))
    kl = (p * (p.log() - q.log())).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), estimator)).sum(), kl)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_term_adds(estimator):
    inputs = make_inputs()
    plain = losses(inputs, ObjectiveSettings())[0].values
    loss, metrics = losses(inputs, ObjectiveSettings(kl=KL(coefficient=0.3, estimator=estimator)))
    penalty = kl_estimate(inputs.logprobs.values, inputs.reference_logprobs.values, estimator)
    torch.testing.assert_close(loss.values, plain + 0.3 * penalty)
    assert metrics["kl_reference"] == pytest.approx(float(penalty[inputs.mask.values].mean().detach()), rel=1e-5)


def test_entropy_bonus_pulls_on_entropies():
    inputs = make_inputs()
    loss = losses(inputs, ObjectiveSettings(entropy_bonus=0.1))[0].values.sum()
    assert torch.autograd.grad(loss, inputs.entropies.values)[0].tolist() == pytest.approx([-0.1] * 13)


# --- aggregation ---


@pytest.mark.parametrize("how", AGGREGATES)
def test_aggregate_equals_loop(reference, how):
    mask = Jagged.from_rows([[True, False, True], [False, False], [True], [True, True, False, True]])
    values = mask.with_values(torch.randn(10, generator=torch.Generator().manual_seed(0)))
    objective = ObjectiveSettings(aggregate=how, constant_length=7 if how == "constant" else 0)
    actual = aggregate(values, mask, objective, counts(mask.sum()))
    expected = reference.aggregate_loss(values.to_lists(), mask.to_lists(), how, objective.constant_length)
    assert float(actual) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token_mean", 6 / 3),
        ("seq_mean_token_mean", (1.5 + 3) / 3),
        ("seq_mean_token_sum", 6 / 3),
        ("constant", 6 / 12),
    ],
)
def test_aggregate_by_hand(how, expected):
    # Rows (1, 2), (3, ·), (·): trained tokens 2, 1, 0; B = 3, Σm = 3, L_max = 4.
    mask = Jagged.from_rows([[True, True], [True, False], [False]])
    values = mask.with_values(torch.tensor([1.0, 2.0, 3.0, 50.0, 60.0]))
    objective = ObjectiveSettings(aggregate=how, constant_length=4 if how == "constant" else 0)
    assert float(aggregate(values, mask, objective, counts(mask.sum()))) == pytest.approx(expected)


@pytest.mark.parametrize("how", AGGREGATES)
def test_masked_infinity_does_not_reach_the_loss(how):
    mask = Jagged.from_rows([[True, False]])
    values = mask.with_values(torch.tensor([1.0, math.inf], requires_grad=True))
    objective = ObjectiveSettings(aggregate=how, constant_length=1 if how == "constant" else 0)
    loss = aggregate(values, mask, objective, counts(mask.sum()))
    assert float(loss.detach()) == 1.0
    assert torch.autograd.grad(loss, values.values)[0].tolist() == [1.0, 0.0]


def test_all_masked_has_weight_zero():
    mask = Jagged.from_rows([[False, False], [False]])
    for how in AGGREGATES:
        objective = ObjectiveSettings(aggregate=how, constant_length=1 if how == "constant" else 0)
        assert weights(mask, objective, counts(mask.sum())).values.tolist() == [0.0] * 3


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("use", sorted(OBJECTIVES))
def test_cut_does_not_matter(how, use):
    objective = ObjectiveSettings(
        use=use, aggregate=how, constant_length=6 if how == "constant" else 0, kl=KL(coefficient=0.1)
    )
    inputs = prepare(make_inputs(spread=0.5), objective, Meters())
    denominators = counts(inputs.mask.sum())
    terms, expected = losses(inputs, objective)
    whole = aggregate(terms, inputs.mask, objective, denominators)
    meters, loss = Meters(), torch.zeros(())
    for index in ([3], [0, 2], [1]):
        part = inputs.select(torch.tensor(index))
        loss = loss + aggregate(loss_terms(part, objective, meters), part.mask, objective, denominators)
    torch.testing.assert_close(loss, whole)
    a, b = (torch.autograd.grad(x, inputs.logprobs.values)[0] for x in (loss, whole))
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert meters.values() == pytest.approx(expected)
    assert set(expected) >= {"approx_kl", "entropy", "kl_reference"}


# --- settings and plug-in ---


class Scaled(Objective):
    """An objective from outside: the advantage, times a setting, from a column that it prepares."""

    metrics = (Metric("mine", "1", "mean of the column"),)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        factor: float = 1.0

        def __post_init__(self):
            if self.factor <= 0:
                raise ValueError(f"expected factor > 0, got {self.factor}.")

    def prepare(self, inputs, all_sum):
        return inputs.with_columns(mine=inputs.advantage)

    def terms(self, inputs, meters):
        meters.mean("mine", inputs.columns["mine"].values, inputs.mask.values)
        return self.config.factor * inputs.columns["mine"].values


@pytest.fixture
def outside(monkeypatch):
    """This module under a name of its own."""
    monkeypatch.setitem(sys.modules, "outside", sys.modules[__name__])
    return "outside:Scaled"


def test_objective_from_outside_has_settings_and_metrics_of_its_own(outside):
    settings = ObjectiveSettings(use=outside, config={"factor": 3})
    inputs = prepare(make_inputs(), settings, Meters())
    loss, metrics = losses(inputs, settings)
    torch.testing.assert_close(loss.values, 3 * inputs.advantage.values)
    assert metrics["mine"] == pytest.approx(float(inputs.advantage.values[inputs.mask.values].mean()))
    names = [m.name for m in HFLearner.metrics_of(HFLearner.Config(objective=settings))]
    assert "mine" in names
    assert "mine" not in [m.name for m in HFLearner.metrics]


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        (
            {"use": "ppo_clp"},
            ["l.use: 'ppo_clp' is not an objective; expected a registered name or 'package.module:Class'. "
             "Did you mean 'ppo_clip'?"],
        ),
        ({"use": "outside:one_row"}, ["l.use: component 'outside:one_row': outside:one_row is not a class."]),
        (
            {"use": "outside:Jagged"},
            ["l.use: outside:Jagged is not an objective; derive it from creditgraph.Objective."],
        ),
        (
            {"use": "no_such_module:X"},
            ["l.use: component 'no_such_module:X': module 'no_such_module' cannot be imported; install it or correct "
             "'no_such_module'."],
        ),
        (
            {"use": "outside:Scaled", "config": {"factr": 1, "clip_low": 1}},
            ["l.config.factr: unknown setting. Did you mean 'factor'?",
             "l.config.clip_low: unknown setting. Known: factor."],
        ),
        ({"use": "outside:Scaled", "config": {"factor": -1}}, ["l.config: expected factor > 0, got -1.0."]),
        ({"config": {"clip_low": "x"}}, ["l.config.clip_low: expected float, got 'x' (str)."]),
        (
            {"config": {"clip_low": 1.5}},
            ["l.config: expected 0 ≤ clip_low ≤ 1 and clip_high ≥ 0, got clip_low 1.5 and clip_high 0.2."],
        ),
        (
            {"config": {"dual_clip": 1.1}},
            ["l.config: expected dual_clip above 1 + clip_high = 1.2, or 0 (off), got 1.1."],
        ),
        (
            {"use": "reinforce", "config": {"clip_low": 0.1}},
            ["l.config.clip_low: unknown setting. There are no settings here."],
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_reported_with_their_place(outside, values, problems):
    settings, result = build_config(ObjectiveSettings, values, "l")
    assert settings is None
    assert result == problems


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"aggregate": "constant"}, "'constant' divides by B·constant_length"),
        ({"entropy_mask": EntropyMask(keep=0.5)}, "objective 'ppo_clip' has no trace to mask; set where: loss"),
    ],
)
def test_wrong_settings(settings, text):
    with pytest.raises(ValueError, match=text):
        ObjectiveSettings(**settings)


def test_settings_survive_a_replacement():
    settings = ObjectiveSettings(use="gspo", config={"clip_low": 0.1})
    assert dataclasses.replace(settings, entropy_bonus=0.1).config == GSPO.Config(clip_low=0.1)


def test_kl_without_reference():
    inputs = make_inputs().replace(reference_logprobs=None)
    with pytest.raises(ValueError, match="provided no reference log-probs"):
        losses(inputs, ObjectiveSettings(kl=KL(coefficient=0.1)))


def test_meters_reduce_over_replicas():
    meters = Meters()
    meters.mean("x", torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
    # A second replica with sum 5 over 3 tokens: (4 + 5) / (2 + 3)
    assert meters.values(lambda t: t + torch.tensor([[5.0, 3.0]]).double()) == {"x": pytest.approx(9 / 5)}
