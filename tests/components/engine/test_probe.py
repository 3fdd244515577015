"""The check that an engine computes with the weights it was given."""

import math

import pytest
import torch
from torch import nn

from creditgraph.components.engine.messages import ScoreRequest
from creditgraph.components.engine.probe import (
    ProbeError,
    compare_logprobs,
    probe_request,
    reference_logprobs,
    skeleton,
)
from creditgraph.components.engine.weights import WeightNames
from creditgraph.components.models.load import load_causal_lm, load_config
from creditgraph.pipeline.core.component import ModelSpec

NAN, INF = math.nan, math.inf


def row(place, value):
    values = [-1.0, -2.0, -3.0]
    values[place] = value
    return values


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_on_one_side_fails(place, bad):
    good = row(place, -1.5)
    for actual, expected in ((row(place, bad), good), (good, row(place, bad))):
        with pytest.raises(ProbeError, match=r"differ by up to inf nats .* expected at most 100"):
            compare_logprobs(actual, expected, tolerance=100.0)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
def test_nan_on_both_sides_is_equal_and_infinity_is_not(place):
    assert compare_logprobs(row(place, NAN), row(place, NAN), tolerance=0.0) == 0.0
    others = [x + 0.25 for x in row(place, NAN)]
    assert compare_logprobs(others, row(place, NAN), tolerance=0.5) == 0.25
    with pytest.raises(ProbeError, match="inf nats"):
        compare_logprobs(row(place, -INF), row(place, -INF), tolerance=100.0)


def test_the_tolerance_is_the_largest_difference_that_passes():
    assert compare_logprobs([-1.0, -2.0], [-1.5, -2.0], tolerance=0.5) == 0.5
    with pytest.raises(ProbeError, match=r"differ by up to 0\.5 nats .* expected at most 0\.4"):
        compare_logprobs([-1.0, -2.0], [-1.5, -2.0], tolerance=0.4)
    with pytest.raises(ProbeError, match="expected 2 log-probs of a fixed sequence, got 1"):
        compare_logprobs([-1.0], [-1.0, -2.0], tolerance=1.0)


def test_the_sequence_lies_in_vocabulary_and_context():
    for vocab, length in ((54, 192), (54, 2), (151936, 4096)):
        request = probe_request(vocab, length)
        ids = request.context + request.tokens
        assert len(ids) == min(16, length)
        assert all(0 <= i < vocab for i in ids)


def test_the_reference_is_the_models_own_forward_with_the_given_tensors():
    spec = ModelSpec()
    register = nn.Module.register_parameter
    empty = skeleton(spec, load_config(spec))
    assert nn.Module.register_parameter is register
    model = load_causal_lm(spec)
    names, own = WeightNames(empty), WeightNames(model)
    assert (names.shapes, names.tied) == (own.shapes, own.tied)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(empty.named_buffers())[name], buffer), name

    request = ScoreRequest(row=0, group=0, context=[5, 6], tokens=[7, 8, 9], temperature=1.0)
    tensors = dict(model.state_dict())
    for arrived in (torch.float32, torch.bfloat16):
        values = reference_logprobs(empty, tensors, request, torch.float32, arrived)
        rounded = load_causal_lm(spec)
        rounded.load_state_dict({name: t.to(arrived).float() for name, t in tensors.items()})
        with torch.no_grad():
            table = rounded(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0].log_softmax(-1)
        expected = [float(table[place, token]) for place, token in ((1, 7), (2, 8), (3, 9))]
        assert values == pytest.approx(expected, abs=1e-6)
