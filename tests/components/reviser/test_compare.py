"""Revisions of wrong chains, compared with siblings."""

import pytest
import torch

from creditgraph.components.reviser.compare import NOT_ENDED, Compare, pair_up
from creditgraph.components.rewards.outcome import Outcome
from creditgraph.components.rollouts.second_turn import second_turn
from creditgraph.components.sampler.chains import Chains
from creditgraph.components.text.stops import decode_rows
from creditgraph.components.verifier.exact import Exact
from creditgraph.pipeline.core.errors import AlignmentError, GraphError
from creditgraph.pipeline.core.handles import Sampling
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.recording import from_arrow, to_arrow

ALL = torch.ones(4, dtype=torch.bool)


def _run(
    toolbox,
    texts,
    values,
    script,
    rule=lambda text: float("good" in text),
    valid=None,
    group=None,
    room=9999,
    **settings,
):
    prompts = toolbox.prompts(["What is it?"])
    trajectories = toolbox.trajectories(texts, group=group)
    policy, verifier = toolbox.policy(script), toolbox.verifier(rule)
    node = toolbox.start(Compare, **settings)
    node.room = room
    out = node.run(
        prompts=prompts,
        trajectories=trajectories,
        rewards=toolbox.rewards(trajectories.uid, values, valid),
        policy=policy,
        verifier=verifier,
    )
    return out, node.context.metrics, policy


def test_correct_siblings_come_first_and_rows_turn():
    # Group 7: rows 0 (right), 1, 3 (wrong); row 2 is alone in group 8. From row 1 on: 3 (wrong), 0 (right) → 0 before
    # 3.
    group, correct = torch.tensor([7, 7, 8, 7]), torch.tensor([True, False, False, False])
    assert [t.tolist() for t in pair_up(group, correct, ALL, 9)] == [[1, 1, 3, 3], [0, 3, 0, 1]]
    assert [t.tolist() for t in pair_up(group, correct, ALL, 1)] == [[1, 3], [0, 0]]
    assert [t.tolist() for t in pair_up(group, correct, ALL, 9, only_correct=True)] == [[1, 3], [0, 0]]
    two_right = torch.tensor([True, False, True, False])
    # Different wrong rows start at different right siblings: after row 1 comes 2, after row 3 comes 0.
    assert [t.tolist() for t in pair_up(torch.full((4,), 7), two_right, ALL, 1)] == [[1, 3], [2, 0]]


@pytest.mark.parametrize("only_correct", [False, True])
@pytest.mark.parametrize("most", [1, 3, 20])
def test_pairs_equal_the_slow_version(reference, most, only_correct):
    torch.manual_seed(0)
    group, correct, valid = torch.randint(0, 6, (40,)) * 10**12, torch.rand(40) < 0.4, torch.rand(40) < 0.8
    correct &= valid
    result = list(zip(*(t.tolist() for t in pair_up(group, correct, valid, most, only_correct)), strict=True))
    assert result == reference.pair_up(group.tolist(), correct.tolist(), valid.tolist(), most, only_correct)


def test_a_revision_knows_its_original_its_problem_and_its_reference(toolbox):
    out, metrics, policy = _run(
        toolbox,
        ["fine</thought>", "bad</thought>", "poor</thought>"],
        [1, 0, 0],
        lambda c, n: "good" if "fine" in c else "worse",
        references=2,
        mode="thought",
    )
    made = out.revisions
    assert made.parent.tolist() == [1001, 1001, 1002, 1002]
    assert made.prompt_uid.tolist() == made.group.tolist() == [100] * 4
    assert made.inherited.tolist() == [0] * 4
    assert out.references.reference.tolist() == [1000, 1002, 1000, 1001]
    assert out.references.correct.tolist() == [True, False] * 2
    assert out.references.uid.tolist() == out.rewards.uid.tolist() == made.uid.tolist()
    assert made.text == ["good", "worse"] * 2
    assert out.rewards.correct.tolist() == [True, False] * 2
    # The learner conditions on what was sampled: the prompt of a revision is the revision prompt.
    prompts = decode_rows(policy.tokenizer, made.prompt_tokens.to_lists())
    assert all("What is it?" in p for p in prompts)
    assert prompts[1].index("Step 1: bad") < prompts[1].index("Step 1: poor")
    assert prompts[3].index("Step 1: poor") < prompts[3].index("Step 1: bad")
    assert len(policy.calls) == 1
    assert len(policy.calls[0].seed.unique()) == 4
    assert metrics["revisions"] == 4
    assert metrics["correct_reference_share"] == metrics["repaired_share"] == 0.5
    assert metrics["repaired_by_correct"] == 1
    assert metrics["repaired_by_wrong"] == 0
    assert metrics["sampled_tokens"] == 2 * (4 + 5)


