"""Counterfactual credit: numbers by hand, slow versions, identities with GRPO, defined cases."""

import math
import random
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from creditgraph.components.advantage.counterfactual import (
    Counterfactual,
    edited_tokens,
    repair_share,
    shaping_statistics,
)
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.pipeline.core.errors import AlignmentError, GraphError
from creditgraph.pipeline.core.graph import build_graph

GROUP = [7, 7, 7, 7]
# The reading without the corrected trajectory: shaped, masked failures alone.
FAILURES_ONLY = {"train_revision": False, "raise_edits": True}
GRAPH = Path(__file__).parents[3] / "configs" / "graph" / "ibpo.yaml"


def _run(
    toolbox,
    values,
    repairs,
    texts=("abcd", "abxd", "axxx", "aaaa"),
    group=GROUP,
    valid=None,
    revision_valid=None,
    **config,
):
    """`repairs`: (row repaired, text of the revision, whether it is right)."""
    trajectories = toolbox.trajectories(list(texts), group=list(group))
    revisions = toolbox.trajectories([text for _, text, _ in repairs], first_uid=5000)
    revisions = revisions.replace(parent=torch.tensor([1000 + row for row, _, _ in repairs], dtype=torch.int64))
    node = toolbox.start(Counterfactual, **config)
    out = node.run(
        trajectories=trajectories,
        rewards=toolbox.rewards(trajectories.uid, values, valid),
        revisions=revisions,
        revision_rewards=toolbox.rewards(revisions.uid, [float(right) for _, _, right in repairs], revision_valid),
    )
    return out, node.context.metrics


# --- edits ---


@pytest.mark.parametrize(
    ("first", "second", "left", "right"),
    [
        ("abcd", "abxd", "0010", "0010"),  # c replaced
        ("abcd", "abd", "0010", "000"),  # c deleted
        ("abd", "abcd", "000", "0010"),  # c inserted: y holds nothing that changes
        ("ab", "abcd", "00", "0011"),  # goes on where y stopped
        ("abcd", "abcd", "0000", "0000"),
        ("", "ab", "", "11"),
        ("ab", "", "11", ""),
        ("", "", "", ""),
    ],
)
def test_edits_by_hand(first, second, left, right):
    result = edited_tokens([ord(c) for c in first], [ord(c) for c in second])
    assert ["".join(str(int(m)) for m in mask) for mask in result[:2]] == [left, right]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_edits_are_those_of_a_shortest_alignment(reference, first, second):
    left, right, distance = edited_tokens(first, second)
    assert distance == reference.levenshtein_table(first, second)[-1][-1]
    assert (tuple(left), tuple(right)) in reference.edit_masks(first, second)


def test_tokens_that_stay_are_not_marked_on_random_strings(reference):
    draw = random.Random(3)
    inserted = 0
    for _ in range(300):
        first = [draw.randrange(4) for _ in range(draw.randrange(30))]
        second = [draw.randrange(4) for _ in range(draw.randrange(30))]
        left, right, distance = edited_tokens(first, second)
        table = reference.levenshtein_table(first, second)
        assert distance == table[-1][-1]
        # What is not marked is the same text on both sides, and replaced tokens are marked on both.
        kept = [[t for t, m in zip(*pair, strict=True) if not m] for pair in ((first, left), (second, right))]
        assert kept[0] == kept[1]
        assert max(sum(left), sum(right)) <= distance <= sum(left) + sum(right)
        inserted += sum(right) > sum(left)
    assert inserted > 50


def test_long_edits_against_the_slow_table(reference):
    draw = random.Random(0)
    first = [draw.randrange(20) for _ in range(200)]
    second = [t for t in first if draw.random() > 0.1]
    second[50:50] = [99, 98]
    left, right, distance = edited_tokens(first, second)
    assert distance == reference.levenshtein_table(first, second)[-1][-1]
    assert max(sum(left), sum(right)) <= distance
    # What is left unmarked in ŷ appears, in order, in what y holds.
    kept, place = [t for t, m in zip(second, right, strict=True) if not m], 0
    for token in kept:
        place = first.index(token, place) + 1


# --- repair share, shaping ---


