"""Localising the first error: self, uniform, oracle."""

import pytest
import torch

from creditgraph.components.localizer.oracle import OracleLocalizer
from creditgraph.components.localizer.self_localizer import SelfLocalizer, parse_step
from creditgraph.components.localizer.uniform import UniformLocalizer
from creditgraph.components.rollouts.thoughts import num_thoughts, thought_texts
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged

CHAINS = TASKS["chains"]

THREE = "a</thought>b</thought>c</thought>"
PROBLEM = {
    "task": "chains",
    "template": "chains",
    "question": "7 s1 * 4 s2 + 3 s3 - 2",
    "modulus": 13,
    "start": 7,
    "steps": [["*", 4], ["+", 3], ["-", 2]],
}


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("Step 1 is right. \\boxed{2}", 5, (2, "boxed", False)),
        ("\\boxed{2} wait, \\boxed{ 4 }", 5, (4, "boxed", False)),
        ("\\boxed{x} but Step 3", 5, (3, "step", False)),
        ("\\boxed{\\text{4}}", 5, (4, "boxed", False)),
        ("\\boxed{4.} as Step 2", 5, (4, "boxed", False)),
        ("\\boxed{4.5}", 5, (1, "default", False)),
        ("step 1 holds, STEP 2 does not", 5, (2, "step", False)),
        ("nothing here", 5, (1, "default", False)),
        ("", 5, (1, "default", False)),
        # A number out of range is no step, in a box or out of one.
        ("Step 3 is wrong, the correct value is \\boxed{42}", 8, (3, "step", True)),
        ("\\boxed{128}", 8, (1, "default", True)),
        ("Step 15", 8, (1, "default", True)),
        ("\\boxed{2} because the sum is \\boxed{99}", 8, (2, "boxed", True)),
        ("Step 2, or Step 12", 8, (2, "step", True)),
        ("\\boxed{0}", 5, (1, "default", True)),
        ("\\boxed{-3} in Step 4", 5, (4, "step", True)),
        ("\\boxed{4}", 0, (1, "default", True)),
        ("\\boxed{99999999999999999999999}", 7, (1, "default", True)),
    ],
)
def test_parsing(text, count, expected):
    assert parse_step(text, count) == expected


def test_numbers_out_of_range_are_counted(toolbox):
    answers = ["\\boxed{42}", "\\boxed{2}"]
    node = toolbox.start(SelfLocalizer)
    errors = node.run(
        prompts=toolbox.prompts(["1 + 1?"]),
        failures=toolbox.trajectories([THREE] * 2),
        policy=toolbox.policy(lambda context, n: answers[n]),
    ).errors
    assert errors.step.tolist() == [1, 2]
    assert node.context.metrics["out_of_range_share"] == node.context.metrics["default_share"] == 0.5


def test_self_asks_the_policy_and_reads_its_answers(toolbox):
    answers = ["so \\boxed{2}", "Step 3 is it", "no idea"]
    policy = toolbox.policy(lambda context, n: answers[n])
    failures = toolbox.trajectories([THREE] * 3)
    node = toolbox.start(SelfLocalizer, max_tokens=40)
    errors = node.run(prompts=toolbox.prompts(["1 + 1?"]), failures=failures, policy=policy).errors
    assert errors.step.tolist() == [2, 3, 1]
    assert errors.source == ["boxed", "step", "default"]
    assert errors.uid.tolist() == failures.uid.tolist()
    metrics = node.context.metrics
    assert metrics["boxed_share"] == metrics["step_share"] == metrics["default_share"] == pytest.approx(1 / 3)
    assert metrics["step_fraction"] == pytest.approx((1 / 3 + 2 / 3 + 0) / 3)
    request = policy.calls[0]
    assert (request.sampling.temperature, request.sampling.max_tokens, request.sampling.thoughts) == (0.3, 40, None)
    prompt = "".join(map(chr, request.tokens.row(0).tolist()))
    assert "1 + 1?" in prompt
    assert "Step 3: c" in prompt
    assert "final answer of this attempt is wrong" in prompt


