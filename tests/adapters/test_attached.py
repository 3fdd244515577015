"""Graphs with a policy and a verifier: continuations, scored texts, and rows of their own."""

import dataclasses

import pytest
import torch

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.handles import Completions, Policy, Scores, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards


class Words:
    """A tokenizer."""

    TEXTS = ("", "a", " b\n", "c. ")

    def batch_decode(self, rows, **_):
        return ["".join(self.TEXTS[token] for token in row) for row in rows]


class Continues(Policy):
    """Continues with one token until the budget is spent."""

    version = 0
    tokenizer = Words()

    def generate(self, requests):
        self.requests = requests
        whole = torch.full_like(requests.seed, requests.sampling.max_tokens)
        budgets = whole if requests.max_tokens is None else requests.max_tokens
        tokens = Jagged.from_rows([[1] * most for most in budgets.tolist()], torch.int32)
        unknown = tokens.with_values(torch.full_like(tokens.values, torch.nan, dtype=torch.float32))
        ends = Jagged.from_rows([[] for _ in requests.seed], torch.int32)
        reasons = ["length"] * len(requests.seed)
        return Completions(
            tokens=tokens, logprobs=unknown, entropies=unknown, thought_ends=ends, finish_reason=reasons, text=reasons
        )

    def score(self, context, tokens, temperature=1.0, top=0):
        zeros = tokens.with_values(torch.zeros(len(tokens.values)))
        return Scores(logprobs=zeros, entropies=zeros)


class Prefixes(Verifier):
    """A continuation is worth a tenth of what it began with."""

    def verify(self, prompts, trajectories):
        value = trajectories.inherited / 10
        valid = torch.ones_like(value, dtype=torch.bool)
        return Rewards(uid=trajectories.uid, value=value, correct=valid, valid=valid, detail=[""] * len(value))


def test_a_trainers_responses_are_continued_where_its_lines_end_within_its_budget():
    policy = Continues()
    graph = CreditGraph("vineppo", "sampler.mode=line", "value.continuations=2", "model.path=tiny")
    graph.attach(policy, Prefixes(), temperature=0.7, max_tokens=9)
    tokens = torch.tensor([[1, 2, 1, 2, 3], [3, 1, 0, 0, 0]])
    batch = Rollouts(
        mask=torch.tensor([[1] * 5, [1, 1, 0, 0, 0]]),
        tokens=tokens,
        rewards=torch.tensor([1.0, 0.0]),
        group=[0, 0],
        prompts=[[1], [1]],
    )
    # The lines are (a b) (a b) (c) and (c a); values are 0, .2, .4 and the reward, and 0 and the reward.
    expected = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.6], [0.0] * 5])
    torch.testing.assert_close(graph(batch), expected)
    other = Continues()
    graph.attach(other, Prefixes(), temperature=0.7, max_tokens=9)  # another trainer's
    torch.testing.assert_close(graph(batch), expected)
    assert other.requests.max_tokens.equal(policy.requests.max_tokens)
    assert policy.requests.max_tokens.tolist() == [9, 9, 7, 7, 5, 5, 9, 9]
    assert policy.requests.sampling.temperature == 0.7
    assert policy.requests.sampling.thoughts is None


class Lines(Continues):
    """Continues with lines of two tokens."""

    def generate(self, requests):
        done = super().generate(requests)
        tokens = done.tokens.with_values(1 + done.tokens.positions.int() % 2)
        return dataclasses.replace(done, tokens=tokens)


class Counts(Verifier):
    """Worth a tenth of its place among the rows that are verified together, and of what it inherited."""

    def verify(self, prompts, trajectories):
        value = trajectories.inherited / 10 + torch.arange(len(trajectories)) / 10
        valid = torch.ones_like(value, dtype=torch.bool)
        return Rewards(uid=trajectories.uid, value=value, correct=value > 0.25, valid=valid, detail=[""] * len(value))


def _resets(seed):
    split = ["sampler.group_size=4", "sampler.split=1x2", "expander.suffixes=2"]
    modes = ["sampler.mode=line", "expander.mode=line"]
    graph = CreditGraph("rrpo", *split, *modes, "model.path=tiny", f"run.seed={seed}")
    assert graph.makes_rows
    graph.attach(Lines(), Counts(), temperature=0.7, max_tokens=6)
    problems = Prompts(
        uid=torch.tensor([0]), tokens=Jagged.from_rows([[3]], torch.int32), text=["c"], answer=[""], metadata=[{}]
    )
    return graph, problems


