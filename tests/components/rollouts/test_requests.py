"""Groups of responses in one request batch: rows, seeds and ids."""

import torch

from creditgraph.components.rollouts.continuing import Continuing
from creditgraph.components.rollouts.requests import keyed_seeds, sample_fresh, sample_groups, unended, unsampled
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.handles import Sampling
from creditgraph.pipeline.core.streams import Stream


def test_groups_are_draws_of_each_prompt(toolbox):
    prompts = toolbox.prompts(["a", "b", "c"])
    context = Context(node="sampler", seed=4, iteration=2)
    policy = toolbox.policy(lambda text, n: f"{text}{n}")
    first = sample_groups(context, policy, prompts, 2, Sampling())
    assert first.text == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert first.group.tolist() == first.prompt_uid.tolist() == [100, 100, 101, 101, 102, 102]
    later = sample_groups(context, policy, prompts.select(torch.tensor([1])), 3, Sampling(), first=2)
    assert len(set(torch.cat([first.uid, later.uid]).tolist())) == 9
    # Draws 0, 1 and then 2, 3, 4 of prompt b, whatever else is in the batch.
    drawn = torch.cat([policy.calls[0].seed[2:4], policy.calls[1].seed])
    assert drawn.tolist() == keyed_seeds(context.rng(), prompts.uid, 0, 5)[1].tolist()
    other = Stream(4, "sampler", "evaluation")
    sample_groups(context, policy, prompts, 2, Sampling(), stream=other)
    assert policy.calls[2].seed.tolist() == keyed_seeds(other, prompts.uid, 0, 2).reshape(-1).tolist()


def test_trajectories_without_a_token(toolbox):
    prompts = toolbox.prompts(["a", "b"])
    rows = unsampled(prompts, torch.tensor([1, 0, 1]), torch.arange(3), version=7, temperature=0.0)
    assert rows.prompt_uid.tolist() == rows.group.tolist() == [101, 100, 101]
    assert rows.response_tokens.lengths.tolist() == [0, 0, 0]
    assert (rows.policy_version.tolist(), rows.parent.tolist(), rows.temperature) == ([7] * 3, [-1] * 3, 1.0)


def test_no_request_is_made_for_no_rows(toolbox):
    policy = toolbox.policy(lambda text, n: text)
    none = torch.zeros(0, dtype=torch.int64)
    rows = sample_fresh(policy, toolbox.prompts(["a"]), none, none, Sampling(), none)
    assert (len(rows), policy.calls) == (0, [])


def test_rows_that_ran_out_of_budget(toolbox):
    rows = toolbox.trajectories(["a", "b", "c"], finish_reason=["eos", "length", "thoughts"])
    assert unended(rows).tolist() == [False, True, True]


def test_a_policy_that_continues_requests_scores_the_most_likely_tokens_too():
    class Scorer:
        version, tokenizer = 0, None

        def score(self, *given):
            return given

    policy = Continuing(Scorer(), None, 0, torch.zeros(0, dtype=torch.int64))
    assert policy.score("context", "tokens", 0.5, top=3) == ("context", "tokens", 0.5, 3)
