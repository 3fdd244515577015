"""The scan and traces: numbers by hand, double loops, and identities with PPO's clip."""

import math

import pytest
import torch
from loss_inputs import by_hand, gradient, gspo, losses, make_inputs

from creditgraph.components.learner.objective import EntropyMask, Meters, ObjectiveSettings
from creditgraph.components.learner.objective.decay import trace_sum
from creditgraph.components.learner.objective.ratio import safe_exp
from creditgraph.components.learner.objective.trace import Trace
from creditgraph.pipeline.core.jagged import Jagged

STYLES = ["recent", "both"]
CLIPS = ["traced", "current", "inside"]


# --- the scan ---


@pytest.mark.parametrize("lengths", [[1, 0, 63, 64, 65, 200], [128] * 3, [5000, 3], [64 * 65]])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
def test_scan_equals_loop(lengths, decay):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=g).requires_grad_()
    actual = trace_sum(Jagged.from_lengths(x, torch.tensor(lengths)), Trace.Config(decay=decay)).values
    expected = []
    for row in torch.split(x.detach(), lengths):
        carry = 0.0
        for value in row.tolist():
            carry = value + decay * carry
            expected.append(carry)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    # The adjoint, without another loop: ⟨u, S x⟩ = ⟨Sᵀ u, x⟩.
    u = torch.randn(sum(lengths), dtype=torch.float64, generator=g)
    (adjoint,) = torch.autograd.grad((actual * u).sum(), x)
    assert float(adjoint @ x.detach()) == pytest.approx(float(u @ actual.detach()), rel=1e-10)


def test_scan_float32_is_exact_enough():
    lengths = torch.full((4,), 8192)
    x = torch.randn(4 * 8192, generator=torch.Generator().manual_seed(0)) * 0.1
    config = Trace.Config(decay=0.99)
    narrow = trace_sum(Jagged.from_lengths(x, lengths), config).values
    wide = trace_sum(Jagged.from_lengths(x.double(), lengths), config).values
    assert float((narrow - wide).abs().max()) < 1e-5


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("decay", [0.0, 0.6, 0.97, 1.0])
def test_trace_sum_equals_loop(reference, style, decay):
    x = Jagged.from_lengths(torch.randn(84, generator=torch.Generator().manual_seed(0)), torch.tensor([9, 1, 70, 4]))
    actual = trace_sum(x, Trace.Config(decay=decay, style=style))
    for row in range(len(x)):
        values = x.row(row).tolist()
        expected = [
            sum(reference.trace_weight(t, k, decay, style) * values[k - 1] for k in range(1, t + 1))
            for t in range(1, len(values) + 1)
        ]
        torch.testing.assert_close(actual.row(row), torch.tensor(expected), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("decay", [0.0, 0.9, 0.995, 1.0])
@pytest.mark.parametrize("past_only", [False, True])
@pytest.mark.parametrize(
    ("lengths", "start"), [([1, 1], [0, 0]), ([2, 3], [0, 0]), ([130], [0]), ([64, 0, 129], [5, 0, 0])]
)
def test_trace_sum_in_float64_equals_its_matrix(reference, style, decay, past_only, lengths, start):
    g = torch.Generator().manual_seed(0)
    x = Jagged.from_lengths(torch.randn(sum(lengths), dtype=torch.float64, generator=g), torch.tensor(lengths))
    x = x.with_values((x.values * (x.positions >= x.spread(torch.tensor(start)).values)).requires_grad_())
    result = trace_sum(x, Trace.Config(decay=decay, style=style), torch.tensor(start), past_only)
    u = x.with_values(torch.randn(sum(lengths), dtype=torch.float64, generator=g))
    (adjoint,) = torch.autograd.grad((result.values * u.values).sum(), x.values)
    for row, (length, first) in enumerate(zip(lengths, start, strict=True)):
        matrix = torch.zeros(length, length, dtype=torch.float64)
        for t in range(1, length - first + 1):
            for k in range(1, t if past_only else t + 1):
                matrix[first + t - 1, first + k - 1] = reference.trace_weight(t, k, decay, style)
        close = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(result.row(row).detach(), matrix @ x.row(row).detach(), **close)
        torch.testing.assert_close(x.with_values(adjoint).row(row)[first:], (matrix.T @ u.row(row))[first:], **close)


@pytest.mark.parametrize("style", STYLES)
def test_trace_sum_in_float32_is_exact_enough(style):
    x = torch.randn(4 * 8192, generator=torch.Generator().manual_seed(0)) * 0.01
    rows, trace = Jagged.from_lengths(x, torch.full((4,), 8192)), Trace.Config(decay=0.99, style=style)
    wide = trace_sum(rows.to(torch.float64), trace).values
    assert float((trace_sum(rows, trace).values - wide).abs().max()) < 1e-5


# --- traces ---


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_masked_tokens_may_hold_anything(clip, style, value):
    objective = ObjectiveSettings(use="trace", config={"style": style, "clip": clip})
    inputs = make_inputs()
    odd = inputs.replace(
        logprobs=inputs.logprobs.with_values(inputs.logprobs.values.detach().masked_fill(~inputs.mask.values, value))
    )
    odd.logprobs.values.requires_grad_()
    torch.testing.assert_close(gradient(odd, objective), gradient(inputs, objective))


def test_safe_exp_by_hand():
    x = torch.tensor([0.0, 1.0, 20.0, 21.0, -30.0, math.inf, math.nan], requires_grad=True)
    meters = Meters()
    result = safe_exp(x, torch.ones(7, dtype=torch.bool), meters)
    edge = math.exp(20)
    assert result.tolist() == pytest.approx([1.0, math.e, edge, edge, math.exp(-20), edge, math.nan], nan_ok=True)
    (slope,) = torch.autograd.grad(result.sum(), x)
    # At the bound itself torch has e^20, and from 2.14 on 0.
    assert slope.tolist() == pytest.approx([1.0, math.e, slope[2].item(), 0, 0, 0, 0])
    assert meters.values()["ratio_overflow"] == pytest.approx(4 / 7)


def test_traced_by_hand():
    # l = .1, .2, .3, d = .5: z = .1, .25, .425. Clip .3: R = 1.105, 1.284, 1.53 → the last is cut to 1.3.
    objective = ObjectiveSettings(use="trace", config={"decay": 0.5, "clip_high": 0.3})
    inputs = by_hand([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])
    prepared, loss, metrics = losses(inputs, objective)
    assert loss.values.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.25), -1.3])
    # On-policy C_k: (1 − d^{T−k+1})/(1 − d) = 1.75, 1.5, 1
    assert prepared.columns["trace_scale"].values.tolist() == pytest.approx([1.75, 1.5, 1.0])
    assert metrics["gradient_scale"] == pytest.approx(4.25 / 3)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    # C_1 = R_1 + ½ R_2, C_2 = R_2, C_3 = 0 (clipped)
    expected = [-(math.exp(0.1) + 0.5 * math.exp(0.25)) / 3, -math.exp(0.25) / 3, 0.0]
    assert gradient(inputs, objective).tolist() == pytest.approx(expected)


