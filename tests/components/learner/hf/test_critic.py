"""value.critic: exact values of a tree, the loss by hand, what is not trained on, replicas, resume, divergence."""

import itertools
import json
import logging

import pytest
import torch
from replicas import Threads
from safetensors.torch import load_file

from creditgraph.components.advantage.gae import GAE
from creditgraph.components.learner.hf.critic import Critic, ValueClip
from creditgraph.components.learner.objective import LossInputs, Meters
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.rollouts.segments import segment_starts
from creditgraph.components.rollouts.turn_rows import episode_returns
from creditgraph.components.segmenter.fixed import fixed_ends
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.encoding import decode, encode
from creditgraph.pipeline.core.errors import AlignmentError, ConfigError, GraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Rewards, Segments, Turns
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.metrics import read_metrics


def critic_of(folder, **settings):
    critic = Critic(Critic.Config(**{"optimizer": OptimizerSettings(lr=1e-2), **settings}))
    critic.setup(Context(node="value", iterations=80, model=ModelSpec(path=str(folder))))
    return critic


def case(trajectories, reward=None, width=3):
    """Inputs of a critic: rewards 0 and 1 in turn, segments of `width` tokens."""
    count = len(trajectories)
    value = (torch.arange(count) % 2).float() if reward is None else torch.tensor(reward)
    rewards = Rewards(
        uid=trajectories.uid,
        value=value,
        correct=value >= 1,
        valid=torch.ones(count, dtype=torch.bool),
        detail=[""] * count,
    )
    ends = fixed_ends(trajectories.response_tokens.lengths, width)
    return {
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=ends),
        "rewards": rewards,
    }


def steps(critic, inputs, count):
    for iteration in range(count):
        critic.context.iteration = iteration
        out = critic.run(**inputs)
    return out.values.values


def tree(make_batch):
    """All eight responses of three tokens 5 or 9, each as likely: rewards, and the exact value of every prefix."""
    leaves = list(itertools.product((5, 9), repeat=3))
    reward = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5]
    trajectories = make_batch(8)[0]
    rows = Jagged.from_rows(leaves, torch.int32)
    floats = rows.with_values(torch.zeros(24))
    trajectories = trajectories.replace(
        prompt_tokens=Jagged.from_rows([[3, 4]] * 8, torch.int32),
        response_tokens=rows,
        engine_logprobs=floats,
        entropies=floats,
        thought_ends=Jagged.from_rows([[3]] * 8, torch.int32),
    )

    def value(prefix):
        under = [r for leaf, r in zip(leaves, reward, strict=True) if leaf[: len(prefix)] == prefix]
        return sum(under) / len(under)

    exact = [[value(leaf[:k]) for k in range(4)] for leaf in leaves]
    return case(trajectories, reward, width=1), exact


@pytest.mark.parametrize("lam", [1.0, 0.5])
def test_the_exact_values_of_a_tree_are_reached(model_folder, make_batch, lam):
    inputs, exact = tree(make_batch)
    critic = critic_of(model_folder(), lam=lam, clip=0.5, optimizer=OptimizerSettings(lr=1e-2, schedule="linear"))
    values = steps(critic, inputs, 80).to_lists()
    for row, expected in zip(values, exact, strict=True):
        assert row == pytest.approx(expected, abs=0.03)
    # Of returns r, at most the variance of the exact values can be explained.
    returns = torch.tensor([row[3] for row in exact]).repeat_interleave(3)
    states = torch.tensor([row[:3] for row in exact]).reshape(-1)
    best = 1 - (returns - states).var() / returns.var()
    if lam == 1:
        assert critic.context.metrics["explained_variance"] == pytest.approx(float(best), abs=0.02)


def test_values_are_those_before_the_update_and_the_end_is_the_reward(model_folder, make_batch):
    inputs = case(make_batch()[0])
    critic = critic_of(model_folder())
    first, second = steps(critic, inputs, 1), steps(critic, inputs, 1)
    last = first.positions == (first.lengths - 1)[first.row_ids]
    assert not first.values[~last].any()
    assert torch.equal(first.values[last], inputs["rewards"].value)
    assert bool((second.values[~last] != 0).all())
    assert torch.equal(second.values[last], inputs["rewards"].value)
    assert first.lengths.tolist() == (inputs["segments"].ends.lengths + 1).tolist()


def over_turns(inputs, lengths, reward):
    """The same rows as turns of episodes with these numbers of turns; the rewards of the episodes are their sums."""
    rows = inputs["trajectories"]
    count = torch.tensor(lengths)
    first = rows.uid[torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)[:-1]])]
    turns = Turns(
        uid=rows.uid,
        episode=first.repeat_interleave(count),
        turn=torch.cat([torch.arange(n) for n in lengths]),
        state=[""] * len(rows),
        reward=torch.tensor(reward),
        done=torch.zeros(len(rows), dtype=torch.bool),
        fault=[""] * len(rows),
    )
    rewards = inputs["rewards"].replace(value=episode_returns(turns)[0].float())
    return {"trajectories": rows, "rewards": rewards, "turns": turns}