def test_uniform_covers_all_steps_evenly_and_keeps_to_the_prompt(toolbox):
    failures = toolbox.trajectories([THREE] * 3000)
    errors = toolbox.start(UniformLocalizer).run(failures=failures).errors
    counts = torch.bincount(errors.step)
    assert counts[0] == 0
    # 1000 expected each, standard deviation √(3000 · 1/3 · 2/3) ≈ 26: four of them.
    assert (counts[1:] - 1000).abs().max() < 104
    # Two failures of each prompt: what else is in the batch, their ids and the order of prompts change no draw.
    pairs = failures.replace(prompt_uid=torch.arange(3000) // 2)
    expected = toolbox.start(UniformLocalizer).run(failures=pairs).errors.step
    rows = torch.tensor([34, 35, 10, 11])
    few = toolbox.start(UniformLocalizer).run(failures=pairs.select(rows).replace(uid=torch.arange(4))).errors
    assert few.step.tolist() == expected[rows].tolist()
    assert few.source == ["uniform"] * 4


def test_oracle_finds_the_first_wrong_thought(toolbox):
    right = CHAINS.solution(PROBLEM)
    wrong_second = [right[0], "s2 2 + 3 9 </thought>", "s3 9 - 2 7 \\boxed{ 7 } </thought>"]
    texts = ["".join(t) for t in (wrong_second, ["s1 7 * 4 1 </thought>", *wrong_second[1:]], right[:2], right)]
    prompts = toolbox.prompts(["p"], metadata=[PROBLEM])
    policy = toolbox.policy(lambda c, n: "")
    errors = (
        toolbox.start(OracleLocalizer).run(prompts=prompts, failures=toolbox.trajectories(texts), policy=policy).errors
    )
    # A chain that stops early, or is right, has its error at its last thought.
    assert errors.step.tolist() == [2, 1, 2, 3]
    assert errors.source == ["oracle"] * 4


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_oracle_verdicts_that_are_wrong_are_uniform(toolbox, share):
    # Its first thought is wrong, so that a wrong verdict is step 2 or 3, each as often; a lone thought has none.
    prompts = toolbox.prompts(["p"], metadata=[PROBLEM])
    failures = toolbox.trajectories([THREE] * 2000 + ["a</thought>"])
    policy = toolbox.policy(lambda c, n: "")
    node = toolbox.start(OracleLocalizer, right_share=share)
    errors = node.run(prompts=prompts, failures=failures, policy=policy).errors
    shares = torch.bincount(errors.step[:-1], minlength=4)[1:] / 2000
    assert shares.tolist() == pytest.approx([share, (1 - share) / 2, (1 - share) / 2], abs=0.05)
    assert errors.source.count("wrong") == int((errors.step[:-1] != 1).sum())
    assert (errors.step[-1].item(), errors.source[-1]) == (1, "oracle")
    with pytest.raises(ValueError, match="expected 0 ≤ right_share ≤ 1"):
        OracleLocalizer.Config(right_share=1.5)


def test_oracle_refuses_tasks_it_does_not_know(toolbox):
    prompts = toolbox.prompts(["p"], metadata=[{"task": "olympiads", "template": "thought"}])
    with pytest.raises(
        DataError,
        match=r"localizer\.oracle expected problems of a task family \(chains.* got olympiads\. Use localizer\.self",
    ):
        toolbox.start(OracleLocalizer).run(prompts=prompts, failures=toolbox.trajectories([THREE]))


@pytest.mark.parametrize("kind", [SelfLocalizer, UniformLocalizer, OracleLocalizer])
def test_no_failures(toolbox, kind):
    policy = toolbox.policy(lambda c, n: "x")
    errors = (
        toolbox.start(kind)
        .run(prompts=toolbox.prompts(["p"], metadata=[PROBLEM]), failures=toolbox.trajectories([]), policy=policy)
        .errors
    )
    assert len(errors) == 0
    assert errors.step.dtype == torch.int64
    assert policy.calls == []


def test_a_response_without_thought_ends_is_one_thought(toolbox):
    plain = toolbox.trajectories(["abc", ""], thought_ends=Jagged.from_rows([[], []], torch.int32))
    assert num_thoughts(plain).tolist() == [1, 1]
    assert thought_texts(plain, toolbox.tokenizer()) == [["abc"], [""]]
    assert toolbox.start(UniformLocalizer).run(failures=plain).errors.step.tolist() == [1, 1]