def test_current_by_hand():
    # P-A: e_2 = exp(.5·.1), e_3 = exp(.25·.1 + .5·.2); ρ_3 = e^{.3} is cut to 1.3.
    objective = ObjectiveSettings(use="trace", config={"decay": 0.5, "clip": "current", "clip_high": 0.3})
    _, loss, _ = losses(by_hand([0.1, 0.2, 0.3], [1.0, 1.0, 1.0]), objective)
    assert loss.values.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.05 + 0.2), -math.exp(0.125) * 1.3])


def test_advantage_floor_by_hand():
    objective = ObjectiveSettings(use="trace", config={"min_advantage": -0.1})
    _, loss, _ = losses(by_hand([0.0, 0.0], [-1.0, 2.0]), objective)
    assert loss.values.tolist() == pytest.approx([0.1, -2.0])


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("keep", [1.0, 0.3])
def test_traces_equal_double_loop(reference, clip, style, keep):
    config = Trace.Config(clip_high=0.28, decay=0.8, max_weight=1.1, clip=clip, style=style)
    objective = ObjectiveSettings(use="trace", config=config, entropy_mask=EntropyMask(keep=keep, scope="sequence"))
    inputs = make_inputs(lengths=(9, 1, 14, 4), spread=0.2)
    prepared, loss, _ = losses(inputs, objective)
    trained = prepared.mask.values
    high = prepared.columns["high_entropy"] if keep < 1 else prepared.mask
    expected = []
    for row in range(len(inputs.mask)):
        args = [getattr(inputs, n).row(row) for n in ("logprobs", "old_logprobs", "advantage")]
        masks = (inputs.mask.row(row).tolist(), high.row(row).tolist())
        expected += reference.trace_loss(*args, *masks, 0.2, 0.28, 0.8, style, clip, 1.1)
    expected = torch.stack(expected)
    torch.testing.assert_close(loss.values[trained], expected[trained], rtol=1e-5, atol=1e-5)
    leaf = inputs.logprobs.values
    a, b = (torch.autograd.grad(x[trained].sum(), leaf)[0] for x in (loss.values, expected))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("clip", ["traced", "current"])
def test_no_decay_is_ppo_clip(clip):
    inputs = make_inputs(spread=0.3)
    objective = ObjectiveSettings(use="trace", config={"decay": 0.0, "clip": clip})
    torch.testing.assert_close(gradient(inputs, objective), gradient(inputs, ObjectiveSettings(use="ppo_clip")))