def test_targets_of_turns_by_hand_and_against_a_slow_loop(model_folder, make_batch):
    # Episodes of 2 turns and 1, rewards 1, 2 and 5, values 3, 4 and 1. δ = 1 + 4 − 3 = 2, 2 − 4 = −2, 5 − 1 = 4;
    # λ = .5: A = 2 − 1 = 1, −2, 4, so the targets v + A are 4, 2 and 5.
    critic = critic_of(model_folder(), lam=0.5)
    inputs = over_turns(case(make_batch(3)[0]), [2, 1], [1.0, 2.0, 5.0])
    states = Jagged.from_rows([[3.0], [4.0], [1.0]], torch.float32)
    values, targets = critic._returns(states, **inputs)
    assert values.to_lists() == [[3, 4], [4, 0], [1, 0]]
    assert targets.to_lists() == [[4], [2], [5]]
    critic = critic_of(model_folder(), lam=0.9, gamma=0.8)
    draw = torch.Generator().manual_seed(0)
    reward, value = torch.randn(2, 6, generator=draw).tolist()
    inputs = over_turns(case(make_batch(6)[0]), [1, 3, 2], reward)
    _, targets = critic._returns(Jagged.from_rows([[v] for v in value], torch.float32), **inputs)
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        for t in range(begin, end):
            following = [*value[begin:end], 0.0]
            delta = [reward[k] + 0.8 * following[k - begin + 1] - value[k] for k in range(begin, end)]
            expected = value[t] + sum((0.8 * 0.9) ** (k - t) * delta[k - begin] for k in range(t, end))
            assert targets.values[t] == pytest.approx(expected, abs=1e-5)


def test_episodes_of_one_turn_are_responses_of_one_segment(model_folder, make_batch):
    inputs = case(make_batch(6)[0], width=10**6)
    turns = over_turns(inputs, [1] * 6, inputs["rewards"].value.tolist())
    one, other = critic_of(model_folder(), lam=0.7), critic_of(model_folder(), lam=0.7)
    first, second = steps(one, inputs, 3).to_lists(), steps(other, turns, 3).to_lists()
    assert [row[0] for row in first] == [row[0] for row in second]
    assert any(row[0] for row in first)


def test_turns_of_invalid_episodes_are_not_trained_on(model_folder, make_batch):
    inputs = over_turns(case(make_batch(5)[0]), [2, 3], [0.0] * 5)
    inputs["rewards"] = inputs["rewards"].replace(valid=torch.tensor([True, True, False, False, False]))
    with pytest.raises(AlignmentError, match="expected one reward per episode, the same on all of its turns"):
        steps(critic_of(model_folder()), {**inputs, "rewards": inputs["rewards"].replace(value=torch.arange(5.0))}, 1)
    critic = critic_of(model_folder())
    values = steps(critic, inputs, 2)
    assert values.lengths.tolist() == [2] * 5
    assert critic.context.metrics["states"] == 2
    with pytest.raises(ConfigError, match=r"expected one of the wires 'segments' and 'turns', got both or neither"):
        critic.run(trajectories=inputs["trajectories"], rewards=inputs["rewards"])
    with pytest.raises(GraphError, match=r"value: expected one of the wires 'segments' and 'turns', got both or"):
        build_experiment(compose(["recipe=toy_ppo", "nodes.value.in.segments=null"]))


def test_the_loss_by_hand():
    # R = 1. V .5, unclipped: ½·.25. V .9 from .5, clipped to .7: ½·max(.01, .09), no gradient. V 0: ½·1.
    old = Jagged.from_rows([[0.5, 0.5, 0.0]], torch.float32)
    value = old.with_values(torch.tensor([0.5, 0.9, 0.0], requires_grad=True))
    inputs = LossInputs(
        logprobs=value, old_logprobs=old, engine_logprobs=old, advantage=old.with_values(torch.ones(3)),
        mask=old.with_values(torch.ones(3, dtype=torch.bool)), group=torch.zeros(1), old_entropies=old,
    )  # fmt: skip
    meters = Meters()
    loss = ValueClip(ValueClip.Config(clip=0.2)).terms(inputs, meters)
    assert loss.tolist() == pytest.approx([0.125, 0.045, 0.5])
    assert torch.autograd.grad(loss.sum(), value.values)[0].tolist() == pytest.approx([-0.5, 0.0, -1.0])
    assert meters.values()["clip_fraction"] == pytest.approx(1 / 3)
    assert ValueClip(ValueClip.Config(clip=0.0)).terms(inputs, Meters()).tolist() == pytest.approx([0.125, 0.005, 0.5])


