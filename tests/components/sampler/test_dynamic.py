"""Dynamic sampling: waves, backlog, shortage."""

import pytest

from creditgraph.components.sampler.dynamic import Dynamic


def _script(context, n):
    """Prompt "m…" has mixed outcomes, "e…" only wrong ones, "u…" cannot be judged but once."""
    if context[0] == "u":
        return f"{context}{'+' if n == 0 else '?'}"
    return f"{context}{'+' if context[0] == 'm' and n % 2 else '-'}"


def _rule(text):
    if "?" in text:
        raise RuntimeError("no verdict")
    return float("+" in text)


def _run(toolbox, node, prompts):
    policy = toolbox.policy(_script)
    out = node.run(prompts=prompts, policy=policy, verifier=toolbox.verifier(_rule))
    return out, policy


def test_only_groups_with_a_signal_leave_and_the_rest_waits(toolbox):
    node = toolbox.start(Dynamic, group_size=2, groups=2)
    out, policy = _run(toolbox, node, toolbox.prompts(["e1", "m1", "m2", "m3", "e2", "m4"]))
    # Wave 1: e1, m1 (one of two has a signal); wave 2 asks for 1/(1/2) = 2 prompts: m2 and m3, of which m3 is surplus.
    assert out.prompts.text == ["m1", "m2"]
    assert out.trajectories.text == ["m1-", "m1+", "m2-", "m2+"]
    assert out.trajectories.prompt_uid.tolist() == [101, 101, 102, 102]
    assert [len(c.seed) for c in policy.calls] == [4, 4]
    metrics = node.context.metrics
    assert (metrics["waves"], metrics["signal_share"], metrics["surplus_groups"], metrics["backlog"]) == (2, 0.75, 1, 3)
    assert metrics["missing_groups"] == 0
    again, _ = _run(toolbox, node, toolbox.prompts(["m9"], first_uid=900))
    assert again.prompts.text == ["m3", "m4"]
    assert again.prompts.uid.tolist() == [103, 105]
    final, _ = _run(toolbox, node, toolbox.prompts(["e9"], first_uid=950))
    assert final.prompts.text == ["m9"]
    assert node.context.metrics["missing_groups"] == 1


def test_the_backlog_survives_a_restart(toolbox):
    node, fresh = toolbox.start(Dynamic, group_size=2, groups=1), toolbox.start(Dynamic, group_size=2, groups=1)
    _run(toolbox, node, toolbox.prompts(["m1", "m2", "m3"]))
    fresh.load_state_dict(node.state_dict())
    a, _ = _run(toolbox, node, toolbox.prompts(["m4"], first_uid=700))
    b, _ = _run(toolbox, fresh, toolbox.prompts(["m4"], first_uid=700))
    assert a.prompts.text == b.prompts.text == ["m2"]
    assert b.prompts.tokens.equal(a.prompts.tokens)
    assert b.prompts.metadata == a.prompts.metadata
    fresh.load_state_dict({})
    assert fresh.state_dict() == {}


def test_too_few_signals_go_on_with_what_there_is(toolbox):
    node = toolbox.start(Dynamic, group_size=2, groups=3)
    out, _ = _run(toolbox, node, toolbox.prompts(["e1", "m1", "e2", "u1"]))
    assert out.prompts.text == ["m1"]
    assert node.context.metrics["missing_groups"] == 2
    none, _ = _run(toolbox, node, toolbox.prompts(["e1"], first_uid=500))
    assert len(none.trajectories) == len(none.prompts) == 0
    empty, _ = _run(toolbox, node, toolbox.prompts([]))
    assert len(empty.trajectories) == 0


def test_waves_are_bounded_and_unsampled_prompts_wait(toolbox):
    node = toolbox.start(Dynamic, group_size=2, groups=1, max_waves=2)
    out, policy = _run(toolbox, node, toolbox.prompts(["e1", "e2", "e3", "m1"]))
    assert len(out.trajectories) == 0
    assert len(policy.calls) == 2
    assert node.context.metrics["backlog"] == 2


def test_impossible_settings_are_reported():
    with pytest.raises(ValueError, match=r"expected group_size ≥ 2 .* got 1"):
        Dynamic.Config(group_size=1)
