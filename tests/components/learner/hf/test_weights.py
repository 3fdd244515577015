"""What learner.hf publishes and resumes from: full weights, LoRA, bfloat16."""

import pytest
import torch
from learner_steps import FAST, distance, run, same

from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.objective import KL, ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings


def test_lora_publishes_what_peft_merges(make_learner, make_batch):
    learner = make_learner(lora=Lora(rank=4, alpha=8), optimizer=FAST)
    trained = learner.model.trainable()
    assert trained
    assert all(".lora_" in n for n in trained)
    initial = learner.initial()["weights"].tensors
    published = run(learner, make_batch()).weights.tensors
    assert distance(initial, published) > 1e-3
    assert same(published, learner.model.published())
    merged = learner.model._peft.merge_and_unload().state_dict()
    assert set(merged) - set(published) == {"lm_head.weight"}
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=0)


def test_lora_target_that_does_not_fit(make_learner):
    with pytest.raises(ValueError, match=r"lora\.target 'nonesuch' does not fit Qwen2ForCausalLM"):
        make_learner(lora=Lora(rank=2, target="nonesuch"))


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_load_into_a_fresh_model(make_learner, make_batch, tied):
    from transformers import AutoModelForCausalLM

    learner = make_learner(tied=tied, optimizer=FAST)
    tensors = run(learner, make_batch()).weights.tensors
    assert ("lm_head.weight" in tensors) is not tied
    model = AutoModelForCausalLM.from_pretrained(learner.context.model.path)
    loaded = model.load_state_dict(tensors, strict=False)
    assert loaded.unexpected_keys == []
    assert loaded.missing_keys == (["lm_head.weight"] if tied else [])
    ids = torch.arange(10, device=learner.context.device)[None]
    learner.model.causal_lm.set_attn_implementation("sdpa")
    torch.testing.assert_close(
        model.to(ids.device)(input_ids=ids).logits, learner.model.causal_lm(input_ids=ids).logits
    )


def test_published_weights_are_a_snapshot(make_learner, make_batch):
    learner = make_learner(optimizer=FAST)
    first = run(learner, make_batch()).weights.tensors
    copy = {n: t.clone() for n, t in first.items()}
    run(learner, make_batch())
    assert same(first, copy)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bit_exact(make_learner, make_batch, device, lora, dtype):
    if (device, dtype) == ("cuda", "bfloat16"):
        pytest.skip("flash attention's gradients do not repeat their own bits on a GPU")
    more = {
        "lora": lora,
        "dtype": dtype,
        "minibatches": 2,
        "optimizer": OptimizerSettings(lr=1e-2, schedule="cosine", warmup=2),
        "objective": ObjectiveSettings(kl=KL(coefficient=0.1)),
    }
    straight, first, second = (make_learner(**more) for _ in range(3))
    for i in range(4):
        straight.context.iteration = i
        expected = run(straight, make_batch(seed=i))
    for i in range(2):
        first.context.iteration = i
        last = run(first, make_batch(seed=i))
    second.load_state_dict(first.state_dict())
    resumed = second.initial()["weights"]
    assert resumed.version == 2
    assert same(resumed.tensors, last.weights.tensors)
    for i in range(2, 4):
        second.context.iteration = i
        actual = run(second, make_batch(seed=i))
    assert same(actual.weights.tensors, expected.weights.tensors)
    assert actual.report.metrics == expected.report.metrics


def test_bfloat16_trains(make_learner, make_batch):
    learner = make_learner(dtype="bfloat16", optimizer=FAST)
    out = run(learner, make_batch())
    assert {t.dtype for t in out.weights.tensors.values()} == {torch.bfloat16}
    assert out.report.metrics["steps"] == 1
    assert learner.state_dict()["optimizer"]["masters"]["model.norm.weight"].dtype == torch.float32
