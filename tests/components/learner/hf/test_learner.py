"""One step of learner.hf: loss, gradient, mini-batches, what is skipped, bad input, replicas."""

import dataclasses
import math
import re

import pytest
import torch
from learner_steps import FAST, REINFORCE, distance, run, same
from replicas import Threads, own_rows

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.objective import KL, OBJECTIVES, Importance, ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.pipeline.core.errors import AlignmentError, DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.settings import build_config


def at_own_logprobs(learner, batch, temperature=1.0):
    """The batch with the engine log-probs that this learner computes itself."""
    from creditgraph.components.learner.packing.pack import pack

    trajectories, credit = batch
    device = learner.context.device
    prompts, responses = (x.to(device) for x in (trajectories.prompt_tokens, trajectories.response_tokens))
    packed = pack(prompts, responses, torch.arange(len(trajectories), device=device))
    result = learner.model.logprobs(packed, temperature)[0].to("cpu")
    return trajectories.replace(
        engine_logprobs=result.with_values(result.values.detach()), temperature=temperature
    ), credit


def test_run_trains_and_reports(make_learner, make_batch):
    learner = make_learner(objective=REINFORCE, optimizer=FAST)
    before = learner.initial()["weights"]
    trajectories, credit = make_batch()
    out = run(learner, (trajectories, credit))
    assert (before.version, out.weights.version) == (0, 1)
    assert distance(before.tensors, out.weights.tensors) == pytest.approx(1e-2, rel=0.01)
    metrics = out.report.metrics
    assert metrics["steps"] == 1
    assert metrics["lr"] == 1e-2
    assert metrics["trained_tokens"] == len(trajectories.response_tokens.values)
    assert metrics["forward_tokens"] == metrics["trained_tokens"] + int((trajectories.prompt_tokens.lengths - 1).sum())
    assert metrics["zero_credit_rows"] == 0.0
    assert set(out.report.seconds) == {"forward_backward", "optimizer", "publish"}
    assert learner.context.metrics["loss"] == metrics["loss"]


def test_loss_and_gradient_equal_separate_sequences(make_learner, make_batch, reference):
    # One SGD-like look at the gradient: Adam's first moment after one step is (1 − β₁)·g.
    learner = make_learner(objective=REINFORCE, optimizer=OptimizerSettings(lr=1e-3, grad_clip=0.0))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(learner.context.model.path).eval()
    trajectories, credit = make_batch(inherited=2)
    trajectories = trajectories.replace(temperature=0.7)
    logprobs, _ = reference.separate_logprobs(
        model, trajectories.prompt_tokens.to_lists(), trajectories.response_tokens.to_lists(), temperature=0.7
    )
    terms = [-a * x for a, x in zip(credit.advantage.rows(), logprobs, strict=True)]
    loss = reference.aggregate_loss(terms, credit.mask.to_lists(), "seq_mean_token_mean")
    loss.backward()
    out = run(learner, (trajectories, credit))
    assert out.report.metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    moments = learner.state_dict()["optimizer"]["moments"]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moments[name]["exp_avg"].cpu() / 0.1, parameter.grad, rtol=1e-4, atol=1e-5)


P_TRACE = {"clip": "current"}


@pytest.mark.parametrize(("use", "config"), [*((use, {}) for use in sorted(OBJECTIVES)), ("trace", P_TRACE)])
def test_token_budget_does_not_matter(make_learner, make_batch, use, config):
    moments, metrics = [], []
    objective = ObjectiveSettings(use=use, config=config)
    for budget in (0, 1, 40, 100):
        learner = make_learner(objective=objective, optimizer=FAST, micro_batch_tokens=budget)
        out = run(learner, make_batch())
        moments.append({n: m["exp_avg"] for n, m in learner.state_dict()["optimizer"]["moments"].items()})
        metrics.append(out.report.metrics)
    for i in range(1, 4):
        assert distance(moments[0], moments[i]) < 1e-6
        assert metrics[i] == pytest.approx(metrics[0], rel=1e-5, abs=1e-7)


def test_same_inputs_same_bits(make_learner, make_batch):
    a, b = (make_learner(optimizer=FAST, minibatches=2, epochs=2) for _ in range(2))
    assert same(run(a, make_batch()).weights.tensors, run(b, make_batch()).weights.tensors)


def test_ratio_is_one_at_own_logprobs(make_learner, make_batch):
    for old in ("engine", "recompute"):
        learner = make_learner(old_logprobs=old)
        metrics = run(learner, at_own_logprobs(learner, make_batch(), 0.8)).report.metrics
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["mismatch_abs_max"] < 1e-5
        assert metrics["clip_fraction"] == 0.0


