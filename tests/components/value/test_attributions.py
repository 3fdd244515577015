"""Leave-one-out and gradient attribution: slow loops, by hand, bad input."""

import pytest
import torch

from creditgraph.components.rollouts.segments import increments
from creditgraph.components.value.gradient_attribution import GradientAttribution
from creditgraph.components.value.leave_one_out import LeaveOneOut
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Segments

EXIT = {"exit_text": "E", "answer_end": "}"}
CUTS = [[1, 3, 4], [1], [], [2, 3]]


@pytest.fixture
def case(toolbox):
    trajectories = toolbox.trajectories(["abba", "a", "", "bab"], prompt_uid=torch.tensor([100, 100, 100, 101]))
    return {
        "prompts": toolbox.prompts(["P", "P"], answers=["7", ""]),
        "trajectories": trajectories,
        "segments": Segments(uid=trajectories.uid, ends=Jagged.from_rows(CUTS, torch.int32)),
    }


def test_leave_one_out_slow_version(toolbox, table, case):
    policy = table("abE7}")
    node = toolbox.start(LeaveOneOut, **EXIT, length_normalise=False)
    values = node.run(policy=policy, **case).values.values
    gains = increments(values).to_lists()
    for i, (text, cuts) in enumerate(zip(case["trajectories"].text[:3], CUTS, strict=False)):
        whole = policy.probability(f"P{text}E", "7}")
        assert values.row(i)[-1].item() == pytest.approx(whole)
        slow = [
            whole - policy.probability(f"P{text[:a]}{text[b:]}E", "7}") for a, b in zip([0, *cuts], cuts, strict=False)
        ]
        assert gains[i] == pytest.approx(slow, abs=1e-6)
    # The last problem has no reference.
    assert values.row(3).tolist() == [0.0, 0.0, 0.0]
    assert node.context.metrics["empty_bank_share"] == 0.25
    # "PabbaE7}" and three shorter ones, "PaE7}" and "PE7}", "PE7}".
    assert node.context.metrics["scored_tokens"] == 8 + 7 + 6 + 7 + 5 + 4 + 4


def test_gradients_are_summed_per_segment(toolbox, table, case):
    policy = table("abE7}")
    calls = []

    def attribute(context, tokens, temperature):
        calls.append((context.to_lists(), tokens.to_lists()))
        return context.with_values(torch.arange(len(context.values)).float())

    policy.attribute = attribute
    values = toolbox.start(GradientAttribution, **EXIT, length_normalise=False).run(policy=policy, **case).values.values
    context, tokens = calls[0]
    assert ["".join(map(chr, c)) for c in context] == ["PabbaE", "PaE", "PE"]
    assert ["".join(map(chr, t)) for t in tokens] == ["7}"] * 3
    # Context tokens are numbered 0 … : "abba" has 1 to 4, "a" has 7.
    assert increments(values).to_lists() == [[1.0, 5.0, 4.0], [7.0], [], [0.0, 0.0]]
    assert values.row(0)[-1].item() == 0.0
    halved = toolbox.start(GradientAttribution, **EXIT).run(policy=policy, **case).values.values
    assert increments(halved).to_lists()[0] == [0.5, 2.5, 2.0]


def test_engines_without_gradients_are_refused(toolbox, table, case):
    with pytest.raises(
        CreditgraphError, match=r"TablePolicy gives no gradients; expected an engine that can attribute"
    ):
        toolbox.start(GradientAttribution, **EXIT).run(policy=table(), **case)


def test_no_room_and_no_rows(toolbox, table, case):
    policy = table("abE7}")
    policy.attribute = lambda context, tokens, temperature: context.with_values(torch.ones(len(context.values)))
    none = torch.zeros(0, dtype=torch.int64)
    for kind in (LeaveOneOut, GradientAttribution):
        node = toolbox.start(kind, **EXIT)
        empty = {**case, "trajectories": case["trajectories"].select(none), "segments": case["segments"].select(none)}
        assert len(node.run(policy=policy, **empty).values) == 0
        node.room = 6  # "PaE7}" fits, "PabbaE7}" does not
        values = node.run(policy=policy, **case).values.values.to_lists()
        assert values[0] == [0.0] * 4
        assert values[1] != [0.0] * 2
