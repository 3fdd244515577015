"""Mathematical equality of the extracted answer, by math-verify in worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.verifier.base import RIGHT, WRONG, Item, MemoVerifier, Verdict, unjudged, wrong
from components.verifier.math_text import free_answer
from components.verifier.workers import WorkerPool
from pipeline.core.component import Component
from pipeline.core.metric import Metric
from pipeline.core.payloads import Verifier

MAX_ANSWER = 10_000
_GRACE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


class MathVerifier(MemoVerifier):
    """Right when the extracted answer equals the reference as text, as a number, or by math-verify in a worker.

    Attributes:
        pool: the workers.
        killed: items that ran into a limit so far.
        text_only: items so far of which math-verify could read the reference or the answer not at all, compared as
            text.
    """

    def __init__(self, pool: WorkerPool, free_form: bool = False) -> None:
        super().__init__()
        self.pool, self.killed, self.text_only = pool, 0, 0
        self._free_form = free_form

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item; an item that raises or hangs is `valid=False` with the reason, and no other item suffers."""
        found = [self._answer(item) for item in items]
        out = [_quick(item, answer) for item, answer in zip(items, found, strict=True)]
        # Equal questions are asked once: a batch holds many samples of the same prompt.
        asked: dict[tuple[str, str], list[int]] = {}
        for i, verdict in enumerate(out):
            if verdict is None:
                asked.setdefault((items[i].answer, found[i] or ""), []).append(i)
        replies = self.pool.run([{"gold": gold, "answer": answer} for gold, answer in asked])
        for rows, reply in zip(asked.values(), replies, strict=True):
            verdict = _verdict(reply)
            self.killed += len(rows) * bool(reply.get("error", "").startswith(("timed out", "took more")))
            self.text_only += len(rows) * bool(reply.get("text"))
            for i in rows:
                out[i] = verdict
        return [verdict for verdict in out if verdict is not None]

    def _answer(self, item: Item) -> str | None:
        found = item.extracted()
        return free_answer(item.text) if found is None and self._free_form else found


def _verdict(reply: dict[str, Any]) -> Verdict:
    if "error" in reply:
        return unjudged(str(reply["error"]))
    if reply["correct"]:
        return RIGHT
    return wrong("compared as text") if reply.get("text") else WRONG


def _quick(item: Item, answer: str | None) -> Verdict | None:
    """The verdict where no mathematics is needed."""
    if not item.answer.strip():
        return unjudged("the prompt has no reference answer")
    if not answer:
        return wrong("no answer in the response")
    if answer.strip() == item.answer.strip():
        return RIGHT
    if len(answer) > MAX_ANSWER:
        return wrong(f"an answer of {len(answer)} characters; at most {MAX_ANSWER} are read")
    return None


def worker_command(memory_gb: float, seconds: float, cpu_seconds: float) -> Sequence[str]:
    """Starts one math-verify worker."""
    return [
        sys.executable,
        "-P",
        str(Path(__file__).with_name("math_worker.py")),
        str(memory_gb),
        str(seconds),
        str(cpu_seconds),
    ]


class Math(Component):
    """Verifies by mathematical equality: numbers, expressions, sets, intervals, equations, quantities with units, several answers.

    Answers that differ as text and as exact numbers go to math-verify in child processes, started with the first of
    them. One that hangs is ended by the kernel; its item is invalid (zero credit) and the reason is kept. What
    math-verify cannot read is compared as text and counted. A unit or percent sign that only one side has is taken as
    understood; lists match in any order, tuples do not.
    """

    paper = "math-verify"
    metrics = (
        Metric("worker_restarts", "workers", "math-verify workers replaced since the run began"),
        Metric("killed", "items", "comparisons that ran into a limit since the run began"),
        Metric("text_only", "items", "comparisons as text since the run began, as math-verify could not read a side"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Limits."""

        seconds: float = 5.0
        """hard limit per item by the clock; beyond it the item is invalid"""
        cpu_seconds: float = 0.5
        """hard limit per item of processor time, which a busy host does not use up; beyond it the item is invalid"""
        workers: int = 0
        """processes; 0 takes one per core, at most 8"""
        memory_gb: float = 4.0
        """address space per process; an item that needs more is invalid"""
        free_form: bool = False
        """without a \\boxed{} take the last "answer is …", formula or number of the response; off: such a response is
        wrong"""

        def __post_init__(self) -> None:
            if min(self.seconds, self.cpu_seconds, self.memory_gb) <= 0 or self.workers < 0:
                raise ValueError("seconds, cpu_seconds and memory_gb must be above 0, workers 0 or more.")

    config: Config
    _judge: MathVerifier | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            settings = self.config
            count = settings.workers or min(len(os.sched_getaffinity(0)), 8)
            command = worker_command(settings.memory_gb, settings.seconds, settings.cpu_seconds)
            # The worker ends a hanging item itself; the pool's later limit is for a worker that cannot.
            self._judge = MathVerifier(
                WorkerPool(command, count, settings.seconds + _GRACE_SECONDS), settings.free_form
            )
        verifier = self._judge
        self.context.log(worker_restarts=verifier.pool.restarts, killed=verifier.killed, text_only=verifier.text_only)
        return Outputs(verifier=verifier)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._judge is not None:
            self._judge.pool.close()