def test_repair_share_by_hand_and_slow(reference):
    uid = torch.tensor([30, 10, 20])
    parent, right = torch.tensor([10, 10, 10, 20]), torch.tensor([True, False, True, False])
    assert repair_share(parent, right, torch.ones(4, dtype=torch.bool), uid).tolist() == pytest.approx([0, 2 / 3, 0])
    # A revision that could not be judged was tried and did not repair.
    assert repair_share(parent, right, torch.tensor([False, True, True, True]), uid).tolist() == pytest.approx(
        [0, 1 / 3, 0]
    )
    g = torch.Generator().manual_seed(0)
    uid = torch.randperm(50, generator=g) * 10**10
    parent, right = uid[torch.randint(0, 50, (90,), generator=g)], torch.rand(90, generator=g) < 0.5
    result = repair_share(parent, right, torch.ones(90, dtype=torch.bool), uid)
    assert result.tolist() == pytest.approx(reference.repair_share(uid.tolist(), parent.tolist(), right.tolist()))


def test_shaped_rewards_by_hand(toolbox):
    # r = 1, 0, 0, 0; s = –, 1/2, 0, –; λ = 0.6: R' = 1, .3, 0, 0; mean .325, squares (.675² + .025² + 2·.325²)/4.
    out, metrics = _run(
        toolbox,
        [1, 0, 0, 0],
        [(1, "abcd", True), (1, "abxx", False), (2, "zzzz", False)],
        normalize="std_exact",
        **FAILURES_ONLY,
    )
    std = math.sqrt((0.675**2 + 0.025**2 + 2 * 0.325**2) / 4)
    rows = out.credit.advantage.to_lists()
    assert rows[0] == pytest.approx([0.675 / std] * 4)
    assert rows[1] == pytest.approx([0, 0, -0.025 / std, 0], abs=1e-6)
    assert rows[2] == rows[3] == pytest.approx([-0.325 / std] * 4)
    assert out.credit.mask.to_lists() == [[True] * 4, [False, False, True, False], [True] * 4, [True] * 4]
    assert out.credit.columns["gate"].equal(out.credit.mask)
    assert out.trained.uid.tolist() == out.credit.uid.tolist() == [1000, 1001, 1002, 1003]
    assert metrics["wrong"] == 3
    assert metrics["revised_share"] == pytest.approx(2 / 3)
    assert metrics["repair_rate"] == pytest.approx(1 / 6)
    assert metrics["repaired_share"] == pytest.approx(1 / 3)
    assert metrics["edited_share"] == 0.25
    assert metrics["raised_edit_share"] == 0
    # φ = 0, .5, 0, 0: Var φ = .25/4 − .125² = .046875, E φ = .125, p = .25: bound 2·.25·.125/.046875 = 4/3.
    assert metrics["shaping_bound"] == pytest.approx(4 / 3)
    assert metrics["reward_var"] == pytest.approx(3 / 16)
    assert metrics["shaped_reward_var"] == pytest.approx(std**2)


def test_the_single_reference_form_halves_the_share(toolbox):
    half, _ = _run(
        toolbox, [1, 0, 0, 0], [(1, "abcd", True)], repair_scale=0.5, normalize="mean", mask="none", **FAILURES_ONLY
    )
    whole, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], normalize="mean", mask="none", **FAILURES_ONLY)
    assert half.credit.advantage.row(1)[0].item() == pytest.approx(0.3 - 1.3 / 4)
    assert whole.credit.advantage.row(1)[0].item() == pytest.approx(0.6 - 1.6 / 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 3.0))
def test_the_bound_is_where_the_variance_turns(seed, shaping):
    g = torch.Generator().manual_seed(seed)
    correct = torch.rand(20, generator=g) < 0.4
    phi = torch.where(correct, 0.0, (torch.rand(20, generator=g) < 0.5) * torch.rand(20, generator=g)).double()
    reward = correct.double()
    result = shaping_statistics(reward, reward + shaping * phi, phi, correct)
    difference = result["shaped_reward_var"] - result["reward_var"]
    if abs(difference) > 1e-9:
        assert (difference < 0) == (shaping < result["shaping_bound"])


def test_the_bound_without_spread():
    correct = torch.tensor([True, False])
    zero = torch.zeros(2)
    assert shaping_statistics(correct.double(), correct.double(), zero, correct)["shaping_bound"] == 0
    same = shaping_statistics(torch.zeros(2), torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    assert same["shaping_bound"] == 0
    assert (
        shaping_statistics(torch.zeros(0), torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))[
            "reward_var"
        ]
        == 0
    )


# --- identities ---


