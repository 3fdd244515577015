"""Credit of a self-teacher: which context, the gap, and weights on an outcome's credit."""

import math

import pytest
import torch

from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.teachers.self_teacher import SelfTeacher, magnitude, penalty
from creditgraph.pipeline.core.errors import GraphError
from creditgraph.pipeline.core.handles import Scores
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose


@pytest.fixture
def run(toolbox):
    """Credits responses to one problem; the teacher likes the letters it was shown: −0.1 nats, and −2 the others."""

    class Policy(toolbox.policy):
        def score(self, context, tokens, temperature=1.0, top=0):
            self.shown = ["".join(map(chr, row)) for row in context.to_lists()]
            rows = zip(self.shown, tokens.to_lists(), strict=True)
            values = [-0.1 if chr(token) in shown else -2.0 for shown, row in rows for token in row]
            best = torch.arange(top).repeat(len(values), 1) if top else None
            logprobs = -(1.0 + torch.arange(top)).repeat(len(values), 1) if top else None
            row = tokens.with_values(torch.tensor(values))
            return Scores(logprobs=row, entropies=tokens, top_tokens=best, top_logprobs=logprobs)

    def start(texts, values, solution="", valid=None, credit=None, room=10_000, **settings):
        trajectories = toolbox.trajectories(texts)
        trajectories = trajectories.replace(
            engine_logprobs=trajectories.response_tokens.with_values(torch.full((sum(map(len, texts)),), -1.0))
        )
        prompts = toolbox.prompts(["P"]).replace(solution=[solution])
        rewards = toolbox.rewards(trajectories.uid, values, valid)
        node = toolbox.start(SelfTeacher, **settings)
        node.room = room
        policy = Policy(lambda context, n: "")
        inputs = {"prompts": prompts, "trajectories": trajectories, "rewards": rewards, "policy": policy}
        if credit:
            group = toolbox.start(GroupAdvantage, normalize="mean")
            inputs["credit"] = group.run(trajectories=trajectories, rewards=rewards).credit
        return node.run(**inputs).credit, node.context.metrics, policy

    return start


def test_the_gap_by_hand(run):
    # The wrong row is shown the right one: −.1 + 1 where it agrees, −2 + 1 elsewhere. The right row has no sibling.
    credit, metrics, policy = run(["QZ", "QX"], [0, 1])
    assert credit.advantage.to_lists() == [pytest.approx([0.9, -1.0]), [0.0, 0.0]]
    assert len(policy.shown) == 1
    assert "Correct solution:\nStep 1: QX" in policy.shown[0]
    assert metrics["teacher_share"] == 0.5
    assert metrics["gap_mean"] == pytest.approx(-0.05)
    assert metrics["gap_abs_mean"] == pytest.approx(0.95)
    assert metrics["scored_tokens"] == len(policy.shown[0]) + 2
    # Only the row that has a teacher is trained on: without a gap, an objective of divergences has other gradients.
    assert credit.mask.to_lists() == [[True, True], [False, False]]
    assert credit.columns == {}
    limited, _, _ = run(["QZ", "QX"], [0, 1], limit=0.5)
    assert limited.advantage.row(0).tolist() == [0.5, -0.5]


def test_candidates_of_the_rows_that_have_a_teacher(run):
    credit, metrics, _ = run(["QZ", "QX"], [0, 1], top=2)
    assert credit.columns["candidate_1"].to_lists() == [[1, 1], [0, 0]]
    assert credit.columns["teacher_logprob_1"].to_lists() == [[-2.0, -2.0], [0.0, 0.0]]
    assert metrics["candidates_mass"] == pytest.approx(math.exp(-1) + math.exp(-2))
    none, _, _ = run(["QZ", "QX"], [0, 0], top=2)
    assert set(none.columns) == set(credit.columns)
    assert not none.mask.values.any()
    with pytest.raises(ValueError, match="expected top ≥ 0, and 0 unless form is 'gap', got 2 with 'weight'"):
        SelfTeacher.Config(top=2, form="weight")


def test_the_solution_and_the_verdict(run):
    _, metrics, policy = run(["QZ", "QX"], [0, 1], solution="S1\nS2", context="solution")
    assert metrics["teacher_share"] == 1
    assert all("Step 1: S1\nStep 2: S2" in shown for shown in policy.shown)
    _, metrics, policy = run(["QZ", "QX", "Q"], [0, 1, 0], context="critique", valid=[True, True, False])
    assert metrics["teacher_share"] == pytest.approx(2 / 3)
    assert "QZ" in policy.shown[0]
    assert "is wrong" in policy.shown[0]
    assert "is correct" in policy.shown[1]


def test_without_context_or_room_there_is_no_credit(run):
    credit, metrics, _ = run(["QZ", "QX"], [0, 0])
    assert credit.advantage.values.tolist() == [0.0] * 4
    assert metrics["teacher_share"] == 0
    credit, metrics, _ = run(["QZ", "QX"], [0, 1], room=20)
    assert credit.advantage.values.tolist() == [0.0] * 4
    assert metrics["no_room"] == 1
    credit, _, _ = run([], [])
    assert len(credit) == 0


def test_an_invalid_reward_gets_no_credit(run):
    for form in ({}, {"credit": True, "form": "weight"}):
        credit, _, _ = run(["QZ", "QX", "QZ"], [0, 1, 0], valid=[True, True, False], **form)
        assert credit.advantage.row(0).abs().sum() > 0
        assert credit.advantage.row(2).tolist() == [0.0, 0.0]


