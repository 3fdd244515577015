"""Base groups and failures: every split, every fallback."""

import pytest
import torch

from creditgraph.components.sampler.failures import Failures, choose, parse_split
from creditgraph.pipeline.core.payloads import Trajectories


def _run(toolbox, outcomes: dict[str, str], **settings):
    """`outcomes` per prompt: one letter per attempt, "+" correct, "-" wrong, "?" cannot be verified; then correct
    ones."""

    def script(context, n):
        mark = outcomes[context][n] if n < len(outcomes[context]) else "+"
        return f"{context}{n}{mark}</thought>"

    def rule(text):
        if "?" in text:
            raise RuntimeError("no verdict")
        return float("+" in text)

    node = toolbox.start(Failures, **settings)
    policy, verifier = toolbox.policy(script), toolbox.verifier(rule)
    out = node.run(prompts=toolbox.prompts(list(outcomes)), policy=policy, verifier=verifier)
    short = lambda batch: [t.removesuffix("</thought>") for t in batch.text]  # noqa: E731
    return short(out.trajectories), short(out.failures), node.context.metrics, policy, out


def test_1x4_takes_the_first_failure_and_the_others_fill_the_base(toolbox):
    base, failures, metrics, policy, out = _run(toolbox, {"a": "++-+-", "b": "-----"})
    assert failures == ["a2-", "b0-"]
    assert base == ["a0+", "a1+", "a3+", "a4-", "b1-", "b2-", "b3-", "b4-"]
    assert out.trajectories.group.tolist() == [100] * 4 + [101] * 4
    assert metrics["attempts"] == 5
    assert metrics["discarded"] == 0
    assert metrics["fallback_share"] == 0
    assert len(policy.calls) == 1


def test_1x4_late_failure_samples_on_for_that_prompt_only(toolbox):
    base, failures, metrics, policy, _ = _run(toolbox, {"a": "+++++++-+++", "b": "-++++"})
    assert failures == ["a7-", "b0-"]
    assert base == ["a0+", "a1+", "a2+", "a3+", "b1+", "b2+", "b3+", "b4+"]
    assert [len(c.seed) for c in policy.calls] == [10, 5]
    assert metrics["attempts"] == 7.5
    assert metrics["discarded"] == 15 - 8 - 2


def test_1x4_without_failure_in_twelve_falls_back_to_four_of_them_and_four_new_ones(toolbox):
    base, failures, metrics, policy, out = _run(toolbox, {"a": "+" * 12 + "-", "b": "+" * 12, "c": "-"})
    assert failures == ["c0-"]
    assert base[:8] == ["a0+", "a1+", "a2+", "a3+", "a12-", "a13+", "a14+", "a15+"]
    assert base[8:16] == [f"b{i}+" for i in (0, 1, 2, 3, 12, 13, 14, 15)]
    assert out.trajectories.group.tolist() == [100] * 8 + [101] * 8 + [102] * 4
    assert [len(c.seed) for c in policy.calls] == [15, 10, 4, 8]
    assert len(torch.cat([c.seed for c in policy.calls]).unique()) == 37
    assert metrics["attempts"] == pytest.approx(37 / 3)
    assert metrics["fallback_share"] == pytest.approx(2 / 3)
    assert metrics["discarded"] == 37 - 20 - 1
    # Of the groups of a, b and c only that of a has rewards that differ.
    assert metrics["signal_share"] == pytest.approx(1 / 3)
    assert metrics["fallback_signal_share"] == 0.5


def test_a_response_without_verdict_is_no_signal(toolbox):
    _, _, metrics, _, _ = _run(toolbox, {"a": "+++?" + "+" * 12, "b": "-+?-+"})
    assert metrics["signal_share"] == 0.5
    assert metrics["fallback_signal_share"] == 0


def test_1x4_failure_at_the_twelfth_attempt_still_counts(toolbox):
    base, failures, metrics, _, _ = _run(toolbox, {"a": "+" * 11 + "-"})
    assert failures == ["a11-"]
    assert base == ["a0+", "a1+", "a2+", "a3+"]
    assert metrics["fallback_share"] == 0