def test_mismatch_is_measured_only_at_equal_weights(make_learner, make_batch):
    # Rows sampled by another version are left out; all are, so the mean is 0/0 = 0 although log-probs differ.
    metrics = run(make_learner(), make_batch(version=5)).report.metrics
    assert metrics["mismatch_abs"] == 0.0
    assert "mismatch_abs_max" not in metrics
    assert metrics["policy_lag"] == -5.0
    metrics = run(make_learner(), make_batch(inherited=3)).report.metrics
    assert metrics["mismatch_abs"] > 0


def test_recomputed_old_logprobs_make_the_first_ratio_one(make_learner, make_batch):
    metrics = run(
        make_learner(old_logprobs="recompute", objective=ObjectiveSettings(importance=Importance(cap=2.0))),
        make_batch(),
    ).report.metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["mismatch_abs"] > 0.1
    assert 0 < metrics["importance_weight"] <= 2.0


@pytest.mark.parametrize("use", ["gspo", "trace"])
def test_what_the_mismatch_clips_is_measured_before_the_first_step(make_learner, make_batch, caplog, use):
    objective = ObjectiveSettings(use=use, config={"clip_low": 3e-4, "clip_high": 4e-4})

    def metrics(version=0, noise=0.02, **settings):
        learner = make_learner(objective=objective, minibatches=2, **settings)
        trajectories, credit = at_own_logprobs(learner, make_batch(version=version), 0.8)
        engine = trajectories.engine_logprobs
        noise = noise * torch.randn(len(engine.values), generator=torch.Generator().manual_seed(0))
        engine = engine.with_values(engine.values + noise)
        return run(learner, (trajectories.replace(engine_logprobs=engine), credit)).report.metrics

    with caplog.at_level("WARNING", logger="creditgraph"):
        assert metrics(noise=0.0)["mismatch_clipped"] == 0.0
        assert "mismatch_clipped" not in metrics(old_logprobs="recompute")
        # Tokens of an older version have left ratio 1 rightly.
        assert "mismatch_clipped" not in metrics(version=-1)
        assert "are clipped before the first optimiser step" not in caplog.text
        share = metrics()["mismatch_clipped"]
    assert 0.1 < share < 1
    assert f"{share:.1%} of the trained tokens are clipped before the first optimiser step" in caplog.text


# --- mini-batches ---


def test_minibatches_count_and_keep_prompts_together(make_learner, make_batch):
    learner = make_learner(optimizer=FAST, minibatches=2, epochs=3)
    out = run(learner, make_batch(rows=12))
    assert out.report.metrics["steps"] == 6
    assert learner.optimizer.schedule.step_count == 6
    from creditgraph.components.learner.batch import RolloutBatch

    trajectories, _ = make_batch(rows=12)
    parts = RolloutBatch(learner.config, learner.context, trajectories, 0).minibatches(epoch=0)
    assert sorted(torch.cat(parts).tolist()) == list(range(12))
    assert [len(p) for p in parts] == [6, 6]
    prompts = [set(trajectories.prompt_uid[p].tolist()) for p in parts]
    assert not prompts[0] & prompts[1]


def test_more_minibatches_than_prompts_skips_the_empty_ones(make_learner, make_batch):
    out = run(make_learner(minibatches=4), make_batch(rows=4))
    assert out.report.metrics["steps"] == 2
    assert out.report.metrics["skipped_zero_credit"] == 2


def test_trained_tokens_accumulate(make_learner, make_batch):
    learner = make_learner()
    first = run(learner, make_batch()).report.metrics["trained_tokens"]
    second = run(learner, make_batch(seed=1)).report.metrics
    assert second["trained_tokens_total"] == first + second["trained_tokens"]


# --- skipped steps ---


@pytest.mark.parametrize("how", ["zero", "masked", "empty"])
def test_batch_without_credit_is_skipped_and_said(make_learner, make_batch, how):
    learner = make_learner(
        optimizer=OptimizerSettings(lr=1e-2, weight_decay=0.1), objective=ObjectiveSettings(kl=KL(coefficient=0.1))
    )
    trajectories, credit = make_batch(zero=how == "zero")
    if how == "masked":
        credit = credit.replace(mask=credit.mask.with_values(torch.zeros_like(credit.mask.values)))
    if how == "empty":
        nothing = torch.zeros(0, dtype=torch.int64)
        trajectories, credit = trajectories.select(nothing), credit.select(nothing)
    before = learner.initial()["weights"]
    out = run(learner, (trajectories, credit))
    assert out.report.metrics["skipped_zero_credit"] == 1
    assert out.report.metrics["steps"] == 0
    assert same(before.tensors, out.weights.tensors)
    assert out.weights.version == 1
    assert learner.optimizer.schedule.step_count == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_credit_is_skipped_and_counted(make_learner, make_batch, bad):
    learner = make_learner(optimizer=FAST)
    trajectories, credit = make_batch()
    values = credit.advantage.values.clone()
    values[3] = bad
    before = learner.initial()["weights"]
    out = run(learner, (trajectories, credit.replace(advantage=credit.advantage.with_values(values))))
    assert out.report.metrics["skipped_nonfinite"] == 1
    assert same(before.tensors, out.weights.tensors)
    assert run(learner, (trajectories, credit)).report.metrics["steps"] == 1


