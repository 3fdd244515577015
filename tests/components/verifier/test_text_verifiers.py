"""Choices, yes and no, patterns."""

import time

import pytest

from creditgraph.components.verifier.choice import Boolean, Choice
from creditgraph.components.verifier.pattern import Regex


def verify(toolbox, kind, texts, answers, metadata=None, **settings):
    prompts = toolbox.prompts(["p"] * len(texts), answers=answers, metadata=metadata)
    return (
        toolbox.start(kind, **settings)
        .run()
        .verifier.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    )


def test_letters(toolbox):
    texts = [
        "\\boxed{B}",
        "\\boxed{(b)}",
        "\\boxed{\\text{B}}",
        "\\boxed{B. Paris}",
        "The answer is (B).",
        "so\nAnswer: **B**",
        "…\n(B)",
    ]
    texts += [
        "\\boxed{C}",
        "\\boxed{both}",
        "I think it may be B or C",
        "The answer is Because",
        "\\boxed{A} \\boxed{C}",
    ]
    rewards = verify(toolbox, Choice, texts, ["B"] * 12)
    assert rewards.correct.tolist() == [True] * 7 + [False] * 5
    assert rewards.detail[7:] == ["answered 'C'", *["no choice in the response"] * 3, "answered 'C'"]


def test_texts_of_choices(toolbox):
    listed = {"template": "plain", "choices": ["Rome", "Paris", "Rome again"]}
    labelled = {"template": "plain", "choices": {"label": ["A", "B"], "text": ["Rome", "Paris"]}}
    texts = ["\\boxed{paris}", "\\boxed{B}", "\\boxed{Rome}", "\\boxed{E}"]
    rewards = verify(toolbox, Choice, texts, ["Paris", "Paris", "B", "B"], [listed, listed, labelled, labelled])
    assert rewards.correct.tolist() == [True, True, False, False]
    assert rewards.detail[2:] == ["answered 'A'", "answered 'E', of 2 choices"]
    rewards = verify(toolbox, Choice, ["\\boxed{B}", "\\boxed{B}"], ["", "Berlin"])
    assert rewards.valid.tolist() == [False, False]
    assert rewards.detail[1] == "the reference 'Berlin' names no choice, expected a letter or the text of a choice"


def test_yes_and_no(toolbox):
    texts = [
        "\\boxed{Yes}",
        "\\boxed{\\text{true}}",
        "The answer is: yes, because no",
        "Hm.\nYes.",
        "\\boxed{no}",
        "yes\nYes and no",
        "perhaps",
        "",
    ]
    rewards = verify(toolbox, Boolean, texts, ["true"] * 8)
    assert rewards.correct.tolist() == [True] * 4 + [False] * 4
    assert rewards.detail[4:] == ["answered 'no'"] + ["neither yes nor no in the response"] * 3
    assert verify(toolbox, Boolean, ["yes"], ["maybe"]).detail == ["the reference 'maybe' is neither yes nor no"]


def test_patterns(toolbox):
    texts = ["#### 3\n#### 1,200 ", "####1,300", "1,200"]
    rewards = verify(toolbox, Regex, texts, ["1,200"] * 3)
    assert rewards.correct.tolist() == [True, False, False]
    assert rewards.detail[1:] == ["answered '1,300'", "the pattern does not match the response"]
    form = {"pattern": r"\A<think>.*</think>.*\Z", "compare": False}
    assert verify(toolbox, Regex, ["<think>\n1\n</think> 2", "2"], ["", ""], **form).correct.tolist() == [True, False]


def test_a_pattern_that_backtracks_is_cut_off(toolbox):
    started = time.monotonic()
    rewards = verify(
        toolbox, Regex, ["a" * 40 + "b", "aaa"], ["x", "aaa"], pattern=r"^(?:(a|aa)+)+$|^(aaa)$", seconds=0.3
    )
    assert time.monotonic() - started < 20
    assert rewards.valid.tolist()[1] is True
    assert rewards.detail[0] in ("the pattern took more than 0.3 s", "the pattern does not match the response")


def test_a_wrong_pattern_is_refused():
    with pytest.raises(ValueError, match=r"pattern '\(' is not a regular expression"):
        Regex.Config(pattern="(")
    with pytest.raises(ValueError, match="pattern is empty"):
        Regex.Config(pattern="")


@pytest.mark.slow
def test_megabytes_do_not_hold_up(toolbox):
    texts = ["\\boxed{" * 150_000, "x" * 1_000_000 + "\\boxed{B}", "(" * 1_000_000]
    started = time.monotonic()
    assert verify(toolbox, Choice, texts, ["B"] * 3).correct.tolist() == [False, True, False]
    assert verify(toolbox, Boolean, texts, ["yes"] * 3).correct.tolist() == [False] * 3
    assert time.monotonic() - started < 10
