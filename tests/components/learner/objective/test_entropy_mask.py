"""Masks of low-entropy tokens, on the loss and on traces."""

import math

import pytest
import torch
from loss_inputs import by_hand, gradient, losses, make_inputs

from creditgraph.components.learner.objective import EntropyMask, Meters, ObjectiveSettings, prepare
from creditgraph.components.learner.objective.entropy_mask import high_by_scope
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import Stream


def high(values, keep):
    return high_by_scope(
        values, torch.ones(len(values), dtype=torch.bool), torch.zeros(len(values), dtype=torch.int64), keep
    )


def test_high_entropy_by_hand():
    values = torch.tensor([0.5, 0.1, 0.9, 0.9, 0.0])
    # ⌈.4·5⌉ = 2nd largest, ⌈.5·5⌉ = 3rd, ⌈.01·5⌉ = 1st with its equal, all: the smallest
    expected = {0.4: [0, 0, 1, 1, 0], 0.5: [1, 0, 1, 1, 0], 0.01: [0, 0, 1, 1, 0], 1.0: [1, 1, 1, 1, 1]}
    for keep, flags in expected.items():
        assert high(values, keep).int().tolist() == flags
    assert high(torch.zeros(0), 0.5).tolist() == []


def kept(inputs, seed=0, **settings):
    """Flags of the tokens that a mask on the loss keeps."""
    objective = ObjectiveSettings(entropy_mask=EntropyMask(where="loss", **settings))
    return prepare(inputs, objective, Meters(), stream=Stream(seed, "learner", 1)).columns["in_loss"].values


def test_the_controls_keep_the_lowest_or_a_random_share():
    inputs = by_hand([0.1, -0.2, 0.3, 0.1, -0.1], [1.0] * 5)
    inputs = inputs.replace(old_entropies=Jagged.from_rows([torch.tensor([0.5, 0.1, 0.9, 0.0, 0.0])]))
    assert kept(inputs, keep=0.6, order="low").int().tolist() == [0, 1, 0, 1, 1]
    assert kept(inputs, keep=0.4).int().tolist() == [1, 0, 1, 0, 0]  # the others
    whole = make_inputs()
    for scope in ("batch", "sequence"):
        drawn = kept(whole, keep=0.3, order="random", scope=scope)
        assert torch.equal(drawn, kept(whole, keep=0.3, order="random", scope=scope))
        assert not torch.equal(drawn, kept(whole, keep=0.3, scope=scope))
    count = int(whole.mask.values.sum())
    assert int(kept(whole, keep=0.3, order="random").sum()) == math.ceil(0.3 * count)
    assert not torch.equal(kept(whole, keep=0.3, order="random", seed=1), kept(whole, keep=0.3, order="random", seed=2))
    other = whole.replace(group=whole.group + 1000)
    assert not torch.equal(kept(other, keep=0.3, order="random"), kept(whole, keep=0.3, order="random"))


def test_tokens_of_no_entropy_are_left_out_and_counted():
    # ⌈.6·5⌉ = 3 tokens are asked for, two have entropy: τ = 0, and without the rule all five would stay.
    inputs = by_hand([0.1, -0.2, 0.3, 0.1, -0.1], [1.0] * 5)
    inputs = inputs.replace(old_entropies=Jagged.from_rows([torch.tensor([0.0, 0.7, 0.0, 0.2, 0.0])]))
    s_trace, p_trace = (
        ObjectiveSettings(use="trace", config={"clip": "current"}, entropy_mask=mask)
        for mask in (EntropyMask(keep=0.6), EntropyMask())
    )
    prepared, _, metrics = losses(inputs, s_trace)
    assert prepared.columns["high_entropy"].values.int().tolist() == [0, 1, 0, 1, 0]
    assert (metrics["high_entropy"], metrics["high_entropy_ties"]) == (pytest.approx(0.4), pytest.approx(0.6))
    assert not torch.allclose(gradient(inputs, s_trace), gradient(inputs, p_trace))
    # Nothing ties at a threshold above 0.
    narrow = EntropyMask(keep=0.4, where="loss", denominator="kept")
    assert losses(inputs, ObjectiveSettings(entropy_mask=narrow))[2]["high_entropy_ties"] == 0.0
    # All tokens certain: nothing is in the loss, and the loss is 0 rather than NaN.
    certain = inputs.replace(old_entropies=inputs.mask.with_values(torch.zeros(5)))
    for denominator in ("all", "kept"):
        objective = ObjectiveSettings(entropy_mask=EntropyMask(keep=0.4, where="loss", denominator=denominator))
        assert gradient(certain, objective).tolist() == [0.0] * 5
        assert losses(certain, objective)[2]["high_entropy_ties"] == 1.0


