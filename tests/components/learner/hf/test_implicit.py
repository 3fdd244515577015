"""value.implicit: the loss by hand, rewards before the update, what is learned, resume."""

import math

import pytest
import torch

from creditgraph.components.learner.hf.implicit import ImplicitReward, OutcomeEntropy, sums_before
from creditgraph.components.learner.objective import LossInputs, Meters
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.segmenter.fixed import fixed_ends
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, Segments


def node_of(folder, **settings):
    node = ImplicitReward(ImplicitReward.Config(**{"optimizer": OptimizerSettings(lr=3e-3), **settings}))
    node.setup(Context(node="value", iterations=30, model=ModelSpec(path=str(folder))))
    return node


def case(trajectories, width=1):
    correct = torch.arange(len(trajectories)) % 2 == 1
    rewards = Rewards(
        uid=trajectories.uid,
        value=correct.float(),
        correct=correct,
        valid=torch.ones(len(trajectories), dtype=torch.bool),
        detail=[""] * len(trajectories),
    )
    ends = fixed_ends(trajectories.response_tokens.lengths, width)
    return {"trajectories": trajectories, "segments": Segments(uid=trajectories.uid, ends=ends), "rewards": rewards}


def test_the_loss_and_its_gradient_by_hand():
    # Row 0: Σ Δ = 2 − 1 (the third token is masked), β = .5: s = .5, y = 1, −log σ(.5) over two tokens, gradients each
    # β (σ(s) − y). Row 1: s = .5 · 3, y = 0: −log σ(−1.5).
    old = Jagged.from_rows([[0.0, 0.0, 0.0], [0.0]], torch.float32)
    new = old.with_values(torch.tensor([2.0, -1.0, 7.0, 3.0]).requires_grad_())
    mask = old.with_values(torch.tensor([True, True, False, True]))
    inputs = LossInputs(
        logprobs=new, old_logprobs=old, engine_logprobs=old, advantage=old.with_values(torch.tensor([1.0, 1, 1, 0])),
        mask=mask, group=torch.zeros(2, dtype=torch.int64), old_entropies=old,
    )  # fmt: skip
    loss = OutcomeEntropy(OutcomeEntropy.Config(beta=0.5)).terms(inputs, Meters())
    first, second = math.log(1 + math.exp(-0.5)), math.log(1 + math.exp(1.5))
    assert loss[mask.values].tolist() == pytest.approx([first / 2, first / 2, second])
    (grad,) = torch.autograd.grad(loss[mask.values].sum(), new.values)
    sigma = lambda s: 1 / (1 + math.exp(-s))  # noqa: E731
    own = 0.5 * (sigma(0.5) - 1)
    assert grad.tolist() == pytest.approx([own, own, 0.0, 0.5 * sigma(1.5)])


def test_sums_by_hand():
    reward = Jagged.from_rows([[1.0, 2.0, 4.0], [3.0]], torch.float32)
    ends = Jagged.from_rows([[2, 3], [1]], torch.int32)
    values = sums_before(reward, Segments(uid=torch.arange(2), ends=ends))
    assert values.to_lists() == [[0.0, 3.0, 7.0], [0.0, 3.0]]


@pytest.mark.slow
def test_rewards_are_those_before_the_update_and_outcomes_are_learned(model_folder, make_batch):
    inputs = case(make_batch()[0])
    node = node_of(model_folder())
    first = node.run(**inputs).values.values
    assert not first.values.any()  # φ is still the reference
    for iteration in range(1, 30):
        node.context.iteration = iteration
        values = node.run(**inputs).values.values
    last = values.values[values.offsets[1:] - 1]
    assert bool(((last > 0) == inputs["rewards"].correct).all())
    assert node.context.metrics["accuracy"] == 1.0
    assert node.context.metrics["loss"] < math.log(2)


def test_an_invalid_reward_is_not_learned_and_a_copy_continues_bit_for_bit(model_folder, make_batch):
    folder, inputs = model_folder(), case(make_batch()[0])
    inputs["rewards"] = inputs["rewards"].replace(valid=torch.zeros(len(inputs["trajectories"]), dtype=torch.bool))
    node = node_of(folder)
    before = {name: p.detach().clone() for name, p in node.model.trainable().items()}
    node.run(**inputs)
    assert all(torch.equal(p, before[name]) for name, p in node.model.trainable().items())
    inputs = case(inputs["trajectories"])
    node.run(**inputs)
    copy = node_of(folder)
    copy.load_state_dict(node.state_dict())
    assert torch.equal(copy.run(**inputs).values.values.values, node.run(**inputs).values.values.values)
