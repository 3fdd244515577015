"""Pairs of attempts."""

import pytest
import torch

from creditgraph.components.sampler.retry import Retry
from creditgraph.components.text.stops import decode_rows
from creditgraph.components.text.templates import critique_prompt, retry_prompt, revise_prompt


def _run(toolbox, script, prompts=("p", "q"), **settings):
    policy = toolbox.policy(script)
    node = toolbox.start(Retry, **settings)
    return node.run(prompts=toolbox.prompts(list(prompts)), policy=policy).trajectories, node.context.metrics, policy


def test_pairs_and_their_groups(toolbox):
    out, metrics, policy = _run(toolbox, lambda c, n: f"{c}{n}" if len(c) == 1 else "second", pairs=2)
    assert out.text == ["p0", "p1", "q0", "q1"] + ["second"] * 4
    first, second = out.select(torch.arange(4)), out.select(torch.arange(4, 8))
    assert first.parent.tolist() == [-1] * 4
    assert second.parent.tolist() == first.uid.tolist()
    assert first.prompt_uid.tolist() == second.prompt_uid.tolist() == first.group.tolist() == [100, 100, 101, 101]
    a, _, b, _ = first.uid.tolist()
    assert second.group.tolist() == [a, a, b, b]
    assert second.inherited.tolist() == [0] * 4
    asked = decode_rows(policy.tokenizer, second.prompt_tokens.to_lists())
    assert ["p0" in asked[0], "p1" in asked[1], "q0" in asked[2], "q1" in asked[3]] == [True] * 4
    assert all("There may be a mistake" in text for text in asked)
    assert not any("is wrong" in text or "is correct" in text for text in asked)
    assert decode_rows(policy.tokenizer, first.prompt_tokens.to_lists()) == ["p", "p", "q", "q"]
    assert len(torch.cat([call.seed for call in policy.calls]).unique()) == 8
    assert metrics["unchanged_share"] == metrics["no_retry_share"] == 0
    assert metrics["sampled_tokens"] == 4 * 2 + 4 * 6


def test_unchanged_attempts_are_counted(toolbox):
    _, metrics, _ = _run(toolbox, lambda c, n: "same", pairs=3)
    assert metrics["unchanged_share"] == 1


def test_a_retry_without_room_is_left_out(toolbox):
    out, metrics, _ = _run(toolbox, lambda c, n: "first" if len(c) == 1 else ("" if "q" in c else "second"), pairs=1)
    assert out.text == ["first", "first", "second"]
    assert metrics["no_retry_share"] == 0.5


def test_a_retry_that_never_ends_is_kept_and_counted(toolbox):
    out, metrics, _ = _run(toolbox, lambda c, n: "first" if len(c) == 1 else "x" * 99, pairs=1, max_tokens=10)
    assert out.text[2:] == ["x" * 10] * 2
    assert out.finish_reason[2:] == ["length"] * 2
    assert metrics["unended_retry_share"] == 1


def test_a_prompt_does_not_depend_on_its_neighbours(toolbox):
    both = _run(toolbox, lambda c, n: "a", pairs=2)[2]
    node = toolbox.start(Retry, pairs=2)
    alone = toolbox.policy(lambda c, n: "a")
    node.run(prompts=toolbox.prompts(["p", "q"]).select(torch.tensor([1])), policy=alone)
    assert [call.seed[2:].tolist() for call in both.calls] == [call.seed.tolist() for call in alone.calls]


def test_no_prompts(toolbox):
    out, metrics, policy = _run(toolbox, lambda c, n: "a", prompts=())
    assert len(out) == 0
    assert policy.calls == []
    assert metrics["sampled_tokens"] == 0


def test_settings_are_checked():
    with pytest.raises(ValueError, match="expected pairs ≥ 1, got 0"):
        Retry.Config(pairs=0)


def test_prompts_say_as_much_as_they_may(toolbox):
    plain = {"template": "plain"}
    tokenizer = toolbox.tokenizer()
    hedged = retry_prompt(plain, "q?", ["one</thought>", "two"], tokenizer, "thought")
    assert "Problem: q?\n\nSolution attempt:\nStep 1: one\nStep 2: two\n\nThere may be a mistake" in hedged
    assert hedged.endswith("Close each step with </thought>.\n\n")
    right, wrong = (critique_prompt(plain, "q?", ["one"], correct, tokenizer, "plain") for correct in (True, False))
    assert "The final answer of this attempt is correct." in right
    assert "The final answer of this attempt is wrong." in wrong
    assert "Solution attempt:\none\n\n" in right
    # A plain response has no thoughts, whatever the template of its problem.
    for template in ("plain", "chat", "thought"):
        text = retry_prompt({"template": template}, "q?", ["one"], tokenizer, "plain")
        assert "</thought>" not in text
        assert "Step 1" not in text
    chains = {"template": "chains"}
    steps = ["s1 7 * 4 2 </thought>", "s2 2 + 3 5 \\boxed{ 5 } </thought>"]
    expected = revise_prompt(chains, "7 s1 * 4 s2 + 3", steps, steps, None, "thought")
    assert retry_prompt(chains, "7 s1 * 4 s2 + 3", steps, None, "thought") == expected
    assert critique_prompt(chains, "7 s1 * 4 s2 + 3", steps, False, None, "thought") == expected
    assert expected.startswith("<revise> 7 s1 * 4 s2 + 3 </problem> c1 7 * 4 2 ref 2 c2 ")


def test_the_embedded_model_tries_again(tiny):
    out = (
        tiny.start(Retry, pairs=2, mode="thought", max_tokens=120)
        .run(prompts=tiny.prompts, policy=tiny.policy)
        .trajectories
    )
    assert len(out) == 4 * len(tiny.prompts)
    scores = tiny.policy.score(out.prompt_tokens, out.response_tokens)
    torch.testing.assert_close(scores.logprobs.values, out.engine_logprobs.values, rtol=0, atol=1e-4)