def test_zero_credit_rows_do_not_change_the_gradient(make_learner, make_batch):
    moments = []
    trajectories, credit = make_batch()
    values = torch.where(credit.advantage.row_ids % 2 == 0, 0.0, credit.advantage.values)
    credit = credit.replace(advantage=credit.advantage.with_values(values))
    for skip in (True, False):
        learner = make_learner(optimizer=FAST, skip_zero_rows=skip)
        out = run(learner, (trajectories, credit))
        moments.append({n: m["exp_avg"] for n, m in learner.state_dict()["optimizer"]["moments"].items()})
        assert out.report.metrics["zero_credit_rows"] == 0.5
        assert (out.report.metrics["forward_tokens"] < 70) == skip
    assert distance(*moments) < 1e-6


@pytest.mark.parametrize(
    "settings", [{}, {"minibatches": 2, "epochs": 2, "micro_batch_tokens": 30}, {"old_logprobs": "recompute"}]
)
def test_logprobs_as_first_computed_are_given_out(make_learner, make_batch, settings):
    learner = make_learner(objective=REINFORCE, optimizer=FAST, **settings)
    batch = make_batch()
    before = at_own_logprobs(learner, batch)[0].engine_logprobs
    trajectories, credit = batch
    nothing = torch.where(credit.advantage.row_ids == 2, 0.0, credit.advantage.values)
    out = run(learner, (trajectories, credit.replace(advantage=credit.advantage.with_values(nothing))))
    assert out.logprobs.uid.tolist() == trajectories.uid.tolist()
    result, skipped = out.logprobs.logprobs, before.row_ids == 2
    if "old_logprobs" in settings:  # all tokens are computed, before any step
        assert float((result.values - before.values).abs().max()) < 1e-5
        return
    assert bool(result.values[skipped].isnan().all())  # a row without credit is not run
    assert not bool(result.values[~skipped].isnan().any())
    gap = (result.values - before.values)[~skipped].abs()
    if "minibatches" in settings:  # later mini-batches are computed after the first one's step
        assert 0 < float(gap.max()) < 1
        assert float(gap.min()) < 1e-5
    else:
        assert float(gap.max()) < 1e-5


def test_row_without_response_counts_but_is_not_run(make_learner, make_batch):
    trajectories, credit = make_batch(rows=3)
    keep = [trajectories.response_tokens.row(i) if i else trajectories.response_tokens.row(i)[:0] for i in range(3)]
    lengths = torch.tensor([len(k) for k in keep])

    def cut(j):
        return Jagged.from_lengths(torch.cat([j.row(i)[: len(keep[i])] for i in range(3)]), lengths)

    names = ("response_tokens", "engine_logprobs", "entropies")
    trajectories = trajectories.replace(**{n: cut(getattr(trajectories, n)) for n in names})
    credit = credit.replace(advantage=cut(credit.advantage), mask=cut(credit.mask))
    assert run(make_learner(), (trajectories, credit)).report.metrics["steps"] == 1


# --- KL, entropy ---


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2, alpha=4)])
def test_reference_is_the_initial_model(make_learner, make_batch, lora):
    learner = make_learner(objective=ObjectiveSettings(kl=KL(coefficient=0.1)), optimizer=FAST, lora=lora)
    assert run(learner, make_batch()).report.metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert run(learner, make_batch()).report.metrics["kl_reference"] > 1e-3


def test_entropy_bonus_raises_entropy(make_learner, make_batch):
    learner = make_learner(objective=ObjectiveSettings(entropy_bonus=10.0), optimizer=FAST)
    entropies = [run(learner, make_batch()).report.metrics["entropy"] for _ in range(4)]
    assert entropies[-1] > entropies[0] + 0.05


# --- recomputing activations ---


def test_recomputed_activations_change_nothing(make_learner, make_batch):
    outs = [run(make_learner(optimizer=FAST, recompute=r), make_batch()).weights.tensors for r in ("none", "full")]
    assert distance(*outs) < 1e-6