def test_invalid_rows_and_inherited_states_are_not_trained_on(model_folder, make_batch):
    inputs = case(make_batch(inherited=2)[0])
    lengths = inputs["trajectories"].response_tokens.lengths
    inputs["rewards"] = inputs["rewards"].replace(valid=torch.arange(len(lengths)) != 0)
    critic = critic_of(model_folder())
    steps(critic, inputs, 1)
    starts = segment_starts(inputs["segments"].ends)
    assert starts.to_lists()[1] == list(range(0, int(lengths[1]), 3))
    assert critic.context.metrics["states"] == int(((starts.values >= 2) & (starts.row_ids > 0)).sum())


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2, "epochs": 2, "micro_batch_tokens": 30}])
def test_two_replicas_learn_what_one_process_learns(model_folder, make_batch, settings):
    inputs = case(make_batch(12)[0])
    one = critic_of(model_folder(), **settings)
    expected = steps(one, inputs, 3)
    pair = [critic_of(model_folder(), **settings) for _ in range(2)]
    rows = [inputs["trajectories"].prompt_uid < 3, inputs["trajectories"].prompt_uid >= 3]
    parts = [{name: batch.select(own) for name, batch in inputs.items()} for own in rows]
    got = Threads(pair).run(lambda rank: steps(pair[rank], parts[rank], 3))
    torch.testing.assert_close(Jagged.concat(got).values, expected.values, rtol=0, atol=1e-5)
    for name in ("explained_variance", "loss", "mean", "states"):
        for critic in pair:
            assert critic.context.metrics[name] == pytest.approx(one.context.metrics[name], abs=1e-5)


def test_a_critic_continues_bit_for_bit(model_folder, make_batch):
    inputs = case(make_batch()[0])
    whole, first, second = (critic_of(model_folder(), minibatches=2) for _ in range(3))
    steps(whole, inputs, 3)
    steps(first, inputs, 3)
    second.load_state_dict(decode(encode(first.state_dict(), "value", copy=True)))
    assert torch.equal(steps(whole, inputs, 2).values, steps(second, inputs, 2).values)
    assert (second.version, second.trained_tokens) == (whole.version, whole.trained_tokens)


def test_a_run_with_a_critic_continues_bit_for_bit(tmp_path):
    def train(name, iterations):
        small = ["prompts.batch=2", "sampler.group_size=4", "evaluator.num_problems=1", "advantage.warmup=1"]
        small += ["learner.minibatches=2", "value.minibatches=2"]
        places = [f"run.root={tmp_path}", f"run.name={name}", f"run.iterations={iterations}", "run.checkpoint.every=1"]
        assert main(["train", "recipe=toy_vapo", *small, *places]) == 0
        return tmp_path / name

    whole = train("whole", 3)
    train("parts", 2)
    parts = train("parts", 3)

    def logged(run):
        rows = read_metrics(run / "metrics.jsonl")
        return [{k: v for k, v in row.items() if "seconds" not in k and "utilisation" not in k} for row in rows]

    assert json.dumps(logged(parts)) == json.dumps(logged(whole))
    assert [row["learner/steps"] for row in logged(whole)[:2]] == [0, 2]  # the policy waits for the critic
    assert all(row["value/updates"] == 2 for row in logged(whole)[:2])
    a, b = (load_file(run / "checkpoints" / "000002" / "tensors.safetensors") for run in (whole, parts))
    assert a.keys() == b.keys()
    assert any("node.value" in name for name in a)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_critic_that_diverges_is_said_once(model_folder, make_batch, caplog):
    inputs = case(make_batch()[0])
    critic = critic_of(model_folder())
    with torch.no_grad():
        critic.model.causal_lm.get_output_embeddings().weight.normal_(std=5.0)
    with caplog.at_level(logging.WARNING, "creditgraph"):
        steps(critic, inputs, 2)
    said = [r.message for r in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("node 'value': the critic diverges: in iteration 0 its values explain -")
    assert "Lower value.optimizer.lr" in said[0]
    assert critic.context.metrics["diverged"] == 1


def test_values_that_are_no_numbers_train_nothing_and_give_no_credit(model_folder, make_batch, caplog):
    inputs = case(make_batch()[0])
    critic = critic_of(model_folder())
    with torch.no_grad():
        critic.model.causal_lm.get_output_embeddings().bias.fill_(torch.inf)
    with caplog.at_level(logging.WARNING, "creditgraph"):
        values = critic.run(**inputs).values
    rows = len(inputs["trajectories"])
    logged = critic.context.metrics
    assert (logged["nonfinite"], logged["states"], logged["updates"], logged["diverged"]) == (rows, 0, 0, 1)
    assert f"{rows} rows have values that are not finite" in caplog.text
    node = GAE(GAE.Config())
    credit = node.run(**inputs, values=values).credit
    assert not credit.advantage.values.any()
    assert node.context.metrics["unvalued"] == rows
    assert node.context.rejected[0]["reason"].endswith("a value of the row is not finite")


def test_empty_batches_and_wrong_inputs(model_folder, make_batch):
    inputs = case(make_batch()[0])
    critic = critic_of(model_folder())
    none = {name: batch.select(torch.zeros(0, dtype=torch.int64)) for name, batch in inputs.items()}
    assert len(critic.run(**none).values) == 0
    with pytest.raises(AlignmentError, match="describe different populations"):
        critic.run(**{**inputs, "rewards": inputs["rewards"].select(torch.arange(3))})
    with pytest.raises(ValueError, match=r"expected 0 ≤ lam ≤ 1, 0 ≤ gamma ≤ 1 and clip ≥ 0, got 2.0, 1.0 and 0.2"):
        Critic.Config(lam=2.0)