def test_a_revision_that_never_ends_counts_as_wrong(toolbox):
    out, metrics, _ = _run(toolbox, ["fine", "bad"], [1, 0], lambda c, n: "good" + "!" * 50, max_tokens=20)
    assert out.revisions.finish_reason == ["length"]
    assert "good" in out.revisions.text[0]
    assert (out.rewards.value.tolist(), out.rewards.correct.tolist(), out.rewards.valid.tolist()) == (
        [0],
        [False],
        [True],
    )
    assert out.rewards.detail == [NOT_ENDED]
    assert metrics["unended_share"] == 1
    assert metrics["repaired_share"] == 0


def test_no_sibling_gives_no_revision(toolbox):
    out, metrics, policy = _run(toolbox, ["bad", "poor"], [0, 0], lambda c, n: "good", group=[1, 2])
    assert len(out.revisions) == len(out.rewards) == len(out.references) == 0
    assert policy.calls == []
    assert metrics["unrevised_share"] == metrics["no_correct_sibling_share"] == 1


def test_no_correct_sibling_is_shown_wrong_ones_or_none(toolbox):
    out, metrics, _ = _run(toolbox, ["bad", "poor"], [0, 0], lambda c, n: "good")
    assert out.references.correct.tolist() == [False, False]
    assert metrics["no_correct_sibling_share"] == 1
    assert (metrics["unrevised_share"], metrics["repaired_by_wrong"]) == (0, 1)
    none, metrics, _ = _run(toolbox, ["bad", "poor"], [0, 0], lambda c, n: "good", only_correct=True)
    assert len(none.revisions) == 0
    assert metrics["unrevised_share"] == 1


def test_a_pair_without_room_is_left_out_and_changes_no_other(toolbox):
    texts = ["fine", "bad", "poor" * 40]
    _, _, asked = _run(toolbox, texts, [1, 0, 0], lambda c, n: "good", references=2)
    longest = max(asked.calls[0].tokens.lengths[:2].tolist())
    # The prompts of "bad" hold 160 characters of the long sibling at most, and their repairs as many as "bad" has.
    few, metrics, policy = _run(toolbox, texts, [1, 0, 0], lambda c, n: "good", references=2, room=longest + 3)
    assert few.revisions.parent.tolist() == [1001, 1001]
    assert policy.calls[0].seed.tolist() == asked.calls[0].seed[:2].tolist()
    assert metrics["no_room_share"] == metrics["unrevised_share"] == 0.5
    none, metrics, policy = _run(toolbox, texts, [1, 0, 0], lambda c, n: "good", room=50)
    assert len(none.revisions) == 0
    assert policy.calls == []
    assert metrics["no_room_share"] == metrics["unrevised_share"] == 1
    assert toolbox.start(Compare).room == 512  # the embedded model's


@pytest.mark.parametrize(("mode", "closing"), [("plain", False), ("thought", True)])
def test_the_prompt_follows_the_mode_of_the_original(toolbox, mode, closing):
    _, _, policy = _run(toolbox, ["fine", "bad"], [1, 0], lambda c, n: "good", mode=mode)
    (prompt,) = decode_rows(policy.tokenizer, policy.calls[0].tokens.to_lists())
    assert ("</thought>" in prompt) is ("Step 1: bad" in prompt) is closing


def test_nothing_wrong_asks_nothing(toolbox):
    out, metrics, policy = _run(toolbox, ["fine", "well"], [1, 1], lambda c, n: "good")
    assert len(out.revisions) == 0
    assert policy.calls == []
    assert metrics["unrevised_share"] == 0


def test_rows_without_verdict_are_neither_revised_nor_shown(toolbox):
    out, _, _ = _run(toolbox, ["fine", "bad", "odd"], [1, 0, 0], lambda c, n: "good", valid=[True, True, False])
    assert (out.revisions.parent.tolist(), out.references.reference.tolist()) == ([1001], [1000])


def test_a_revision_that_cannot_be_verified_stays_invalid_and_is_written_down(toolbox):
    def rule(text):
        if "nan" in text:
            return float("nan")
        raise RuntimeError("no verdict")

    trajectories = toolbox.trajectories(["fine", "bad", "poor"])
    node = toolbox.start(Compare, references=1)
    node.room = 9999
    rewards = node.run(
        prompts=toolbox.prompts(["q"]),
        trajectories=trajectories,
        rewards=toolbox.rewards(trajectories.uid, [1, 0, 0]),
        policy=toolbox.policy(lambda c, n: "nan" if "bad" in c else "good"),
        verifier=toolbox.verifier(rule),
    ).rewards
    assert rewards.valid.tolist() == rewards.correct.tolist() == [False, False]
    assert node.context.metrics["invalid"] == 2
    assert node.context.metrics["repaired_share"] == 0
    assert [(row["row"]["trajectory"], row["reason"]) for row in node.context.rejected] == [
        (1001, "reward is nan"),
        (1002, "no verdict"),
    ]


