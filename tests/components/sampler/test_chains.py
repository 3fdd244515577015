"""Fresh chains: groups, seeds, limits."""

import pytest
import torch

from creditgraph.components.rollouts.requests import keyed_seeds, sample_from_prefix
from creditgraph.components.sampler.chains import Chains
from creditgraph.pipeline.core.handles import Sampling, ThoughtLimits
from creditgraph.pipeline.core.streams import Stream


def test_groups_are_prompts_and_rows_come_prompt_by_prompt(toolbox):
    policy = toolbox.policy(lambda context, n: f"{context}{n}")
    node = toolbox.start(Chains, group_size=3)
    out = node.run(prompts=toolbox.prompts(["a", "b"]), policy=policy).trajectories
    assert out.text == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert out.group.tolist() == out.prompt_uid.tolist() == [100, 100, 100, 101, 101, 101]
    assert out.policy_version.tolist() == [3] * 6
    assert out.parent.tolist() == [-1] * 6
    assert len(out.uid.unique()) == 6
    assert node.context.metrics["sampled_tokens"] == 12
    assert len(policy.calls) == 1


def test_seeds_depend_on_the_prompt_and_not_on_the_batch(toolbox):
    together, alone = (toolbox.policy(lambda context, n: "x") for _ in range(2))
    toolbox.start(Chains, group_size=4).run(prompts=toolbox.prompts(["a", "b"]), policy=together)
    toolbox.start(Chains, group_size=4).run(prompts=toolbox.prompts(["b"], first_uid=101), policy=alone)
    assert together.calls[0].seed[4:].tolist() == alone.calls[0].seed.tolist()
    assert len(together.calls[0].seed.unique()) == 8


def test_seeds_change_with_the_iteration(toolbox):
    first, second = (toolbox.policy(lambda context, n: "x") for _ in range(2))
    toolbox.start(Chains).run(prompts=toolbox.prompts(["a"]), policy=first)
    toolbox.start(Chains, iteration=1).run(prompts=toolbox.prompts(["a"]), policy=second)
    assert not set(first.calls[0].seed.tolist()) & set(second.calls[0].seed.tolist())


def test_thought_mode_asks_for_thoughts_and_plain_mode_for_stops(toolbox):
    policy = toolbox.policy(lambda context, n: "a</thought>\\boxed{1}</thought>rest")
    node = toolbox.start(Chains, group_size=1, mode="thought", stop=("zzz",))
    out = node.run(prompts=toolbox.prompts(["p"]), policy=policy).trajectories
    assert policy.calls[0].sampling.thoughts == ThoughtLimits()
    assert policy.calls[0].sampling.stop == ()
    assert out.text == ["a</thought>\\boxed{1}</thought>"]
    assert out.thought_ends.to_lists() == [[11, 30]]
    toolbox.start(Chains, group_size=1, stop=("zzz",)).run(prompts=toolbox.prompts(["p"]), policy=policy)
    assert policy.calls[1].sampling.thoughts is None
    assert policy.calls[1].sampling.stop == ("zzz",)


def test_no_prompts_gives_no_rows(toolbox):
    out = toolbox.start(Chains).run(prompts=toolbox.prompts([]), policy=toolbox.policy(lambda c, n: "x")).trajectories
    assert len(out) == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"group_size": 0}, "expected group_size of 1 to 65,536, got 0"),
        ({"temperature": -1.0}, "expected temperature ≥ 0 .* got -1.0"),
        ({"top_p": 0.0}, "expected 0 < top_p ≤ 1 .* got 0.0"),
        ({"max_tokens": 0}, "expected max_tokens ≥ 1, got 0"),
    ],
)
def test_impossible_settings_are_reported(settings, text):
    with pytest.raises(ValueError, match=text):
        Chains.Config(**settings)


def test_keyed_seeds_do_not_depend_on_how_draws_are_cut():
    uid, stream = torch.tensor([3, 9]), Stream(0, "n", 0)
    whole = keyed_seeds(stream, uid, 0, 5)
    assert torch.equal(
        whole,
        torch.cat([keyed_seeds(stream, uid, 0, 2), keyed_seeds(stream, uid, 2, 0), keyed_seeds(stream, uid, 2, 3)], 1),
    )


def test_continuation_copies_the_prefix_and_spends_what_is_left(toolbox):
    parent = toolbox.trajectories(["ab</thought>cd</thought>ef"])
    policy = toolbox.policy(lambda context, n: f"new{n}</thought>more</thought>{'x' * 100}")
    limits = Sampling(max_tokens=40, thoughts=ThoughtLimits(max_thoughts=3))
    two = parent.select(torch.tensor([0, 0]))
    out = sample_from_prefix(policy, two, torch.tensor([12, 12]), torch.tensor([1, 2]), limits, torch.tensor([7, 8]))
    assert out.text == ["ab</thought>new0</thought>more</thought>", "ab</thought>new1</thought>more</thought>"]
    assert out.response_tokens.to_lists() == [[ord(c) for c in t] for t in out.text]
    assert out.thought_ends.to_lists() == [[12, 26, 40]] * 2
    assert out.inherited.tolist() == [12, 12]
    assert out.parent.tolist() == out.group.tolist() == parent.uid.tolist() * 2
    assert torch.equal(out.engine_logprobs.row(1)[:12], parent.engine_logprobs.row(0)[:12])
    assert torch.equal(out.entropies.row(0)[:12], parent.entropies.row(0)[:12])
    assert policy.calls[0].max_tokens.tolist() == [28, 28]
    assert policy.calls[0].max_thoughts.tolist() == [2, 2]
    assert "".join(map(chr, policy.calls[0].tokens.row(0).tolist())) == "Pab</thought>"
    assert out.finish_reason == ["thoughts"] * 2


def test_a_prefix_without_budget_left_stays_as_it_is(toolbox):
    parents = toolbox.trajectories(["ab</thought>cd</thought>", "abcdefghijklmnopqrstuvwxyz"])
    policy = toolbox.policy(lambda context, n: "q")
    limits = Sampling(max_tokens=24, thoughts=ThoughtLimits(max_thoughts=2))
    uid = torch.tensor([5, 6])
    out = sample_from_prefix(policy, parents, torch.tensor([24, 0]), torch.tensor([1, 2]), limits, uid)
    assert out.text == ["ab</thought>cd</thought>", "q"]
    assert out.finish_reason == ["length", "eos"]
    roomy = Sampling(max_tokens=100, thoughts=ThoughtLimits(max_thoughts=2))
    none_left = sample_from_prefix(
        policy, parents.select(torch.tensor([0])), torch.tensor([24]), torch.tensor([1]), roomy, uid[:1]
    )
    assert none_left.finish_reason == ["thoughts"]
    assert none_left.thought_ends.to_lists() == [[12, 24]]
    assert len(policy.calls) == 1
