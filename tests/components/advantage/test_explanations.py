"""What components say about their credit: the formula's last number is the credit of the row, for every component."""

import re

import pytest
import torch

from creditgraph.components.advantage.additive import AdditiveAdvantage
from creditgraph.components.advantage.counterfactual import Counterfactual
from creditgraph.components.advantage.critique import CritiqueAdvantage
from creditgraph.components.advantage.explanations import INVALID, decimal
from creditgraph.components.advantage.gae import GAE
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.components.advantage.redistribute import Redistribute
from creditgraph.components.advantage.retry import RetryAdvantage
from creditgraph.components.advantage.trees.paths import TreePaths
from creditgraph.components.advantage.trees.siblings import TreeSiblings
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments, SegmentValues
from creditgraph.pipeline.core.registry import BUILTIN, load_class


def explained(component, outputs, **inputs):
    return component.explain(vars(outputs), **inputs)


def stated(line):
    """The last number of a line."""
    return float(re.findall(r"[+−]?\d*\.?\d+(?:e-?\d+)?", line)[-1].replace("−", "-"))


def group_case(toolbox):
    trajectories = toolbox.trajectories(["abc", "de", "f", "gh", "i"], group=[1, 1, 1, 1, 2])
    return {"trajectories": trajectories, "rewards": toolbox.rewards(trajectories.uid, [1.0, 0.0, 0.0, 0.0, 1.0])}


def test_every_advantage_says_why():
    names = [name for name in BUILTIN if name.startswith("advantage.")]
    assert len(names) >= 9
    assert [name for name in names if load_class(name).explain is Component.explain] == []


def test_the_group_by_hand(toolbox):
    # Rewards 1, 0, 0, 0: mean 1/4, population std √(3/16) = .433; (1 − .25)/.433 = 1.732 and −.25/.433 = −.577.
    case = group_case(toolbox)
    component = toolbox.start(GroupAdvantage)
    texts = explained(component, component.run(**case), **case)
    assert texts[0].splitlines() == [
        "(r − mean)/std = (1 − .25)/.433 = +1.73",
        "rewards of its group: 1, 0, 0, 0; mean .25, standard deviation .433 of 4",
    ]
    assert texts[1].startswith("(r − mean)/std = (0 − .25)/.433 = −.577")
    assert "(1 − 1)/(0 + 1e-06) = 0" in texts[4]
    assert "without a difference there is no signal" in texts[4]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GroupAdvantage, {}),
        (GroupAdvantage, {"unbiased": True}),
        (GroupAdvantage, {"normalize": "mean"}),
        (GroupAdvantage, {"normalize": "std_exact"}),
        (CritiqueAdvantage, {}),
        (CritiqueAdvantage, {"normalize": "std"}),
    ],
)
def test_the_stated_number_is_the_credit(toolbox, kind, settings):
    case = group_case(toolbox)
    component = toolbox.start(kind, **settings)
    outputs = component.run(**case)
    for text, row in list(zip(explained(component, outputs, **case), outputs.credit.advantage.rows(), strict=True))[:4]:
        assert stated(text.splitlines()[0]) == pytest.approx(float(row[0]), rel=5e-3)


def test_an_invalid_reward_says_so(toolbox):
    case = group_case(toolbox)
    case["rewards"] = case["rewards"].replace(valid=torch.tensor([False, True, True, True, True]))
    component = toolbox.start(GroupAdvantage)
    texts = explained(component, component.run(**case), **case)
    assert texts[0].startswith(INVALID)
    assert "rewards of its group: invalid, 0, 0, 0" in texts[0]


def segment_case(toolbox):
    case = group_case(toolbox)
    uid = case["trajectories"].uid
    ends = Jagged.from_rows([[1, 3], [2], [1], [1, 2], [1]], torch.int32)
    values = Jagged.from_rows([[0.25, 0.5, 0.9], [0.3, 0.1], [0.2, 0.2], [0.5, 0.75, 0.0], [0.5, 1.0]], torch.float32)
    return case | {"segments": Segments(uid=uid, ends=ends), "values": SegmentValues(uid=uid, values=values)}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (GAE, {"lam": 0.0}),
        (GAE, {"lam": 0.5}),
        (GAE, {"gamma": 0.9, "length_adaptive": 0.6}),
        (GAE, {"whiten": True}),
        (AdditiveAdvantage, {}),
        (Redistribute, {}),
        (Redistribute, {"head": "softmax"}),
    ],
)
def test_segments_state_the_credit_of_their_tokens(toolbox, kind, settings):
    case = segment_case(toolbox)
    if kind is not GAE:
        group = {"trajectories": case["trajectories"], "rewards": case["rewards"]}
        case["credit"] = toolbox.start(GroupAdvantage, normalize="mean").run(**group).credit
    component = toolbox.start(kind, **settings)
    outputs = component.run(**case)
    for i, text in enumerate(explained(component, outputs, **case)):
        lines = text.splitlines()[1:]
        ends = case["segments"].ends.row(i).tolist()
        assert len(lines) == len(ends)
        for line, end in zip(lines, ends, strict=True):
            assert stated(line) == pytest.approx(float(outputs.credit.advantage.row(i)[end - 1]), rel=5e-3, abs=1e-6)