def test_2x4_has_two_different_failures_and_no_base(toolbox):
    base, failures, metrics, policy, _ = _run(toolbox, {"a": "--", "b": "+-++-"}, split="2x4")
    assert base == []
    assert failures == ["a0-", "a1-", "b1-", "b4-"]
    assert [len(c.seed) for c in policy.calls] == [4, 2, 4]
    assert metrics["discarded"] == 10 - 4


def test_2x4_with_one_failure_only_falls_back(toolbox):
    base, failures, metrics, _, _ = _run(toolbox, {"a": "++-"}, split="2x4")
    assert failures == []
    assert base == [f"a{i}+" for i in range(12, 20)]
    assert metrics["fallback_share"] == 1


@pytest.mark.parametrize(("outcome", "failure"), [("-", ["a0-"]), ("+-", ["a1-"]), ("+" * 11 + "-", ["a11-"])])
def test_1x8_has_one_failure_and_no_base(toolbox, outcome, failure):
    base, failures, _, _, _ = _run(toolbox, {"a": outcome}, split="1x8")
    assert (base, failures) == ([], failure)


def test_1x8_falls_back(toolbox):
    base, failures, metrics, policy, _ = _run(toolbox, {"a": ""}, split="1x8")
    assert (len(base), failures, metrics["attempts"]) == (8, [], 20)
    assert [len(c.seed) for c in policy.calls] == [1, 1, 2, 4, 4, 8]


def test_a_response_without_verdict_is_no_failure(toolbox):
    base, failures, _, _, _ = _run(toolbox, {"a": "?+-++"})
    assert failures == ["a2-"]
    assert base == ["a0?", "a1+", "a3+", "a4+"]


def test_other_splits(toolbox):
    base, failures, _, _, _ = _run(toolbox, {"a": "+--+++"}, split="2x2", group_size=6, max_attempts=6)
    assert (base, failures) == (["a0+", "a3+"], ["a1-", "a2-"])


@pytest.mark.slow
def test_what_is_chosen_does_not_depend_on_the_waves(toolbox):
    torch.manual_seed(0)
    for name in ("1x4", "2x4", "1x8"):
        split = parse_split(name, 8)
        for _ in range(60):
            failed = (torch.rand(12) < 0.15).tolist()
            outcome = "".join("-" if f else "+" for f in failed)
            base, failures, _, _, _ = _run(toolbox, {"a": outcome}, split=name)
            whole = choose(failed, split) or ([*range(split.base), *range(12, 20 - split.base)], [])
            assert base == [f"a{i}{(outcome + '+' * 8)[i]}" for i in whole[0]]
            assert failures == [f"a{i}{outcome[i]}" for i in whole[1]]


def test_seeds_of_a_prompt_do_not_depend_on_its_neighbours(toolbox):
    *_, both, _ = _run(toolbox, {"a": "++++++-", "b": "++++++++-"})
    *_, alone, _ = _run(toolbox, {"a": "++++++-"})
    assert both.calls[0].seed[:5].tolist() == alone.calls[0].seed.tolist()
    assert both.calls[1].seed[:5].tolist() == alone.calls[1].seed.tolist()


def test_no_prompts(toolbox):
    node = toolbox.start(Failures)
    out = node.run(
        prompts=toolbox.prompts([]), policy=toolbox.policy(lambda c, n: ""), verifier=toolbox.verifier(lambda t: 0.0)
    )
    assert len(out.trajectories) == len(out.failures) == 0
    assert isinstance(out.failures, Trajectories)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"split": "1-4"}, "expected a split 'AxB' .* got '1-4'"),
        ({"split": "0x4"}, "got '0x4'"),
        ({"split": "3x4"}, r"at most group_size \(8\) suffixes, got '3x4' with 12"),
        ({"max_attempts": 4}, "expected max_attempts ≥ 5, .* got 4"),
    ],
)
def test_impossible_settings_are_reported(settings, text):
    with pytest.raises(ValueError, match=text):
        Failures.Config(**settings)
