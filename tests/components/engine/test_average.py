"""The average of a learner's weights."""

import pytest
import torch

from creditgraph.components.engine.average import WeightAverage
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.payloads import ScoredSequence, Weights


def weights(value, version=0, dtype=torch.float32):
    scored = ScoredSequence(tokens=(1, 2), logprobs=(0.0,))
    return Weights(version=version, tensors={"w": torch.full((2,), value, dtype=dtype)}, scored=scored)


def test_by_hand_and_against_the_sum(toolbox):
    # θ̄: 0, then .75·0 + .25·8 = 2, then .75·2 + .25·4 = 2.5.
    node = toolbox.start(WeightAverage, rate=0.25)
    values = [node.run(weights=weights(v, version)).weights for version, v in enumerate((0.0, 8.0, 4.0))]
    assert [w.tensors["w"].tolist() for w in values] == [[0.0, 0.0], [2.0, 2.0], [2.5, 2.5]]
    assert [w.version for w in values] == [0, 1, 2]
    assert values[2].scored is None  # the learner's log-probs are not those of the average
    # θ̄_n = (1 − α)^n θ_0 + Σ_k α (1 − α)^(n−k) θ_k
    drawn = torch.randn(9, generator=torch.Generator().manual_seed(0)).tolist()
    node = toolbox.start(WeightAverage)
    last = [node.run(weights=weights(v)).weights for v in drawn][-1].tensors["w"][0]
    direct = 0.95**8 * drawn[0] + sum(0.05 * 0.95 ** (8 - k) * drawn[k] for k in range(1, 9))
    assert float(last) == pytest.approx(direct, abs=1e-6)


def test_a_rate_of_one_is_the_learner_and_small_steps_survive_bfloat16(toolbox):
    node = toolbox.start(WeightAverage, rate=1.0)
    assert [node.run(weights=weights(v)).weights.tensors["w"][0] for v in (1.0, 3.0)] == [1.0, 3.0]
    # Steps of 2⁻¹⁰ are below the spacing of bfloat16 at 1, 2⁻⁷; sixteen of them are not.
    node = toolbox.start(WeightAverage, rate=2.0**-10)
    node.run(weights=weights(1.0, dtype=torch.bfloat16))
    for _ in range(16):
        out = node.run(weights=weights(2.0, dtype=torch.bfloat16)).weights.tensors["w"]
    assert out.dtype == torch.bfloat16
    assert float(out[0]) > 1.0


def test_a_resumed_average_goes_on_bit_for_bit(toolbox):
    whole = toolbox.start(WeightAverage)
    parts = [whole.run(weights=weights(v)).weights for v in (0.3, 1.7, -2.1, 0.9)]
    first, second = toolbox.start(WeightAverage), toolbox.start(WeightAverage)
    for v in (0.3, 1.7):
        first.run(weights=weights(v))
    second.load_state_dict(first.state_dict())
    for v in (-2.1, 0.9):
        last = second.run(weights=weights(v)).weights
    assert torch.equal(last.tensors["w"], parts[-1].tensors["w"])


def test_other_weights_and_settings_are_refused(toolbox):
    node = toolbox.start(WeightAverage)
    assert node.run(weights=Weights(version=0)).weights.initial  # the model's own, which the engine loads itself
    node.run(weights=weights(1.0))
    with pytest.raises(DataError, match=r"expected 1 tensors with the names and shapes of the first weights"):
        node.run(weights=Weights(version=3, tensors={"v": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"expected 0 < rate ≤ 1 \(1 follows the learner\), got 0.0"):
        WeightAverage.Config(rate=0.0)
