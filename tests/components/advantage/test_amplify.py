"""More credit for planning tokens."""

import pytest
import torch

from creditgraph.components.advantage.amplify import Amplify, amplified, most_uncertain
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit


def _credit(trajectories, advantage, mask=None):
    tokens = trajectories.response_tokens
    every = torch.ones(len(tokens.values), dtype=torch.bool)
    return Credit(
        uid=trajectories.uid,
        advantage=tokens.spread(torch.tensor(advantage)),
        mask=tokens.with_values(every if mask is None else torch.tensor(mask)),
    )


def test_by_hand():
    # 2 + .2·2, −2 + .2·2, and the others as they are.
    result = amplified(torch.tensor([2.0, -2.0, 2.0, 0.0]), torch.tensor([True, True, False, True]), 0.2)
    assert result.tolist() == pytest.approx([2.4, -1.6, 2.0, 0.0])


def test_the_most_uncertain_tokens_of_each_row_alone():
    entropies = Jagged.from_rows([[0.1, 0.9, 0.5, 0.4, 9.0], [3.0], []], torch.float32)
    mask = entropies.with_values(torch.tensor([True] * 4 + [False, True]))
    # ⌈.3 · 4⌉ = 2 of the first row, where the last token is not trained; ⌈.3⌉ = 1 of the second.
    assert most_uncertain(entropies, mask, 0.3).tolist() == [False, True, True, False, False, True]
    assert not most_uncertain(entropies, mask, 0.0).any()
    assert torch.equal(most_uncertain(entropies, mask, 1.0), mask.values)


def test_component_by_entropy(toolbox):
    trajectories = toolbox.trajectories(["abcd", ""])  # entropies 0, .1, .2, .3
    node = toolbox.start(Amplify, alpha=0.5, share=0.25)
    credit = _credit(trajectories, [-1.0, 1.0])
    made = node.run(trajectories=trajectories, credit=credit).credit
    assert made.advantage.to_lists() == [[-1.0, -1.0, -1.0, -0.5], []]
    assert node.context.metrics["planning_share"] == 0.25
    assert "1 planning tokens" in node.explain({"credit": made}, credit=credit)[0]


def test_thoughts_with_a_keyword(toolbox):
    trajectories = toolbox.trajectories(["Wait</thought>x</thought>y", "await", "no"])
    node = toolbox.start(Amplify, tokens="keywords", keywords=("wait",), alpha=1.0)
    node.tokenizer = toolbox.tokenizer()
    made = node.run(trajectories=trajectories, credit=_credit(trajectories, [1.0, 1.0, 1.0])).credit
    first = len("Wait</thought>")
    assert made.advantage.row(0).tolist() == [2.0] * first + [1.0] * len("x</thought>y")
    assert made.advantage.row(1).tolist() == [2.0] * 5  # a part of a word counts
    assert made.advantage.row(2).tolist() == [1.0, 1.0]


def test_no_rows_and_settings(toolbox):
    none = toolbox.trajectories([])
    for how in ("entropy", "keywords"):
        node = toolbox.start(Amplify, tokens=how)
        assert len(node.run(trajectories=none, credit=_credit(none, [])).credit) == 0
    with pytest.raises(ValueError, match="expected alpha ≥ 0 and 0 ≤ share ≤ 1, got -1"):
        Amplify.Config(alpha=-1.0)
    with pytest.raises(ValueError, match="expected one or more non-empty keywords"):
        Amplify.Config(tokens="keywords", keywords=())