@pytest.mark.parametrize("normalize", ["std", "mean", "std_exact"])
def test_no_wrong_trajectory_and_no_shaping_are_grpo(toolbox, normalize):
    repairs = [(1, "abcd", True), (2, "abcd", True)]
    for values, revised, config in [
        ([1, 0, 0, 0], [], {}),  # nothing was revised
        ([1, 1, 1, 1], [], {}),  # nothing was wrong
        ([1, 0, 0, 0], [(1, "abzd", False)], {}),  # nothing was repaired
        ([1, 0, 0, 0], repairs, {"shaping": 0.0, "mask": "none"}),
    ]:
        out, _ = _run(toolbox, values, revised, normalize=normalize, **FAILURES_ONLY, **config)
        trajectories = toolbox.trajectories(["abcd", "abxd", "axxx", "aaaa"], group=GROUP)
        rewards = toolbox.rewards(trajectories.uid, values)
        plain = (
            toolbox.start(GroupAdvantage, normalize=normalize).run(trajectories=trajectories, rewards=rewards).credit
        )
        assert out.credit.advantage.equal(plain.advantage)
        assert out.credit.mask.equal(plain.mask)
        assert out.credit.columns["gate"].values.all()


def test_no_shaping_keeps_the_advantage_and_moves_it_to_the_edits(toolbox):
    out, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], shaping=0.0, normalize="mean")
    assert out.credit.advantage.row(1).tolist() == [0, 0, -0.25, 0]


def test_masks(toolbox):
    loss, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], train_revision=False)
    credit, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], mask="credit", train_revision=False)
    off, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], mask="none", train_revision=False)
    assert loss.credit.advantage.equal(credit.credit.advantage)
    assert loss.credit.mask.sum().tolist() == [4, 1, 4, 4]
    assert credit.credit.mask.sum().tolist() == [4, 4, 4, 4]
    assert credit.credit.columns["gate"].equal(loss.credit.columns["gate"])
    assert off.credit.mask.values.all()
    assert off.credit.columns["gate"].values.all()


# --- defined cases ---


def test_the_successful_revision_with_the_fewest_edits_makes_the_mask(toolbox):
    out, _ = _run(toolbox, [1, 0, 0, 0], [(1, "zzzz", True), (1, "abcd", True), (1, "abxc", False), (1, "abed", True)])
    assert out.credit.mask.row(1).tolist() == [False, False, True, False]


def test_a_right_trajectory_is_never_masked_or_shaped(toolbox):
    out, metrics = _run(toolbox, [1, 0, 0, 0], [(0, "abzz", True)], normalize="mean")
    assert out.credit.advantage.row(0).tolist() == [0.75] * 4
    assert metrics["repaired_share"] == 0


def test_an_unverified_revision_repairs_nothing(toolbox):
    out, metrics = _run(toolbox, [1, 0, 0, 0], [(1, "abcd", True)], revision_valid=[False], normalize="mean")
    assert out.credit.advantage.row(1).tolist() == [-0.25] * 4
    assert metrics["repair_rate"] == 0


def test_an_unverified_trajectory_has_no_credit(toolbox):
    out, metrics = _run(toolbox, [1, 0, 0, 0], [], valid=[True, True, True, False], normalize="mean")
    assert out.credit.advantage.row(3).tolist() == [0] * 4
    assert out.credit.advantage.row(0).tolist() == pytest.approx([2 / 3] * 4)
    assert metrics["wrong"] == 2


def test_a_revision_equal_to_its_original_masks_nothing(toolbox):
    out, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abxd", True)])
    assert out.credit.mask.row(1).tolist() == [True] * 4


def test_a_repair_that_only_inserts_trains_what_it_inserts(toolbox):
    out, metrics = _run(toolbox, [1, 0, 0, 0], [(1, "abxde", True)])
    assert out.credit.mask.row(1).tolist() == [False] * 4
    assert out.credit.mask.row(4).tolist() == [False] * 4 + [True]
    assert metrics["unchanged_share"] == metrics["trained_revisions"] == 1


def test_edits_inside_an_inherited_prefix_leave_nothing_to_train(toolbox):
    trajectories = toolbox.trajectories(["abcd", "abxd"], inherited=[0, 3])
    revisions = toolbox.trajectories(["abcd"], first_uid=5000, parent=torch.tensor([1001]))
    out = toolbox.start(Counterfactual).run(
        trajectories=trajectories,
        rewards=toolbox.rewards(trajectories.uid, [1, 0]),
        revisions=revisions,
        revision_rewards=toolbox.rewards(revisions.uid, [1]),
    )
    # The corrected trajectory begins afresh, so its edit is trained.
    assert out.credit.mask.to_lists() == [[True] * 4, [False] * 4, [False, False, True, False]]


