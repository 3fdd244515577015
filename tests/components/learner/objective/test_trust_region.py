"""P-trace and S-trace keep a trust region: tokens outside the clip do not move, weights and gradients are bounded."""

import math

import pytest
import torch
from loss_inputs import by_hand, losses, make_inputs

from creditgraph.components.learner.objective import EntropyMask, Meters, ObjectiveSettings, loss_terms, prepare


def p_trace(**config):
    return ObjectiveSettings(use="trace", config={"clip": "current", **config})


def coefficients(inputs, objective):
    """C_k = −∂(Σ_t loss_t)/∂l_k over trained tokens."""
    prepared, loss, metrics = losses(inputs, objective)
    total = torch.where(prepared.mask.values, loss.values, 0.0).sum()
    return -torch.autograd.grad(total, inputs.logprobs.values)[0], metrics


def thousand(places, sign):
    """1,000 tokens of advantage ±1; those at `places` have left the clip on the side to which the advantage pushes."""
    logs = torch.zeros(1000)
    logs[places] = math.log(1 + 0.3 * sign)
    return by_hand(logs.tolist(), [float(sign)] * 1000)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("places", [range(0, 1000, 50), range(400, 420)], ids=["apart", "together"])
def test_clipped_tokens_get_no_gradient(places, sign):
    places = list(places)
    inputs = thousand(places, sign)
    values, metrics = coefficients(inputs, p_trace())
    others = torch.ones(1000, dtype=torch.bool)
    others[places] = False
    assert float(values[places].abs().max()) == 0
    assert bool((values[others] * sign > 0).all())
    assert metrics["clip_fraction"] == pytest.approx(0.02)
    assert metrics["clip_fraction_high" if sign > 0 else "clip_fraction_low"] == pytest.approx(0.02)


def test_a_run_of_clipped_tokens_bounds_the_gradient_of_the_others():
    # The weight after 20 tokens of 1.3 would be e = 1.3^{Σ_{j=1..20} .99^j} = 1.3^18.03 = 113; max_weight is 2.
    gated, metrics = coefficients(thousand(list(range(400, 420)), 1), p_trace())
    on_policy, _ = coefficients(thousand([], 1), p_trace())
    assert metrics["trace_weight_max"] == pytest.approx(113, abs=1)
    assert float(gated.abs().max()) <= 2 * 1.2 * float(on_policy.max())


@pytest.mark.parametrize("sign", [1, -1])
def test_when_all_tokens_are_clipped_nothing_moves(sign):
    inputs = thousand(list(range(1000)), sign)
    values, metrics = coefficients(inputs, p_trace())
    assert float(values.abs().max()) == 0
    assert metrics["clip_fraction"] == metrics["clipped_terms"] == 1.0