@pytest.mark.slow
def test_compiled_norms_and_products_change_nothing(make_learner, make_batch):
    kept = ObjectiveSettings(kl=KL(coefficient=0.1))
    with torch.random.fork_rng():
        plain, compiled = (
            make_learner(optimizer=FAST, objective=kept, recompute="full", compile=x) for x in (False, True)
        )
        kinds = [type(m).__name__ for m in compiled.model.causal_lm.modules() if m._compiled_call_impl is not None]
        assert {"Qwen2RMSNorm", "Qwen2MLP"} == set(kinds)
        for rows in (8, 5):
            outs = [run(learner, make_batch(rows)) for learner in (plain, compiled)]
            # A step is 1e-2; where a gradient is almost nothing, rounding moves it.
            assert distance(*(out.weights.tensors for out in outs)) < 1e-4
            assert outs[1].report.metrics["kl_reference"] == pytest.approx(
                outs[0].report.metrics["kl_reference"], abs=1e-5
            )


# --- bad input ---


def test_misaligned_credit(make_learner, make_batch):
    trajectories, credit = make_batch()
    with pytest.raises(AlignmentError, match="the same rows in another order"):
        run(make_learner(), (trajectories, credit.select(torch.arange(8).flip(0))))


def test_row_longer_than_the_context(make_learner, make_batch):
    learner = make_learner()
    learner.backend.max_context = 10
    with pytest.raises(DataError, match="but the model's context is 10"):
        run(learner, make_batch())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"minibatches": 0}, "expected minibatches ≥ 1, epochs ≥ 1 and micro_batch_tokens ≥ 0, got 0, 1 and 16384"),
        ({"objective": {"importance": {"cap": 2.0}}}, "set old_logprobs: recompute"),
        ({"lora": {"rank": -1}}, r"learner\.lora: expected rank ≥ 0 \(0 is full fine-tuning\), got -1"),
        ({"lora": {"publish": "adapter"}}, r"learner\.lora: publish is 'adapter', but rank is 0"),
        ({"recompute": "selective"}, r"learner\.recompute: expected 'none' or 'full', got 'selective'"),
    ],
)
def test_wrong_settings(settings, text):
    config, problems = build_config(HFLearner.Config, settings, "learner")
    assert config is None
    assert re.search(text, problems[0])


def test_settings_are_few():
    assert len(dataclasses.fields(HFLearner.Config)) <= 14


@pytest.mark.parametrize(("minibatches", "old"), [(1, "engine"), (4, "engine"), (1, "recompute")])
def test_two_replicas_equal_one(make_learner, make_batch, minibatches, old):
    """Two learners on threads, each with half of the prompts, make the steps of one learner."""
    batch = make_batch()
    settings = {"objective": REINFORCE, "optimizer": FAST, "old_logprobs": old, "minibatches": minibatches}
    learners = [make_learner(**settings) for _ in range(2)]
    outs = Threads(learners).run(lambda r: run(learners[r], own_rows(learners[r].context.ranks, *batch)))
    assert same(outs[0].weights.tensors, outs[1].weights.tensors)
    first, second = (o.report.metrics for o in outs)
    assert first == second
    assert first["imbalance_after"] <= first["imbalance_before"]
    alone = make_learner(**settings)
    whole = run(alone, batch)
    expected = whole.report.metrics
    split = {"imbalance_before", "imbalance_after", "forward_tokens", "shared_tokens"}
    once, both = ({k: v for k, v in m.items() if k not in split} for m in (expected, first))
    assert set(first) - set(expected) == {"imbalance_before", "imbalance_after"}
    logprobs = torch.cat([o.logprobs.logprobs.values for o in outs])
    assert torch.equal(torch.cat([o.logprobs.uid for o in outs]), batch[0].uid)
    torch.testing.assert_close(logprobs, whole.logprobs.logprobs.values, rtol=0, atol=1e-4, equal_nan=True)
    assert both == pytest.approx(once, rel=1e-4, abs=1e-6)
    if minibatches == 1:
        moments = [
            {n: m["exp_avg"] for n, m in x.state_dict()["optimizer"]["moments"].items()} for x in (alone, learners[0])
        ]
        assert distance(*moments) < 1e-6


def test_rows_without_credit_are_trained_on_where_they_are_imitated(make_learner, make_batch):
    trajectories, credit = make_batch(zero=True)
    first = credit.mask.with_values((credit.mask.row_ids == 0).float())
    learner = make_learner(objective=REINFORCE, optimizer=FAST)
    same_again = make_learner(objective=REINFORCE, optimizer=FAST)
    imitated = run(learner, (trajectories, credit.replace(columns={"imitation": first})))
    assert imitated.report.metrics["steps"] == 1
    # −log π of a token is REINFORCE with advantage 1.
    equal = run(same_again, (trajectories, credit.replace(advantage=first)))
    assert distance(imitated.weights.tensors, equal.weights.tensors) < 1e-6
    none = run(learner, (trajectories, credit.replace(columns={"imitation": first.with_values(0 * first.values)})))
    assert none.report.metrics["skipped_zero_credit"] == 1