def test_random_draws_are_those_of_the_seed():
    def drawn(seed):
        graph, problems = _resets(seed)
        return [graph.rows(problems)[0].inherited[2].item() for _ in range(6)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_graph_makes_its_rows_with_a_policy_and_a_verifier():
    graph, problems = _resets(1)
    found = set()
    for _ in range(6):
        rows, credit = graph.rows(problems)
        # Of three responses worth 0, .1 and .2 the first is the failure; rewards of the rows then go by tenths.
        inherited = rows.inherited.tolist()
        assert inherited[:2] == [0, 0]
        assert inherited[2] == inherited[3]
        assert inherited[2] in (0, 2, 4)
        found.add(inherited[2])
        assert (
            rows.response_tokens.to_lists()
            == [[1, 2, 1, 2, 1, 2]] * 2 + [[1, 2] * (inherited[2] // 2) + [1, 2] * ((6 - inherited[2]) // 2)] * 2
        )
        trained = [[t >= n for t in range(6)] for n in inherited]
        assert credit.mask.to_lists() == trained
        signs = torch.tensor([-1.0, 1.0, -1.0, 1.0])  # two of a group, over their deviation
        torch.testing.assert_close(credit.advantage.to_padded()[:, 5], signs)
    assert len(found) > 1
    assert graph.metrics["expander/inherited_tokens"] == sum(inherited)


@pytest.mark.slow
def test_which_rewards_are_those_of_right_responses():
    # The rest of a right response is a reference for its group.
    batch = Rollouts(
        mask=torch.ones(4, 4),
        tokens=torch.tensor([[1, 2, 1, 2], [1, 2, 3, 3], [1, 2, 1, 3], [2, 2, 1, 3]]),
        rewards=torch.tensor([0.3, 0.9, 0.3, 0.1]),
        group=[0, 0, 1, 1],
        prompts=[[3]] * 4,
    )
    shares = {}
    for option in ([], ["--right-above=0.5"], ["--right-above=1"]):
        graph = CreditGraph(
            "rredcot",
            *("segmenter.use=segmenter.fixed", "segmenter.tokens=2", "value.value=continuation", "model.path=tiny"),
            *option,
            policy=Continues(),
        )
        graph(batch)
        shares[tuple(option)] = graph.metrics["value/empty_bank_share"]
    assert shares == {(): 0.0, ("--right-above=0.5",): 0.5, ("--right-above=1",): 1.0}
    with pytest.raises(ConfigError, match=r"--right-above=half: expected a number"):
        CreditGraph("grpo", "--right-above=half")


def test_sampling_is_the_trainers():
    given = {"temperature": 1.0, "max_tokens": 9}
    CreditGraph("vineppo", "sampler.mode=line", "segmenter.stop=x", "model.path=tiny").attach(
        Continues(), Prefixes(), **given
    )
    graph = CreditGraph("srpo", "sampler.mode=line", "expander.mode=line", "localizer.stop=[x]", "model.path=tiny")
    with pytest.raises(ConfigError, match=r"localizer.stop=\[x\] has no effect here"):
        graph.attach(Continues(), Prefixes(), **given)
    graph = CreditGraph("vineppo", "sampler.mode=line", "value.top_p=0.5", "model.path=tiny")
    with pytest.raises(ConfigError, match=r"value.top_p=0.5 has no effect here, where the trainer continues"):
        graph.attach(Continues(), Prefixes(), **given)
    more = ["value.max_tokens=9", "model.path=tiny"]
    graph = CreditGraph("vineppo", "sampler.mode=line", *more, policy=Continues())
    with pytest.raises(ConfigError, match="it continues responses, which the trainer does itself"):
        graph.attach(Continues(), Prefixes(), **given)


def test_credit_that_is_not_a_number_is_an_error(policy):
    graph = CreditGraph("sdpo", "model.path=tiny", policy=policy)
    batch = Rollouts(
        mask=torch.ones(2, 3),
        tokens=torch.ones(2, 3, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0]),
        group=[0, 0],
        logprobs=torch.full((2, 3), torch.nan),
        prompts=[[4], [4]],
    )
    with pytest.raises(DataError, match=r"its credit is not a number at 3 tokens.*see Rollouts.logprobs"):
        graph(batch)


def test_a_model_is_not_asked_without_the_prompts(policy):
    batch = Rollouts(
        mask=torch.ones(2, 3),
        tokens=torch.ones(2, 3, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0]),
        group=[0, 0],
    )
    with pytest.raises(DataError, match=r"it asks a model, but the rollouts have no prompts; see Rollouts.prompts"):
        CreditGraph("igpo", "model.path=tiny", policy=policy)(batch)


def test_texts_need_the_models_tokenizer():
    policy = object()
    with pytest.raises(ConfigError, match=r"it reads texts; give the folder or hub name of the tokenizer, model.path="):
        CreditGraph("rredcot", policy=policy)