@pytest.mark.parametrize("clip", ["traced", "current"])
def test_keeping_everything_is_the_plain_trace(clip):
    inputs = make_inputs()
    plain = ObjectiveSettings(use="trace", config={"clip": clip})
    masked = ObjectiveSettings(use="trace", config={"clip": clip}, entropy_mask=EntropyMask(keep=1.0))
    assert torch.equal(gradient(inputs, plain), gradient(inputs, masked))
    tiny = ObjectiveSettings(use="trace", config={"clip": clip}, entropy_mask=EntropyMask(keep=0.999999, scope="batch"))
    torch.testing.assert_close(gradient(inputs, plain), gradient(inputs, tiny))


def test_gae_identity():
    # Σ_t A_t^GAE g_t = Σ_t δ_t Σ_{l≤t} d^{t−l} g_l, with A_t^GAE = Σ_{s≥t} d^{s−t} δ_s.
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([30, 100])
    delta, grads = (Jagged.from_lengths(torch.randn(130, generator=g, dtype=torch.float64), lengths) for _ in range(2))
    gae = []
    for row in delta.to_lists():
        carry = 0.0
        for value in reversed(row):
            carry = value + 0.95 * carry
            gae.append((len(gae), carry))
        gae[-len(row) :] = gae[-len(row) :][::-1]
    left = sum(a * b for (_, a), b in zip(gae, grads.values.tolist(), strict=True))
    right = float((delta.values * trace_sum(grads, Trace.Config(decay=0.95)).values).sum())
    assert left == pytest.approx(right)


def test_on_policy_scale_is_the_gradient(reference):
    # Differentiated, on-policy, constant A: C_k = A (1 − d^{T−k+1})/(1 − d).
    inputs = make_inputs(spread=0.0, masked=False, constant=True)
    objective = ObjectiveSettings(use="trace", config={"decay": 0.9})
    result = gradient(inputs, objective) * len(inputs.mask.values)
    left = inputs.mask.spread(inputs.mask.lengths).values - inputs.mask.positions
    torch.testing.assert_close(result, -inputs.advantage.values * (1 - 0.9**left) / 0.1, rtol=1e-4, atol=1e-4)


def test_frame_of_ratio_objectives(reference):
    # §: gradient = C_k with w = 1[k = t] (token), 1/T (sequence), d^{t−k} (trace).
    logs, advantage = [0.1, -0.05, 0.3, -0.2], [1.0, 1.0, 1.0, 1.0]
    cases = {
        "ppo_clip": (ObjectiveSettings(), lambda t, k: float(t == k)),
        "gspo": (gspo(), lambda t, k: 0.25),
        "trace": (
            ObjectiveSettings(use="trace", config={"decay": 0.7}),
            lambda t, k: 0.7 ** (t - k) if k <= t else 0.0,
        ),
    }
    for objective, weight in cases.values():
        expected = reference.ratio_frame_gradient(logs, advantage, weight, 0.2, 0.2)
        assert (-4 * gradient(by_hand(logs, advantage), objective)).tolist() == pytest.approx(expected, rel=1e-5)


def test_overflowing_trace_is_finite_and_counted():
    inputs = by_hand([9.0] * 10, [-1.0] * 10)
    for clip in ("traced", "current"):
        _, loss, metrics = losses(inputs, ObjectiveSettings(use="trace", config={"clip": clip}))
        assert bool(torch.isfinite(loss.values).all())
        assert metrics["ratio_overflow"] > 0.3


@pytest.mark.parametrize("use", ["trace", "gspo", "gspo_gated"])
def test_rows_without_trained_tokens(use):
    inputs = make_inputs()
    inputs = inputs.replace(mask=inputs.mask.with_values(inputs.mask.values & (inputs.mask.row_ids != 2)))
    result = gradient(inputs, gspo(use))
    assert bool(torch.isfinite(result).all())
    assert float(result[inputs.mask.row_ids == 2].abs().sum()) == 0


@pytest.mark.parametrize("style", STYLES)
def test_a_masked_prefix_is_as_if_it_were_prompt(style):
    # The trace counts from the first trained token: an inherited prefix changes nothing.
    objective = ObjectiveSettings(use="trace", config={"decay": 0.8, "style": style})
    short = make_inputs(lengths=(12,), masked=False)
    keep = torch.arange(12) >= 5
    masked = short.replace(mask=short.mask.with_values(keep))
    cut = short.map(lambda j: j.slice_rows(torch.tensor([5]), torch.tensor([12])), short.group)
    torch.testing.assert_close(losses(masked, objective)[1].values[5:], losses(cut, objective)[1].values)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Trace.Config(decay=1.5), "expected decay = γλ with 0 ≤ decay ≤ 1, got 1.5"),
        (lambda: Trace.Config(max_weight=0.5), "expected max_weight ≥ 1, the weight on-policy, got 0.5"),
        (lambda: EntropyMask(keep=0.0), "expected 0 < keep ≤ 1 .*, got 0.0"),
        (
            lambda: ObjectiveSettings(
                use="trace", entropy_mask=EntropyMask(keep=0.2, where="loss", denominator="kept")
            ),
            "set where: trace_and_loss",
        ),
    ],
)
def test_wrong_settings(make, text):
    with pytest.raises(ValueError, match=text):
        make()