@pytest.mark.parametrize("style", ["recent", "both"])
@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_on_policy_the_gradient_is_that_of_the_differentiated_trace(reference, style, keep):
    inputs = make_inputs(spread=0.0)
    a = ObjectiveSettings(
        use="trace",
        config={"clip": "current", "decay": 0.9, "style": style},
        entropy_mask=EntropyMask(keep=keep, scope="sequence"),
    )
    # C_k = A_k + Σ_{t>k} w(t, k) A_t
    actual, _ = coefficients(inputs, a)
    high = prepare(inputs, a, Meters()).columns["high_entropy"] if keep < 1 else inputs.mask
    for row in range(len(inputs.mask)):
        trained, used = inputs.mask.row(row).tolist(), high.row(row).tolist()
        first, credit = (trained.index(True) if any(trained) else 0), inputs.advantage.row(row).tolist()
        for k in range(len(trained)):
            later = sum(
                reference.trace_weight(t - first + 1, k - first + 1, 0.9, style) * credit[t]
                for t in range(k + 1, len(trained))
                if trained[t] and used[k]
            )
            expected = credit[k] + later if trained[k] else 0.0
            assert float(actual.detach()[inputs.mask.offsets[row] + k]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("constant", [True, False])
def test_the_gradient_is_bounded(reference, constant):
    # Ratios from e^-6 to e^6. What the trace adds to a token is at most max_weight (1 + ε) Σ_{t>k} w(t, k) |A_t|.
    inputs = make_inputs(lengths=(200, 60), spread=2.0, masked=False, constant=constant)
    actual, metrics = coefficients(inputs, p_trace(decay=0.9, max_weight=1.5))
    assert metrics["trace_weight"] <= 1.5 < metrics["trace_weight_max"]
    assert 0 < metrics["trace_weight_capped"] < 1
    ratio = (inputs.logprobs.values - inputs.old_logprobs.values).detach().exp()
    size = inputs.advantage.values.abs()
    for row in range(2):
        start, end = inputs.mask.offsets[row : row + 2].tolist()
        for k in range(start, end):
            later = sum(0.9 ** (t - k) * float(size[t]) for t in range(k + 1, end))
            assert abs(float(actual[k])) <= 1.5 * (float(ratio[k] * size[k]) + 1.2 * later) * (1 + 1e-5)


def test_mixed_signs_by_hand():
    # d = .5, ρ = 1.5, 1, 1 and A = 1, 2, −4. e = 1, 1.5^.5, 1.5^.25. Token 1 is outside for A > 0: only the term of
    # A = −4, which pulls it back, moves it: .25·1.5^.25·(−4). Token 2: 2 e_2 + .5 e_3·(−4). Token 3: −4 e_3.
    inputs = by_hand([math.log(1.5), 0.0, 0.0], [1.0, 2.0, -4.0])
    actual, metrics = coefficients(inputs, p_trace(decay=0.5))
    e2, e3 = 1.5**0.5, 1.5**0.25
    assert actual.tolist() == pytest.approx([-e3, 2 * e2 - 2 * e3, -4 * e3])
    assert (metrics["clip_fraction"], metrics["clipped_terms"]) == (0.0, pytest.approx(1 / 3))


@pytest.mark.parametrize("keep", [1.0, 0.4])
def test_inside_the_clip_the_gradient_is_that_of_the_value(keep):
    # Finite differences in float64: no ratio is outside the clip and no weight is at its bound.
    inputs = make_inputs(lengths=(7, 1, 12), spread=0.0)
    wide = inputs.map(
        lambda j: j.with_values(j.values.detach().double()) if j.values.is_floating_point() else j, inputs.group
    )
    objective = ObjectiveSettings(
        use="trace", config={"clip": "current", "decay": 0.8}, entropy_mask=EntropyMask(keep=keep)
    )
    prepared = prepare(wide, objective, Meters())
    noise = 0.05 * torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = prepared.mask.values

    def value(logprobs):
        loss = loss_terms(prepared.replace(logprobs=wide.logprobs.with_values(logprobs)), objective, Meters())
        return torch.where(mask, loss.values, 0.0).sum()

    point = wide.old_logprobs.values + noise
    slope = torch.autograd.grad(value(leaf := point.clone().requires_grad_()), leaf)[0]
    for k in range(20):
        step = torch.zeros(20, dtype=torch.float64)
        step[k] = 1e-6
        with torch.no_grad():
            # The gated terms have no value of their own.
            difference = float((value(point + step) - value(point - step)) / 2e-6)
        assert float(slope[k]) == pytest.approx(difference, abs=1e-7), k


@pytest.mark.parametrize(
    ("use", "config", "expected"),
    [
        ("trace", {"style": "recent"}, 0.075),
        ("trace", {"style": "both"}, 0.15),
        ("trace", {"clip": "current"}, 0.0),
        ("gspo", {}, 0.30),
        ("ppo_clip", {}, 0.0),
    ],
)
def test_ratios_of_many_tokens_add_up_an_engines_rounding(use, config, expected):
    # The pages' figures: 512 rows of 1,000 tokens, advantages ±1, .02 nats of noise per token instead of a step.
    # GSPO's by hand: the mean of 1,000 has σ = 6.3e-4; P(> 4e-4) = .26 and P(< −3e-4) = .32, mean .29.
    inputs = make_inputs(lengths=(1000,) * 512, spread=0.02, masked=False)
    signs = torch.where(torch.arange(512) % 2 == 0, 1.0, -1.0)
    objective = ObjectiveSettings(use=use, config=config)
    _, _, metrics = losses(inputs.replace(advantage=inputs.mask.spread(signs)), objective)
    assert metrics.get("clipped_terms", metrics["clip_fraction"]) == pytest.approx(expected, rel=0.2, abs=1e-3)
    if config == {"clip": "current"}:
        assert 1.6 < metrics["trace_weight_max"] < 2


@pytest.mark.parametrize("clip", ["traced", "current", "inside"])
def test_clip_fraction_counts_tokens_without_gradient(clip):
    objective = ObjectiveSettings(use="trace", config={"clip": clip, "decay": 0.9})
    inputs = make_inputs(lengths=(9, 1, 70, 40), spread=0.3, constant=True)
    moves, metrics = coefficients(inputs, objective)
    trained = inputs.mask.values
    still = (moves == 0) & trained
    assert metrics["clip_fraction"] == pytest.approx(float(still.sum() / trained.sum()))
    assert metrics["clip_fraction"] <= metrics["clipped_terms"]
    assert metrics["clipped_terms"] > 0
