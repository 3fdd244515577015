"""math-verify under a hard time limit: equalities, hangs, crashes."""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from creditgraph.components.verifier.base import Item
from creditgraph.components.verifier.math import Math
from creditgraph.components.verifier.worker_pool import WorkerPool
from creditgraph.pipeline.core.errors import RunError

FAKE = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = request["answer"]
    if answer == "hang":
        while True: pass
    if answer == "die":
        os._exit(7)
    if answer == "raise":
        reply = {"error": "ZeroDivisionError: division by zero"}
    else:
        reply = {"correct": answer.startswith("r"), "pid": os.getpid()}
    print(json.dumps({**reply, "number": request["number"]}), flush=True)
"""


@pytest.fixture
def fake_pool(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(FAKE))
    pool = WorkerPool([sys.executable, "-S", str(path)], workers=2, seconds=0.5)
    yield pool
    pool.close()


@pytest.fixture
def fake_math(toolbox, fake_pool):
    component = toolbox.start(Math)
    component.pool = fake_pool
    return component


def _items(*answers, gold="1"):
    return [Item(text=f"so \\boxed{{{a}}}", answer=gold, metadata={"template": "plain"}) for a in answers]


def test_one_bad_item_leaves_the_others_alone(fake_math, fake_pool):
    verifier = fake_math
    started = time.monotonic()
    verdicts = verifier.verdicts(_items("r1", "hang", "w1", "die", "raise", "r2", "hang", "w2", gold="x+1"))
    assert time.monotonic() - started < 10
    assert [v.correct for v in verdicts] == [True, False, False, False, False, True, False, False]
    assert [v.valid for v in verdicts] == [True, False, True, False, False, True, False, True]
    assert verdicts[1].detail == verdicts[6].detail == "timed out after 0.5 s"
    assert verdicts[3].detail == "the worker ended with exit code 7"
    assert verdicts[4].detail == "ZeroDivisionError: division by zero"
    assert fake_pool.restarts == 2  # the same question is asked once
    assert verifier.killed == 2
    assert verifier.verdicts(_items("r3"))[0].correct


def test_workers_are_shared_out_and_closed(fake_pool):
    replies = fake_pool.run([{"answer": "r"}] * 40)
    assert len({r["pid"] for r in replies}) <= 2
    fake_pool.close()
    assert fake_pool.run([{"answer": "w"}])[0]["correct"] is False
    assert fake_pool.run([]) == []


def test_a_worker_that_ends_between_batches_costs_nothing(fake_pool):
    pids = {reply["pid"] for reply in fake_pool.run([{"answer": "r"}] * 4)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" for pid in pids):
        time.sleep(0.01)
    assert [r.get("correct", r) for r in fake_pool.run([{"answer": "r"}] * 4)] == [True] * 4


def test_a_worker_that_cannot_start_is_reported(tmp_path):
    pool = WorkerPool([sys.executable, str(tmp_path / "missing.py")], workers=1, seconds=1)
    with pytest.raises(RunError, match="a verification worker did not start \\(the worker ended with exit code 2\\)"):
        pool.run([{"answer": "r"}])


@pytest.fixture(scope="module")
def node(toolbox):
    component = toolbox.start(Math, workers=1, seconds=20.0, cpu_seconds=10.0)
    yield component
    component.close()


def test_equal_values_in_other_notation(toolbox, node):
    pairs = [
        ("1/2", "0.5"),
        ("\\frac{1}{2}", "1/2"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("x^2+1", "1+x^2"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("1,234", "1234"),
    ]
    unequal = [("5", "6"), ("5", "\\frac{1}{"), ("5", "")]
    prompts = toolbox.prompts(["p"] * 9, answers=[gold for gold, _ in pairs + unequal])
    texts = [f"thus \\boxed{{{answer}}}" for _, answer in pairs + unequal]
    trajectories = toolbox.trajectories(texts, prompt_uid=prompts.uid)
    rewards = node.run().verifier.verify(prompts, trajectories)
    assert rewards.correct.tolist() == [True] * 6 + [False] * 3
    assert rewards.valid.tolist() == [True] * 9
    assert rewards.value.tolist() == [1.0] * 6 + [0.0] * 3


def test_reference_missing_or_unreadable_and_answer_missing(toolbox, node):
    prompts = toolbox.prompts(["p"] * 3, answers=["", " ", "3"])
    trajectories = toolbox.trajectories(["\\boxed{1}", "\\boxed{1}", "I do not know"], prompt_uid=prompts.uid)
    rewards = node.run().verifier.verify(prompts, trajectories)
    assert rewards.valid.tolist() == [False, False, True]
    assert rewards.detail == ["the prompt has no reference answer"] * 2 + ["no answer in the response"]


def test_threads_of_torch_do_not_disturb_the_workers(toolbox, node):
    torch.set_num_threads(2)
    try:
        torch.randn(400, 400) @ torch.randn(400, 400)
        prompts = toolbox.prompts(["p"], answers=["0.25"])
        assert node.run().verifier.verify(prompts, toolbox.trajectories(["\\boxed{1/4}"])).correct.tolist() == [True]
    finally:
        torch.set_num_threads(1)


def test_the_same_row_is_verified_once(toolbox, fake_math, fake_pool):
    prompts = toolbox.prompts(["p", "q"], answers=["1", "2"])
    trajectories = toolbox.trajectories(
        ["\\boxed{r}", "\\boxed{r}", "\\boxed{r}"], prompt_uid=torch.tensor([100, 101, 100])
    )
    sent = []
    original, fake_pool.run = fake_pool.run, lambda requests: (sent.extend(requests), original(requests))[1]
    first, second = (fake_math.verify(prompts, trajectories) for _ in range(2))
    assert len(sent) == 2
    assert first.correct.tolist() == second.correct.tolist() == [True] * 3


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="expected seconds, cpu_seconds and memory_gb > 0"):
        Math.Config(seconds=0)


def test_labelled_pairs(toolbox, node):
    """The verifier as a whole, workers included, on pairs that are known to be equal or not."""
    from tests.components.verifier.pairs import all_pairs, generated, score

    kinds = all_pairs()
    table = [pair for pairs in kinds.values() for pair in pairs]
    assert len(table) >= 1000
    assert all_pairs() == kinds
    # Pairs of another seed, which nobody looked at while the rules were written.
    for pairs in (table, generated(count=10, seed=1)):
        prompts = toolbox.prompts(["p"] * len(pairs), answers=[gold for gold, *_ in pairs])
        trajectories = toolbox.trajectories([f"\\boxed{{{answer}}}" for _, answer, _ in pairs], prompt_uid=prompts.uid)
        rewards = node.run().verifier.verify(prompts, trajectories)
        precision, recall, missed = score(pairs, rewards.correct.tolist())
        assert precision >= 0.995, missed
        assert recall >= 0.995, missed
        assert rewards.valid.all(), [d for d in rewards.detail if d]


def test_poison_is_ended_by_the_kernel_and_costs_only_itself(toolbox):
    component = toolbox.start(Math, workers=1, seconds=60.0, cpu_seconds=0.3, memory_gb=2.0)
    try:
        verifier = component.run().verifier
        answers = ["2\\sqrt{3}", "((10^8)!)!", "\\binom{10^{9}}{500000000}", "\\sqrt{12}"]
        prompts = toolbox.prompts(["p"] * 4, answers=["\\sqrt{12}"] * 4)
        rewards = verifier.verify(
            prompts, toolbox.trajectories([f"\\boxed{{{a}}}" for a in answers], prompt_uid=prompts.uid)
        )
        assert rewards.correct.tolist() == [True, False, False, True]
        # Powers and factorials are not computed; the limit ends what math-verify computes while it reads.
        assert rewards.valid.tolist() == [True, True, False, True]
        assert "0.3 s of computing" in rewards.detail[2] or "MemoryError" in rewards.detail[2]
        assert verifier.pool.restarts == 0  # no import of math-verify was paid again
    finally:
        component.close()


def test_what_cannot_be_read_is_compared_as_text_and_counted(toolbox, node):
    answers = ["\\foo{a}{b}", "\\foo{a}{c}", "x" * 5000, "y" * 1_000_000, "7" * 1_000_000]
    golds = ["\\foo{a} {b}", "\\foo{a}{b}", "1", "1", "7"]
    prompts = toolbox.prompts(["p"] * 5, answers=golds)
    before = node.run().verifier.text_only
    trajectories = toolbox.trajectories([f"\\boxed{{{a}}}" for a in answers], prompt_uid=prompts.uid)
    rewards = node.run().verifier.verify(prompts, trajectories)
    assert rewards.correct.tolist() == [True, False, False, False, False]
    assert rewards.valid.tolist() == [True] * 5
    assert rewards.detail[2] == "compared as text"
    assert rewards.detail[3] == "an answer of 1000000 characters; at most 10000 are read"
    assert node.run().verifier.text_only > before
    node.run()
    assert node.context.metrics["text_only"] == node.run().verifier.text_only


def test_free_form_answers(toolbox, node):
    component = toolbox.start(Math, free_form=True)
    component.pool = node.pool  # its worker runs already
    texts = [
        "The answer is $x = \\frac{1}{2}$.",
        "so we get 3 and 0.5",
        "I do not know",
        "no \\boxed{2}, the answer is 0.5",
    ]
    prompts = toolbox.prompts(["p"] * 4, answers=["1/2"] * 4)
    rewards = component.verify(prompts, toolbox.trajectories(texts, prompt_uid=prompts.uid))
    assert rewards.correct.tolist() == [True, True, False, False]
    assert rewards.detail[2] == "no answer in the response"


def test_what_cannot_be_judged_in_time_is_wrong_beside_a_plain_number(toolbox):
    node = toolbox.start(Math, workers=1, seconds=1.0, cpu_seconds=1.0)
    slow = "\\sum_{i=1}^{n} i^{3000}+\\sum_{i=1}^{m} i^{2999}"
    deep = "\\sqrt{" * 300 + "x" + "}" * 300
    items = [Item(text=f"\\boxed{{{a}}}", answer=g, metadata={}) for a in (slow, deep) for g in ("42", "x^2+1")]
    verdicts = node.verdicts(items)
    node.close()
    assert [(v.valid, v.correct) for v in verdicts[::2]] == [(True, False)] * 2
    assert not any(v.correct for v in verdicts)