@pytest.mark.parametrize("keep", [0.01, 0.2, 0.5, 0.99])
def test_high_entropy_equals_sort(keep):
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0)) ** 4
    threshold = values.sort(descending=True).values[math.ceil(keep * 1001) - 1]
    assert high(values, keep).equal(values >= threshold)


@pytest.mark.parametrize("scope", ["batch", "sequence", "group"])
@pytest.mark.parametrize("keep", [0.2, 0.5])
def test_entropy_mask_equals_loop(reference, scope, keep):
    inputs = make_inputs()
    prepared = prepare(
        inputs, ObjectiveSettings(entropy_mask=EntropyMask(keep=keep, scope=scope, where="loss")), Meters()
    )
    actual = prepared.columns["high_entropy"].values.tolist()
    ids = {
        "batch": [0] * 84,
        "sequence": inputs.mask.row_ids.tolist(),
        "group": inputs.group[inputs.mask.row_ids].tolist(),
    }[scope]
    entropies, mask = inputs.old_entropies.values.tolist(), inputs.mask.values.tolist()
    expected = [None] * 84
    for one in set(ids):
        places = [i for i in range(84) if ids[i] == one]
        high = reference.high_entropy([entropies[i] for i in places], [mask[i] for i in places], keep)
        for place, value in zip(places, high, strict=True):
            expected[place] = value
    assert actual == expected


def test_entropy_mask_wants_the_entropies_of_trained_tokens():
    inputs = make_inputs()
    trained, entropies = inputs.mask.values, inputs.old_entropies.values
    settings = ObjectiveSettings(entropy_mask=EntropyMask(keep=0.5, where="loss"))
    for scope, unknown in (("others", ~trained), ("trained", trained)):
        gaps = inputs.replace(old_entropies=inputs.mask.with_values(entropies.masked_fill(unknown, float("nan"))))
        if scope == "others":
            expected = prepare(inputs, settings, Meters()).columns["high_entropy"]
            assert prepare(gaps, settings, Meters()).columns["high_entropy"].equal(expected)
            continue
        with pytest.raises(
            CreditgraphError, match=r"objective.entropy_mask: the engine gave no entropy for \d+ of \d+ tokens"
        ):
            prepare(gaps, settings, Meters())


def test_mask_on_the_loss_is_80_20():
    inputs = make_inputs()
    for denominator in ("all", "kept"):
        objective = ObjectiveSettings(entropy_mask=EntropyMask(keep=0.2, where="loss", denominator=denominator))
        prepared, _, _ = losses(inputs, objective)
        high = prepared.columns["high_entropy"].values
        plain = gradient(inputs, ObjectiveSettings()) * int(inputs.mask.values.sum())
        count = int(high.sum()) if denominator == "kept" else int(inputs.mask.values.sum())
        torch.testing.assert_close(gradient(inputs, objective), torch.where(high, plain, 0.0) / count)


def test_trace_without_decay_masked_on_the_loss_is_80_20():
    inputs = make_inputs()
    mask = EntropyMask(keep=0.2, where="trace_and_loss")
    trace = ObjectiveSettings(use="trace", config={"decay": 0.0, "clip": "current"}, entropy_mask=mask)
    torch.testing.assert_close(gradient(inputs, trace), gradient(inputs, ObjectiveSettings(entropy_mask=mask)))


def test_sparse_trace_by_hand():
    # Only token 1 has high entropy: z = .1, .05 (d = .5), and token 2 has no own term in the traced ratio.
    inputs = by_hand([0.1, 0.2], [1.0, 1.0])
    inputs = inputs.replace(old_entropies=Jagged.from_rows([torch.tensor([1.0, 0.1])]))
    objective = ObjectiveSettings(use="trace", config={"decay": 0.5}, entropy_mask=EntropyMask(keep=0.5))
    assert losses(inputs, objective)[1].values.tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.05)])
