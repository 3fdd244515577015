"""advantage.process: the three forms and both baselines by hand, slow loops, identities, rows without scores."""

import math

import pytest
import torch

from creditgraph.components.advantage.gae import GAE
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.process import ProcessAdvantage, step_rewards, sum_of_later
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues

SCORES = [[0.9, 0.2, 0.6], [0.5], [], [0.3, 0.3]]


def returns(form, temperature=0.1, scores=SCORES):
    return sum_of_later(step_rewards(Jagged.from_rows(scores, torch.float32), form, temperature)).to_lists()


def near(rows):
    return [pytest.approx(row, abs=1e-6) for row in rows]


def test_forms_by_hand():
    assert returns("sum") == near([[1.7, 0.8, 0.6], [0.5], [], [0.6, 0.3]])
    assert returns("last") == near([[0.6, 0.6, 0.6], [0.5], [], [0.3, 0.3]])
    # All weight on the first smallest score: its value until that step, 0 after it.
    assert returns("minimum", 0.0) == near([[0.2, 0.2, 0.0], [0.5], [], [0.3, 0.0]])


def test_the_minimum_form_is_a_softmax_and_its_limits_are_the_mean_and_the_minimum():
    row = SCORES[0]
    weights = [math.exp(-r / 0.1) for r in row]
    shares = [w / sum(weights) * r for w, r in zip(weights, row, strict=True)]
    assert returns("minimum")[0] == pytest.approx([sum(shares[k:]) for k in range(3)], abs=1e-6)
    assert returns("minimum", 1e9)[0][0] == pytest.approx(sum(row) / 3)
    assert returns("minimum", 1e-3)[0] == pytest.approx(returns("minimum", 0.0)[0])


@pytest.fixture
def case(toolbox):
    """Three rows of one group and one of another; 2 + 1 and 3, 2, 1 + 1 tokens per step."""
    trajectories = toolbox.trajectories(["abc", "abc", "ab", "ab"], group=[1, 1, 1, 2])
    uid = trajectories.uid
    values = Jagged.from_rows([[0, 0.8, 0.2], [0, 0.5], [0, 0.4], [0, 0.1, 0.7]], torch.float32)
    return {
        "trajectories": trajectories,
        "segments": Segments(uid=uid, ends=Jagged.from_rows([[2, 3], [3], [2], [1, 2]], torch.int32)),
        "values": SegmentValues(uid=uid, values=values),
        "rewards": toolbox.rewards(uid, [1.0, 0.0, 1.0, 1.0]),
    }


def credit_of(toolbox, case, **settings):
    node = toolbox.start(ProcessAdvantage, **settings)
    return node.run(**case).credit.advantage.to_lists()


def test_baselines_by_hand(toolbox, case):
    # Sums 1, .5, .4. Per token: the others of row 0 have .9 in 5 tokens, .18: (1 − 3·.18, .2 − .18).
    token = credit_of(toolbox, case, form="sum", baseline="token")
    assert token[0] == pytest.approx([0.46, 0.46, 0.02])
    assert token[1] == pytest.approx([0.5 - 3 * 1.4 / 5] * 3)
    assert token[3] == pytest.approx([0.8, 0.7])  # alone in its group
    # Per step: the others of row 0 have mean .45 a step; those of row 1 (.5 + .4) / 2.
    step = credit_of(toolbox, case, form="sum", baseline="step")
    assert step[0] == pytest.approx([0.1, 0.1, -0.25])
    assert step[1] == pytest.approx([0.05] * 3)
    assert credit_of(toolbox, case, form="sum", baseline="none")[0] == pytest.approx([1.0, 1.0, 0.2])


def test_the_outcome_alone_is_the_leave_one_out_advantage(toolbox, case):
    zero = case | {"values": case["values"].replace(values=case["values"].values.with_values(torch.zeros(10)))}
    for own in (zero, {**zero, "rewards": case["rewards"]}):
        rows = credit_of(toolbox, own, outcome=2.0)
        # Group 1 has rewards 1, 0, 1: r minus the mean of the others is .5, −1, .5.
        assert [row[0] for row in rows[:3]] == pytest.approx([1.0, -2.0, 1.0])
    group = toolbox.start(GroupAdvantage, normalize="mean")
    mean = group.run(trajectories=case["trajectories"], rewards=case["rewards"]).credit.advantage.to_lists()
    assert [row[0] for row in rows[:3]] == pytest.approx([2.0 * row[0] * 3 / 2 for row in mean[:3]])


def test_a_row_without_scores_gets_no_credit_and_leaves_the_baselines(toolbox, case):
    values = case["values"].values.values.clone()
    values[4] = math.nan
    broken = case | {"values": SegmentValues(uid=case["values"].uid, values=case["values"].values.with_values(values))}
    node = toolbox.start(ProcessAdvantage, form="sum", outcome=1.0)
    credit = node.run(**broken).credit
    assert credit.advantage.to_lists()[1] == [0.0] * 3
    assert bool(torch.isfinite(credit.advantage.values).all())
    assert node.context.metrics["unvalued"] == 1
    # Row 0 is compared with row 2 alone, .4 in 2 tokens; both rewards are 1.
    assert credit.advantage.to_lists()[0] == pytest.approx([1.0 - 3 * 0.2] * 2 + [0.2 - 0.2])
    texts = node.explain({"credit": credit}, **broken)
    assert texts[1] == "no credit: no scores, or no valid reward"
    assert "score +.2, A = 0" in texts[0]
    assert toolbox.start(GAE).run(**broken).credit.advantage.to_lists()[1] == [0.0] * 3


def test_a_missing_reward_and_impossible_settings_are_reported(toolbox, case):
    del case["rewards"]
    credit_of(toolbox, case)
    with pytest.raises(ValueError, match=r"outcome is 0.1, but no rewards are wired"):
        credit_of(toolbox, case, outcome=0.1)
    with pytest.raises(ValueError, match=r"expected temperature and outcome ≥ 0, got -1.0 and 0.0"):
        ProcessAdvantage.Config(temperature=-1.0)
    empty = {name: batch.select(torch.zeros(0, dtype=torch.int64)) for name, batch in case.items()}
    assert credit_of(toolbox, empty) == []
