"""Mathematical equality of the extracted answer, by math-verify in worker processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.verifier.judging import RIGHT, WRONG, Item, MemoJudge, Verdict, unjudged, wrong
from components.verifier.workers import WorkerPool
from pipeline.component import Component
from pipeline.payloads import Judge


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The judge."""

    judge: Judge


class MathJudge(MemoJudge):
    """Right when math-verify finds the extracted answer equal to the reference; equal strings need no worker."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__()
        self.pool = pool

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item; an item that raises or hangs is `valid=False` with the reason, and no other item suffers."""
        found = [item.extracted() for item in items]
        out = [_quick(item, answer) for item, answer in zip(items, found, strict=True)]
        open_items = [i for i, verdict in enumerate(out) if verdict is None]
        replies = self.pool.run([{"gold": items[i].answer, "answer": found[i]} for i in open_items])
        for i, reply in zip(open_items, replies, strict=True):
            if "error" in reply:
                out[i] = unjudged(str(reply["error"]))
            else:
                out[i] = RIGHT if reply["correct"] else WRONG
        return [verdict for verdict in out if verdict is not None]


def _quick(item: Item, answer: str | None) -> Verdict | None:
    """The verdict where no mathematics is needed."""
    if not item.answer.strip():
        return unjudged("the prompt has no reference answer")
    if not answer:
        return wrong("no answer in the response")
    return RIGHT if answer.strip() == item.answer.strip() else None


def worker_command(memory_gb: float, seconds: float) -> Sequence[str]:
    """Starts one math-verify worker."""
    return [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py")), str(memory_gb), str(seconds)]


class Math(Component):
    """Judges by mathematical equality (numbers, expressions, sets, intervals, equations), with a hard limit of time and memory per item.

    math-verify runs in child processes, started with the first answer that needs them. One that hangs is killed and replaced; its item
    is invalid (zero credit) and the reason is kept. Words count as products of letters, so any order of them is equal: for choices and
    names use verifier.exact.
    """

    paper = "math-verify"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Limits."""

        seconds: float = 5.0
        """hard limit per item; beyond it the item is invalid"""
        workers: int = 0
        """processes; 0 takes one per core, at most 8"""
        memory_gb: float = 8.0
        """address space per process; an item that needs more is invalid"""

        def __post_init__(self) -> None:
            if self.seconds <= 0 or self.memory_gb <= 0 or self.workers < 0:
                raise ValueError("seconds and memory_gb must be above 0, workers 0 or more.")

    config: Config
    _judge: MathJudge | None = None

    def run(self) -> Outputs:
        """Gives out the judge, the same one every iteration."""
        if self._judge is None:
            settings = self.config
            count = settings.workers or min(len(os.sched_getaffinity(0)), 8)
            self._judge = MathJudge(WorkerPool(worker_command(settings.memory_gb, settings.seconds), count, settings.seconds))
        self.context.log(worker_restarts=self._judge.pool.restarts)
        return Outputs(judge=self._judge)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._judge is not None:
            self._judge.pool.close()
