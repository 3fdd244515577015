"""The learner in bfloat16, as full-size models train: equal to float32 up to rounding, and bit-equal to itself."""

import pytest
import torch
from learner_steps import run, same

from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.learner.packing.pack import pack
from creditgraph.pipeline.core.jagged import Jagged


@pytest.fixture
def models(model_folder, device):
    """The same weights in float32, rounded to bfloat16, and so with activations recomputed, as learner models."""
    from transformers import AutoModelForCausalLM

    narrow = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16)
    wide = AutoModelForCausalLM.from_pretrained(model_folder())
    wide.load_state_dict({name: t.float() for name, t in narrow.state_dict().items()})
    again = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16)
    plain = [LearnerModel(m.to(device).eval()) for m in (wide, narrow)]
    return (*plain, LearnerModel(again.to(device).eval(), recompute="full"))


def rows(device):
    prompt = Jagged.from_rows([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10], [2, 9], [4, 4, 4]], torch.int32)
    response = Jagged.from_rows([[8, 9, 11], [8, 9, 3, 4], [11], [1, 2, 3, 4, 5, 6, 7, 8, 9]], torch.int32)
    return prompt.to(device), response.to(device)


def gradients(model, batch):
    logprobs, entropies = model.logprobs(batch, 0.9)
    (logprobs.values.square().sum() + entropies.values.sum()).backward()
    found = torch.cat([p.grad.float().reshape(-1) for p in model.trainable().values()])
    model.causal_lm.zero_grad(set_to_none=True)
    return logprobs.values.detach(), found


@pytest.mark.parametrize("share", [False, True])
def test_logprobs_and_gradients_are_those_of_float32(models, device, share):
    wide, narrow, again = models
    assert wide.packs
    assert narrow.packs
    batch = pack(*rows(device), torch.arange(4, device=device), share=share)
    assert (batch.saved > 0) == share
    expected, true_gradient = gradients(wide, batch)
    actual, gradient = gradients(narrow, batch)
    assert actual.dtype == torch.float32
    # Log-probs are 3 to 6 nats; bfloat16 has 8 bits.
    assert float((actual - expected).abs().mean()) < 0.02
    assert float((gradient - true_gradient).norm() / true_gradient.norm()) < 0.03
    recomputed, same_gradient = gradients(again, batch)
    assert torch.equal(recomputed, actual)
    assert float((same_gradient - gradient).norm() / gradient.norm()) < (0.01 if device == "cuda" else 1e-6)


def test_a_step_is_that_of_float32(make_learner, make_batch):
    batch = make_batch()
    settings = {"optimizer": OptimizerSettings(lr=1e-2)}
    wide, narrow = make_learner(**settings), make_learner(dtype="bfloat16", **settings)
    before = {name: t.cpu().clone() for name, t in narrow.weights().tensors.items()}
    steps = [run(learner, batch).weights.tensors for learner in (wide, narrow)]
    moved = torch.cat([(steps[1][n].cpu().float() - t.float()).reshape(-1) for n, t in before.items()])
    expected = torch.cat([(steps[0][n].cpu().float() - t.float()).reshape(-1) for n, t in before.items()])
    # A first step of Adam has the size of the learning rate wherever the sign of a gradient is clear.
    assert float(torch.nn.functional.cosine_similarity(moved, expected, 0)) > 0.9


def test_resuming_is_bit_equal(make_learner, make_batch, device):
    if device == "cuda":
        pytest.skip("flash attention's gradients do not repeat their own bits on a GPU")
    first, second = make_batch(seed=0), make_batch(seed=1)
    learner = make_learner(dtype="bfloat16")
    run(learner, first)
    state = learner.state_dict()
    resumed = make_learner(dtype="bfloat16")
    resumed.load_state_dict(state)
    assert same(resumed.weights().tensors, learner.weights().tensors)
    expected, actual = (run(one, second).weights.tensors for one in (learner, resumed))
    assert all(t.dtype == torch.bfloat16 for t in actual.values())
    assert same(actual, expected)