def test_repaired_failures_of_a_hopeless_group_are_counted_as_raised(toolbox):
    out, metrics = _run(toolbox, [0, 0, 0, 0], [(1, "abcd", True)], normalize="mean", **FAILURES_ONLY)
    assert out.credit.advantage.row(1).tolist() == pytest.approx([0, 0, 0.45, 0])
    assert metrics["raised_edit_share"] == 1
    blamed, metrics = _run(toolbox, [0, 0, 0, 0], [(1, "abcd", True)], normalize="mean")
    assert blamed.credit.advantage.row(1).tolist() == [0] * 4
    assert blamed.credit.advantage.row(0).tolist() == out.credit.advantage.row(0).tolist() == pytest.approx([-0.15] * 4)
    assert metrics["raised_edit_share"] == 1


def test_a_group_of_one_gets_nothing(toolbox):
    out, _ = _run(toolbox, [0, 0, 0, 0], [(1, "abcd", True)], group=[1, 2, 3, 4])
    assert out.credit.advantage.values.abs().max() == 0


def test_no_rows(toolbox):
    none = toolbox.trajectories([])
    rewards = toolbox.rewards(none.uid, [])
    out = toolbox.start(Counterfactual).run(
        trajectories=none, rewards=rewards, revisions=none, revision_rewards=rewards
    )
    assert len(out.trained) == len(out.credit) == 0


# --- training on revisions ---


def test_revisions_join_as_positives_on_their_edits(toolbox):
    repairs = [(1, "abcd", True), (1, "zzzz", True), (2, "abc", True), (3, "aaab", False)]
    out, _ = _run(toolbox, [1, 0, 0, 0], repairs, normalize="std_exact", shaping=0.0)
    assert out.trained.uid.tolist() == out.credit.uid.tolist() == [1000, 1001, 1002, 1003, 5000, 5002]
    assert out.trained.group.tolist() == [7] * 6
    # "abxd" → "abcd" changes one token; "axxx" → "abc" changes b and c.
    assert out.credit.mask.to_lists()[4:] == [[False, False, True, False], [False, True, True]]
    # Reward 1 in a group with mean 1/4 and population variance 3/16: (3/4)/√(3/16) = √3.
    assert out.credit.advantage.to_lists()[4:] == [
        pytest.approx([0, 0, math.sqrt(3), 0]),
        pytest.approx([0, math.sqrt(3), math.sqrt(3)]),
    ]
    # The prompt stays the one that was sampled from.
    assert out.trained.prompt_tokens.row(4).tolist() == [80]
    assert out.trained.parent.tolist()[4:] == [1001, 1002]


def test_no_repair_adds_no_row(toolbox):
    out, _ = _run(toolbox, [1, 0, 0, 0], [(1, "abzz", False)])
    assert len(out.trained) == 4


# --- mistakes ---


def test_revisions_of_other_trajectories_are_refused(toolbox):
    with pytest.raises(AlignmentError, match="no row for uid"):
        _run(toolbox, [1, 0, 0, 0], [(77, "abcd", True)])


@pytest.mark.parametrize("config", [{"shaping": -0.1}, {"repair_scale": 1.5}])
def test_settings_are_checked(config):
    with pytest.raises(ValueError, match="expected shaping ≥ 0 and 0 ≤ repair_scale ≤ 1"):
        Counterfactual.Config(**config)


def test_credit_has_the_rows_of_what_is_trained():
    # The rows of an output may be those of another output, and a graph follows it.
    nodes = yaml.safe_load(GRAPH.read_text())["nodes"]
    assert len(build_graph({"nodes": nodes})) == len(nodes)
    nodes["learner"]["in"]["trajectories"] = "sampler.trajectories"
    with pytest.raises(GraphError) as caught:
        build_graph({"nodes": nodes})
    assert caught.value.problems == [
        "learner: 'credit' must have the rows of 'trajectories', but advantage.credit has the rows of "
        "advantage.trained and sampler.trajectories has the rows of sampler.trajectories; wire both from the same "
        "population."
    ]