def test_references_are_recorded_bit_for_bit(toolbox):
    references = _run(toolbox, ["fine", "bad", "poor"], [1, 0, 0], lambda c, n: "good")[0].references
    again = from_arrow(to_arrow(references))
    assert type(again) is type(references)
    assert (again.uid.tolist(), again.reference.tolist(), again.correct.tolist()) == (
        references.uid.tolist(),
        references.reference.tolist(),
        references.correct.tolist(),
    )


def test_an_empty_wrong_response_is_revised(toolbox):
    out, _, _ = _run(toolbox, ["fine", ""], [1, 0], lambda c, n: "good")
    assert out.revisions.parent.tolist() == [1001]


def test_a_revision_does_not_depend_on_other_groups(toolbox):
    many = _run(toolbox, ["fine", "bad", "poor", "sad"], [1, 0, 0, 0], lambda c, n: "good", group=[1, 2, 1, 2])[2]
    few = _run(toolbox, ["fine", "bad", "poor", "sad"], [1, 1, 0, 1], lambda c, n: "good", group=[1, 2, 1, 2])[2]
    assert many.calls[0].seed[1].tolist() == few.calls[0].seed[0].tolist()


def test_rewards_of_other_rows_are_refused(toolbox):
    trajectories = toolbox.trajectories(["a", "b"])
    with pytest.raises(AlignmentError, match="describe different populations"):
        toolbox.start(Compare).run(
            prompts=toolbox.prompts(["q"]),
            trajectories=trajectories,
            rewards=toolbox.rewards(torch.tensor([1, 2]), [1.0, 0.0]),
            policy=toolbox.policy(lambda c, n: ""),
            verifier=toolbox.verifier(lambda t: 0.0),
        )


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"expected references ≥ 1 .* got 0"):
        Compare.Config(references=0)


def test_second_turn_takes_the_asked_text(toolbox):
    firsts = toolbox.trajectories(["one", "two"], group=[5, 6])
    policy = toolbox.policy(lambda c, n: c.upper())
    made = second_turn(
        policy,
        toolbox.prompts(["q"]),
        firsts,
        ["ask a", "ask b"],
        torch.tensor([1, 2]),
        Sampling(),
        torch.tensor([8, 9]),
    )
    assert made.text == ["ASK A", "ASK B"]
    assert decode_rows(policy.tokenizer, made.prompt_tokens.to_lists()) == ["ask a", "ask b"]
    assert (made.group.tolist(), made.parent.tolist(), made.prompt_uid.tolist()) == ([5, 6], [1000, 1001], [100, 100])


def test_the_embedded_model_repairs_with_a_right_sibling(tiny):
    limits = {"mode": "thought", "max_tokens": 120}
    verifier = tiny.start(Exact).run().verifier
    fresh = tiny.start(Chains, group_size=6, **limits).run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    rewards = tiny.start(Outcome).run(verifier=verifier, trajectories=fresh, prompts=tiny.prompts).rewards
    node = tiny.start(Compare, references=2, **limits)
    out = node.run(prompts=tiny.prompts, trajectories=fresh, rewards=rewards, policy=tiny.policy, verifier=verifier)
    metrics = node.context.metrics
    assert len(out.revisions) > 10
    assert metrics["repaired_by_correct"] > 0.3 > metrics["repaired_by_wrong"]
    # A revision has the form of a chain, token for token, or alignment would mark what did not change.
    assert {row[0] for row in out.revisions.response_tokens.to_lists()} == {
        row[0] for row in fresh.response_tokens.to_lists()
    }
    # Engine log-probs are those of the revision under the revision prompt.
    scores = tiny.policy.score(out.revisions.prompt_tokens, out.revisions.response_tokens)
    torch.testing.assert_close(scores.logprobs.values, out.revisions.engine_logprobs.values, rtol=0, atol=1e-4)


def test_groups_without_two_siblings_are_refused():
    with pytest.raises(GraphError, match=r"sampler.group_size: expected at least 3, .* two siblings or more, got 2"):
        build_experiment(compose(["recipe=toy_ibpo", "sampler.group_size=2"]))
