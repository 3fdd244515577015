"""Growing trees: exact lineages, exact thought ends, and what ends early."""

import dataclasses

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.trees.paths import TreePaths
from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.components.advantage.trees.tree import tree_of
from creditgraph.components.expander.tree import Tree
from creditgraph.components.expander.tree_growth import (
    SegmentRule,
    UncertainRule,
    closed_thoughts,
    most_uncertain,
    uncertainty,
    with_whole_thoughts,
)
from creditgraph.components.rewards.outcome import Outcome
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged


def _grow(toolbox, script, prompts=("Q",), **settings):
    node, policy = toolbox.start(Tree, **settings), toolbox.policy(script)
    return node, policy, node.run(prompts=toolbox.prompts(list(prompts)), policy=policy).trajectories


# --- segments of fixed length
# ------------------------------------------------------------------------------------------


def test_levels_by_hand(toolbox):
    # Every completion begins with its number; segments of 3, so level 1 keeps "0aa" and "1aa".
    node, policy, out = _grow(
        toolbox, lambda context, n: f"{n}aaaa", segments=SegmentRule(branching=(2, 3), tokens=3), max_tokens=20
    )
    assert out.text == [f"{i}aa{j}aaaa" for i, j in ((0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (1, 2))]
    assert out.response_tokens.to_lists() == [[ord(c) for c in text] for text in out.text]
    assert len(policy.calls) == 2
    assert policy.calls[0].sampling.max_tokens == 3
    assert policy.calls[1].max_tokens.tolist() == [17] * 6
    assert len(torch.cat([call.seed for call in policy.calls]).unique()) == 8
    assert out.group.tolist() == out.prompt_uid.tolist() == [100] * 6
    assert out.finish_reason == ["eos"] * 6
    # Two rows run through from the prompt, the others leave them after three tokens.
    a, b = out.uid[:2].tolist()
    assert out.parent.tolist() == [-1, -1, a, a, b, b]
    assert out.inherited.tolist() == [0, 0, 3, 3, 3, 3]
    tree = tree_of(out)
    assert len(tree) == 8
    assert sorted(tree.ends.to_lists()) == [[3, 8]] * 6
    metrics = node.context.metrics
    assert (metrics["sampled_tokens"], metrics["inherited_tokens"], metrics["leaves"]) == (2 * 3 + 6 * 5, 4 * 3, 6)


def test_shared_tokens_carry_the_numbers_they_were_sampled_with(toolbox):
    _, _, out = _grow(
        toolbox, lambda context, n: f"{n}aaaaaaaaaa", segments=SegmentRule(branching=(2, 2, 2), tokens=3), max_tokens=12
    )
    rows = {uid: row for row, uid in enumerate(out.uid.tolist())}
    for row in range(len(out)):
        over, shared = rows.get(out.parent[row].item()), out.inherited[row].item()
        if over is not None:
            for column in (out.response_tokens, out.engine_logprobs, out.entropies):
                assert torch.equal(column.row(row)[:shared], column.row(over)[:shared])
        lengths = {len(c.row(row)) for c in (out.response_tokens, out.engine_logprobs, out.entropies)}
        assert lengths == {12}
    assert sorted(out.inherited.tolist()) == [0, 0, 3, 3, 6, 6, 6, 6]
    assert out.finish_reason == ["length"] * 8
    # Three levels of two: 2 + 4 + 8 nodes.
    assert len(tree_of(out)) == 14


def test_a_branch_that_ends_early_is_a_leaf(toolbox):
    def script(context, n):
        return "zz" if context == "Q" and n == 0 else "aaa" if context == "Q" and n == 1 else f"{n}bbbbb"

    # "zz" ends within the first segment, "aaa" at its last token; neither is continued.
    _, policy, out = _grow(toolbox, script, segments=SegmentRule(branching=(3, 2), tokens=3), max_tokens=20)
    assert sorted(out.text) == ["2bb0bbbbb", "2bb1bbbbb", "aaa", "zz"]
    assert sorted(tree_of(out).path.lengths.tolist()) == [1, 1, 2, 2]
    assert len(policy.calls[1].seed) == 2


def test_nothing_runs_to_the_second_level(toolbox):
    _, policy, out = _grow(
        toolbox, lambda context, n: "a", segments=SegmentRule(branching=(3, 2), tokens=3), max_tokens=20
    )
    assert out.text == ["a"] * 3
    assert len(policy.calls) == 1


def test_empty_continuations_are_leaves_of_their_own(toolbox):
    _, _, out = _grow(
        toolbox,
        lambda c, n: "aaaa" if c == "Q" else "",
        segments=SegmentRule(branching=(1, 3), tokens=3),
        max_tokens=20,
    )
    assert out.text == ["aaa"] * 3
    assert out.inherited.tolist() == [0, 3, 3]
    tree = tree_of(out)
    assert tree.ends.to_lists() == [[3, 3]] * 3
    assert tree.parent.tolist() == [-1, 0, 0, 0]
    node = toolbox.start(TreeSiblings, max_probability=1.0)
    credit = node.run(trajectories=out, rewards=toolbox.rewards(out.uid, [1, 0, 0])).credit
    assert credit.advantage.values.abs().max() == 0
    assert credit.mask.to_lists() == [[True] * 3, [False] * 3, [False] * 3]
    assert node.context.metrics["untrained_rows"] == 2


def test_one_thought_chains(toolbox):
    def script(context, n):
        return "x\\boxed{1}</thought>"[len(context) - 1 :]

    settings = {"mode": "thought", "max_tokens": 99}
    _, _, out = _grow(toolbox, script, segments=SegmentRule(branching=(2, 2), tokens=1), **settings)
    assert out.thought_ends.to_lists() == [[20]] * 4
    assert out.finish_reason == ["final"] * 4
    rule = UncertainRule(chains=1, points=1, rounds=1, branches=2, measure="entropy", not_after=("x",))
    _, _, out = _grow(toolbox, script, rule="uncertain", uncertain=rule, **settings)
    assert out.inherited.tolist() == [0, 0, 0]
    assert out.thought_ends.to_lists() == [[20]] * 3


def test_a_prompts_tree_does_not_depend_on_the_others(toolbox, tiny):
    rules = (
        {"segments": SegmentRule(branching=(2, 2, 2), tokens=10)},
        {"rule": "uncertain", "uncertain": UncertainRule(chains=2, points=2, rounds=2, branches=2)},
    )
    for rule in rules:
        settings = {"max_tokens": 60, "mode": "thought", **rule}
        whole = tiny.start(Tree, **settings).run(prompts=tiny.prompts, policy=tiny.policy).trajectories
        assert whole.prompt_uid.unique_consecutive().tolist() == tiny.prompts.uid.tolist()
        alone = (
            tiny.start(Tree, **settings)
            .run(prompts=tiny.prompts.select(torch.tensor([3])), policy=tiny.policy)
            .trajectories
        )
        same = whole.select(whole.prompt_uid == tiny.prompts.uid[3])
        assert alone.text == same.text
        assert alone.inherited.tolist() == same.inherited.tolist()


# --- uncertain tokens
# --------------------------------------------------------------------------------------------------


def test_most_uncertain_by_hand():
    # Rows 0 and 2 are tree 0, row 1 is tree 1; the closed token has the highest score of all.
    score = Jagged.from_rows([[0.1, 0.9, 0.3], [0.5, 0.4], [0.9, 9.0]], torch.float32)
    closed = Jagged.from_rows([[False] * 3, [False] * 2, [False, True]], torch.bool)
    row, token, rank = most_uncertain(score, closed, torch.tensor([0, 1, 0]), 3)
    # Tree 0: .9 at (0, 1), .9 at (2, 0), .3 at (0, 2); tree 1: .5, .4.
    assert list(zip(row.tolist(), token.tolist(), rank.tolist(), strict=True)) == [
        (0, 1, 0),
        (0, 2, 2),
        (2, 0, 1),
        (1, 0, 0),
        (1, 1, 1),
    ]
    all_closed = closed.with_values(torch.ones(7, dtype=torch.bool))
    assert [len(x) for x in most_uncertain(score, all_closed, torch.tensor([0, 1, 0]), 3)] == [0, 0, 0]


def test_rounds_by_hand(toolbox):
    # The scripted log-probs fall and the entropies rise along a completion, so its last token is the most uncertain
    # one.
    rule = UncertainRule(chains=1, points=1, rounds=2, branches=2, measure="entropy")
    _, policy, out = _grow(toolbox, lambda context, n: f"{n}abc", rule="uncertain", uncertain=rule, max_tokens=20)
    # "0abc": round 1 leaves it before "c". The branches "0ab" + "0abc" and + "1abc" then end in the same entropy as
    # "0abc", whose "c" has been branched at; round 2 takes the first branch's own "c".
    assert out.text == ["0abc", "0ab0abc", "0ab1abc", "0ab0ab0abc", "0ab0ab1abc"]
    assert out.parent.tolist() == [-1, out.uid[0], out.uid[0], out.uid[1], out.uid[1]]
    assert out.inherited.tolist() == [0, 3, 3, 6, 6]
    assert out.group.tolist() == [100] * 5
    assert [len(call.seed) for call in policy.calls] == [1, 2, 2]
    assert tree_of(out).ends.to_lists() == [[3, 4], [3, 6, 7], [3, 7], [3, 6, 10], [3, 6, 10]]


def test_number_of_leaves(toolbox):
    rule = UncertainRule(chains=3, points=2, rounds=2, branches=2)
    node, _, out = _grow(
        toolbox, lambda c, n: "abcdefgh", prompts=("Q", "R"), rule="uncertain", uncertain=rule, max_tokens=99
    )
    assert len(out) == 2 * 3 * (1 + 2 * 2 * 2)
    assert node.context.metrics["leaves"] == node.context.metrics["fewest_leaves"] == 27
    assert node.context.metrics["missed_branches"] == 0
    assert out.prompt_uid.tolist() == [100] * 27 + [101] * 27
    chains = dataclasses.replace(rule, rounds=0)
    assert len(_grow(toolbox, lambda c, n: "abc", rule="uncertain", uncertain=chains)[2]) == 3


def test_short_responses_have_fewer_branches(toolbox):
    rule = UncertainRule(chains=2, points=3, rounds=1, branches=2)
    node, _, out = _grow(toolbox, lambda c, n: "a", rule="uncertain", uncertain=rule)
    # One token per chain instead of three: two branches each, four missed.
    assert len(out) == 2 * (1 + 2)
    assert node.context.metrics["missed_branches"] == 8
    assert out.inherited.tolist() == [0] * 6
    assert len(tree_of(out)) == 6


def test_no_branches_after_the_answer_is_announced(toolbox):
    rule = UncertainRule(chains=1, points=2, rounds=1, branches=1, measure="entropy", not_after=("answer", "#"))
    _, _, out = _grow(
        toolbox, lambda c, n: "xy answer: 42 #" if c == "Q" else "?", rule="uncertain", uncertain=rule, max_tokens=99
    )
    # "xy answer" has 9 tokens; its last two have the highest entropies among them.
    assert out.inherited.tolist() == [0, 7, 8]


def test_uncertainty_is_surprise_or_entropy(toolbox):
    batch = toolbox.trajectories(["ab"])
    assert uncertainty(batch, "logprob").values.tolist() == pytest.approx([0, 0.01])
    assert uncertainty(batch, "entropy").values.tolist() == pytest.approx([0, 0.1])
    # Equal but for rounding.
    near = batch.replace(entropies=Jagged.from_rows([[0.5, 0.5 + 1e-6]], torch.float32))
    assert uncertainty(near, "entropy").values.unique().tolist() == [0.5]
    unknown = batch.replace(entropies=Jagged.from_rows([[0.5, float("nan")]], torch.float32))
    assert uncertainty(unknown, "logprob").values.tolist() == pytest.approx([0, 0.01])
    with pytest.raises(CreditgraphError, match=r"expander.tree: the engine gave no entropy for 1 of 2 tokens"):
        uncertainty(unknown, "entropy")


# --- thoughts cut in the middle
# ----------------------------------------------------------------------------------------

FULL = "ab</thought>c</thought>d\\boxed{1}</thought>"


@pytest.mark.parametrize("most", [20, 2])
@pytest.mark.parametrize("tail", ["never</thought>", ""])
def test_thoughts_are_those_of_one_go(toolbox, most, tail):
    limits = ThoughtLimits(max_thoughts=most)
    script = lambda context, n: (FULL + tail)[len(context) - 1 :]  # noqa: E731
    whole = toolbox.policy(script).generate(_request(toolbox, Sampling(max_tokens=99, thoughts=limits)))

    class Stopping(toolbox.policy):
        """Ends plain responses at their stop strings."""

        def _complete(self, requests, row):
            text, ends, reason = super()._complete(requests, row)
            places = [text.find(stop) + len(stop) for stop in requests.sampling.stop if stop in text]
            return (text[: min(places)], ends, "stop") if places else (text, ends, reason)

    for tokens in range(1, len(FULL)):
        settings = {
            "segments": SegmentRule(branching=(1, 2), tokens=tokens),
            "mode": "thought",
            "thoughts": limits,
            "max_tokens": 99,
        }
        node = toolbox.start(Tree, **settings)
        out = node.run(prompts=toolbox.prompts(["Q"]), policy=Stopping(script)).trajectories
        for row in range(len(out)):
            assert out.text[row] == whole.text[0], tokens
            assert out.response_tokens.row(row).tolist() == whole.tokens.row(0).tolist()
            assert out.thought_ends.row(row).tolist() == whole.thought_ends.row(0).tolist(), tokens
            assert out.finish_reason[row] == whole.finish_reason[0], tokens
            assert len(out.engine_logprobs.row(row)) == len(out.entropies.row(row)) == len(whole.text[0])
        # Only a string that the cut runs through is hidden from the engine: it goes on to the end.
        hidden = (
            tokens in range(25, 31) or tokens in range(34, 43)
            if most == 20
            else tokens in range(3, 12) or tokens in range(14, 23)
        )
        until = len(FULL + tail) if most == 20 else len(FULL)
        assert node.context.metrics["discarded_tokens"] == (2 * (until - len(whole.text[0])) if hidden else 0), tokens


def _request(toolbox, sampling):
    from creditgraph.pipeline.core.handles import Requests

    return Requests(tokens=Jagged.from_rows([[ord("Q")]], torch.int32), seed=torch.tensor([1]), sampling=sampling)


def test_closed_thoughts_by_hand():
    limits = ThoughtLimits(stop=".", final="!", max_tokens=3, max_thoughts=4)
    assert closed_thoughts(list("ab.c.d"), limits) == ([3, 5], "")
    assert closed_thoughts(list("ab.c!.d"), limits) == ([3, 6], "final")
    # Three tokens close a thought without a stop string.
    assert closed_thoughts(list("abcde.fg"), limits) == ([3, 6], "")
    assert closed_thoughts(list("a.b.c.d.e."), limits) == ([2, 4, 6, 8], "thoughts")
    assert closed_thoughts([], limits) == ([], "")
    # A stop string in the middle of a token closes the thought with that token.
    assert closed_thoughts(["a", "b.c", "d"], limits) == ([2], "")


def test_an_end_of_text_token_alone_belongs_to_the_thought_before(toolbox):
    limits = ThoughtLimits(stop=".", final="!")
    made = toolbox.trajectories(["ab.\0", "ab.c\0", "\0"], finish_reason=["eos"] * 3)
    assert with_whole_thoughts(made, limits, toolbox.tokenizer()).thought_ends.to_lists() == [[4], [3, 5], [1]]
    cut = toolbox.trajectories(["a.b!.c.d", ""], finish_reason=["eos", "length"])
    sizes = cut.prompt_tokens.lengths - 1 + cut.response_tokens.lengths
    experts = Jagged.from_lengths(torch.arange(2 * int(sizes.sum())), 2 * sizes)
    whole = with_whole_thoughts(cut.replace(routed_experts=experts), limits, toolbox.tokenizer())
    assert whole.text == ["a.b!.", ""]
    assert whole.routed_experts.lengths.tolist() == (2 * (sizes - torch.tensor([3, 0]))).tolist()
    assert whole.finish_reason == ["final", "length"]
    assert whole.thought_ends.to_lists() == [[2, 5], []]


# --- with the embedded model
# -------------------------------------------------------------------------------------------

RULES = {
    "segments": {"segments": SegmentRule(branching=(2, 2, 2), tokens=9)},
    "uncertain": {"rule": "uncertain", "uncertain": UncertainRule(chains=2, points=2, rounds=2, branches=2)},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["thought", "plain"])
def test_engine_numbers_are_those_of_teacher_forcing(tiny, rule, mode):
    node = tiny.start(Tree, mode=mode, max_tokens=70, **RULES[rule])
    out = node.run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    scores = tiny.policy.score(out.prompt_tokens, out.response_tokens)
    assert torch.allclose(scores.logprobs.values, out.engine_logprobs.values, atol=2e-4)
    assert torch.allclose(scores.entropies.values, out.entropies.values, atol=2e-4)
    assert out.text == [
        tiny.policy.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in out.response_tokens.to_lists()
    ]
    if mode == "thought":
        for row in range(len(out)):
            pieces = [tiny.policy.tokenizer.decode([token]) for token in out.response_tokens.row(row).tolist()]
            ends, ended = closed_thoughts(pieces, ThoughtLimits())
            assert out.thought_ends.row(row).tolist()[: len(ends)] == ends or out.finish_reason[row] == "eos"
            assert not ended or ends[-1] == len(pieces)
            assert out.thought_ends.row(row).tolist()[-1] == len(pieces)
    assert len(tree_of(out).path) == len(out)
    assert node.context.metrics["sampled_tokens"] >= float((out.response_tokens.lengths - out.inherited).sum())


def test_one_level_is_a_plain_group(tiny):
    verifier = tiny.start(Exact).run().verifier
    node = tiny.start(Tree, mode="thought", max_tokens=70, segments=SegmentRule(branching=(6,)))
    out = node.run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    assert len(out) == 6 * len(tiny.prompts)
    assert out.parent.unique().tolist() == [-1]
    rewards = tiny.start(Outcome).run(verifier=verifier, trajectories=out, prompts=tiny.prompts).rewards
    group = tiny.start(GroupAdvantage, normalize="mean").run(trajectories=out, rewards=rewards).credit
    siblings = tiny.start(TreeSiblings, max_probability=1.0).run(trajectories=out, rewards=rewards).credit
    paths = tiny.start(TreePaths).run(trajectories=out, rewards=rewards).credit
    assert torch.allclose(siblings.advantage.values, group.advantage.values, atol=1e-6)
    assert torch.allclose(paths.advantage.values, 2 * group.advantage.values, atol=1e-6)
    assert siblings.mask.equal(group.mask)


# --- settings
# ----------------------------------------------------------------------------------------------------------


def test_no_prompts(toolbox):
    for settings in ({}, {"rule": "uncertain"}):
        node, _, out = _grow(toolbox, lambda c, n: "a", prompts=(), **settings)
        assert len(out) == 0
        assert node.context.metrics["leaves"] == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SegmentRule(branching=()), r"got branching \[\]"),
        (lambda: SegmentRule(branching=(2, 0)), "expected one or more levels of branching ≥ 1"),
        (lambda: SegmentRule(tokens=0), "tokens 0"),
        (lambda: UncertainRule(points=0), "points 0"),
        (lambda: UncertainRule(rounds=-1), "rounds -1"),
        (
            lambda: Tree.Config(thoughts=ThoughtLimits(ends_at_eos=False)),
            r"expected thoughts\.ends_at_eos true, got false",
        ),
        (
            lambda: Tree.Config(max_tokens=100, segments=SegmentRule(branching=(2, 2, 2), tokens=50)),
            "expected segments.tokens · 2 < max_tokens, .* got segments.tokens 50 and max_tokens 100",
        ),
    ],
)
def test_impossible_settings_are_reported(make, text):
    with pytest.raises(ValueError, match=text):
        make()