def test_inverse_weights_right_rows_alone(run):
    # Right rows, A = 1/2: each is shown the other and has Δ = (.9, −1), weights clip(exp(−Δ), 0, 2) = (.40657, 2).
    # Wrong rows, A = −1/2, stay as wired, although they have a teacher.
    credit, _, _ = run(["QZ", "QX", "AA", "BB"], [1, 1, 0, 0], credit=True, form="inverse", mix=1.0, clip=1.0)
    right = [pytest.approx([0.5 * math.exp(-0.9), 1.0])] * 2
    assert credit.advantage.to_lists() == [*right, [-0.5, -0.5], [-0.5, -0.5]]
    half, _, _ = run(["QZ", "QX", "AA", "BB"], [1, 1, 0, 0], credit=True, form="inverse", mix=0.5, clip=1.0)
    assert half.advantage.row(0).tolist() == pytest.approx([0.25 + 0.25 * math.exp(-0.9), 0.75])
    none, _, _ = run(["QZ", "QX", "AA", "BB"], [1, 1, 0, 0], credit=True, form="inverse", mix=0.0)
    assert none.advantage.to_lists() == [[0.5, 0.5], [0.5, 0.5], [-0.5, -0.5], [-0.5, -0.5]]


def test_a_penalty_by_hand(run):
    # φ(.9) = ½ (log(1 + e^.9) − log 2) = ½ (1.24115 − .69315) = .27400; φ(−1) = ½ (.31326 − .69315) = −.18994.
    assert penalty(torch.tensor([0.9, -1.0, 0.0])).tolist() == pytest.approx([0.27400, -0.18994, 0.0], abs=1e-5)
    # All responses are right, so the wired credit is 0, and the penalty stays. The third is invalid.
    credit, _, _ = run(["QZ", "QX", "QX"], [1, 1, 0], valid=[True, True, False], credit=True, form="penalty", mix=0.5)
    assert credit.advantage.row(0).tolist() == pytest.approx([-0.5 * 0.27400, 0.5 * 0.18994], abs=1e-5)
    assert credit.advantage.row(2).tolist() == [0.0, 0.0]
    none, _, _ = run(["QZ", "QX"], [1, 0], credit=True, form="penalty", mix=0.0)
    assert none.advantage.to_lists() == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("form", ["inverse", "penalty"])
def test_other_forms_equal_a_slow_loop(run, form):
    texts, values = ["QZ", "QX", "AQ", "XX"], [1, 0, 1, 0]
    plain, _, _ = run(texts, values, credit=True, form="weight", mix=0.0)
    gaps, _, _ = run(texts, values)
    found, _, _ = run(texts, values, credit=True, form=form, mix=0.7, clip=0.5)
    for i in range(4):
        for t, (a, d) in enumerate(zip(plain.advantage.row(i).tolist(), gaps.advantage.row(i).tolist(), strict=True)):
            if form == "penalty":
                slow = a - 0.7 * 0.5 * (math.log(1 + math.exp(d)) - math.log(2))
            else:
                slow = a * (0.3 + 0.7 * min(max(math.exp(-d), 0.5), 1.5)) if values[i] else a
            assert float(found.advantage.row(i)[t]) == pytest.approx(slow, abs=1e-6)


def test_weights_by_hand():
    # clip(exp(±.1)) is within 1 ± .2; exp(−1) is clipped to .8, exp(1) to 1.2; λ = 1/2 takes half of it.
    advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0])
    gap = torch.tensor([0.1, 0.1, -1.0, -1.0, 5.0])
    expected = [2 * math.exp(0.1), -2 * math.exp(-0.1), 1.6, -2.4, 0.0]
    assert magnitude(advantage, gap, 1.0, 0.2).tolist() == pytest.approx(expected)
    half = [(a + e) / 2 for a, e in zip(advantage.tolist(), expected, strict=True)]
    assert magnitude(advantage, gap, 0.5, 0.2).tolist() == pytest.approx(half)
    assert torch.equal(magnitude(advantage, gap, 0.0, 0.2), advantage)


def test_a_weight_keeps_the_sign_of_the_outcome(run):
    # Rewards 0 and 1: credit −.5 and .5. The wrong row is blamed more where its sibling differs.
    credit, _, _ = run(["QZ", "QX"], [0, 1], credit=True, form="weight", mix=1.0, clip=0.5)
    assert credit.advantage.to_lists() == [pytest.approx([-0.5 * 0.5, -0.5 * 1.5]), [0.5, 0.5]]


def test_wires_and_settings():
    with pytest.raises(GraphError, match=r"advantage.credit: expected no wire there, with form 'gap'"):
        build_experiment(compose(["recipe=toy_rlsd", "advantage.form=gap"]))
    with pytest.raises(GraphError, match=r"advantage.credit: expected a wire to 'credit', which it changes"):
        build_experiment(compose(["recipe=toy_sdpo", "advantage.form=weight"]))
    with pytest.raises(ValueError, match="expected limit ≥ 0, 0 ≤ mix ≤ 1"):
        SelfTeacher.Config(mix=2.0)


def test_with_the_embedded_model(tiny):
    from creditgraph.components.rewards.outcome import Outcome
    from creditgraph.components.sampler.chains import Chains
    from creditgraph.components.verifier.exact import Exact

    limits = {"max_tokens": 120, "mode": "thought", "temperature": 1.0}
    fresh = tiny.start(Chains, group_size=4, **limits).run(prompts=tiny.prompts, policy=tiny.policy).trajectories
    verifier = tiny.start(Exact).run().verifier
    rewards = tiny.start(Outcome).run(trajectories=fresh, prompts=tiny.prompts, verifier=verifier).rewards
    node = tiny.start(SelfTeacher, context="solution")
    credit = node.run(prompts=tiny.prompts, trajectories=fresh, rewards=rewards, policy=tiny.policy).credit
    means = credit.advantage.mean()
    assert means[rewards.correct].mean() > means[~rewards.correct].mean()  # the solution speaks for what agrees with it