def test_td_by_hand(toolbox):
    # Values .25, .5, then the reward 1: gains .25 and .5.
    case = segment_case(toolbox)
    component = toolbox.start(GAE, lam=0.0)
    text = explained(component, component.run(**case), **case)[0]
    assert text.splitlines()[1:] == ["segment 1: .5 − .25 = +.25", "segment 2: 1 − .5 = +.5"]


@pytest.mark.parametrize("kind", [TreePaths, TreeSiblings])
def test_nodes_of_a_tree(toolbox, kind):
    # Rows 1 and 2 branch off row 0 after two tokens: its path has two nodes, the shared one and its own.
    trajectories = toolbox.trajectories(["abcd", "abx", "aby"], group=[1, 1, 1], inherited=[0, 2, 2])
    uid = trajectories.uid
    trajectories = trajectories.replace(parent=torch.tensor([-1, int(uid[0]), int(uid[0])]))
    case = {"trajectories": trajectories, "rewards": toolbox.rewards(uid, [1.0, 0.0, 0.0])}
    component = toolbox.start(kind)
    outputs = component.run(**case)
    texts = explained(component, outputs, **case)
    for text, row in zip(texts, outputs.credit.advantage.rows(), strict=True):
        lines = text.splitlines()
        assert len(lines) == 3
        numbers = [stated(line.split(", V over")[0]) for line in lines[1:]]
        assert numbers == pytest.approx([float(row[0]), float(row[-1])], rel=5e-3, abs=1e-6)


def test_second_attempts(toolbox):
    # r1 = 0, r2 = 1: R = 1 + 2·(1 − 0) = 3; the group of second attempts has R 3 and 0 + 2·(0 − 1) = −2, mean .5.
    trajectories = toolbox.trajectories(["a", "b", "c", "d"], group=[1, 1, 2, 2])
    uid = trajectories.uid
    trajectories = trajectories.replace(parent=torch.tensor([-1, -1, int(uid[0]), int(uid[1])]))
    case = {"trajectories": trajectories, "rewards": toolbox.rewards(uid, [0.0, 1.0, 1.0, 0.0])}
    component = toolbox.start(RetryAdvantage, alpha=2.0)
    texts = explained(component, component.run(**case), **case)
    assert "R = r2 + α (r2 − r1) = 1 + 2·(1 − 0) = 3\nR − mean = 3 − .5 = +2.5" in texts[2]
    assert texts[0].startswith("a first attempt: R = r = 0\nR − mean = 0 − .5 = −.5")
    early = toolbox.start(RetryAdvantage, stage_one_iterations=3)
    assert "stage I, until iteration 3" in explained(early, early.run(**case), **case)[0]


def test_a_repaired_failure(toolbox):
    # Half of the failure's revisions are right: R = 0 + .6·.5 = .3 against a right one, mean .65.
    trajectories = toolbox.trajectories(["abcd", "abxd"], group=[1, 1])
    uid = trajectories.uid
    revisions = toolbox.trajectories(["abxd", "abyd"], group=[1, 1])
    revisions = revisions.replace(uid=uid + 100, parent=uid[:1].repeat(2))
    case = {
        "trajectories": trajectories,
        "rewards": toolbox.rewards(uid, [0.0, 1.0]),
        "revisions": revisions,
        "revision_rewards": toolbox.rewards(revisions.uid, [1.0, 0.0]),
    }
    component = toolbox.start(Counterfactual, normalize="mean")
    texts = explained(component, component.run(**case), **case)
    assert texts[0].startswith("R = r + λ φ = 0 + .6·.5 = .3\nR − mean = .3 − .65 = −.35\nR of its group: .3, 1")
    assert "credit on 1 of 4 tokens, those that its repair changes" in texts[0]
    assert texts[1].endswith("credit on 4 of 4 tokens")


def test_small_and_large_numbers():
    assert [decimal(v) for v in (0.0, -0.5, 12.34, 0.9999, -1e-9)] == ["0", "−.5", "12.3", "1", "−1e-09"]
