"""Mathematical equality of the extracted answer, by math-verify in worker processes."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.components.sandbox.limits import at_once
from creditgraph.components.verifier.base import (
    RIGHT,
    WRONG,
    Item,
    Outputs,
    Verdict,
    VerifierComponent,
    undecided,
    wrong,
)
from creditgraph.components.verifier.math_text import free_answer, quantity
from creditgraph.components.verifier.worker_pool import WorkerPool
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.metric import Metric

MAX_ANSWER = 10_000  # characters; longer answers are endless repetitions, and cost a worker its whole time limit
# The worker ends a hanging comparison itself; the pool's later limit is for a worker that cannot.
_GRACE_SECONDS = 2.0


class Math(VerifierComponent):
    """Verifies by mathematical equality: numbers, expressions, sets, intervals, equations, units, several answers.

    Answers that differ as text and as exact numbers are compared by math-verify in child processes, started at first
    use. A comparison that hangs is ended by the kernel; its item is invalid (zero credit) with the reason, and no other
    item is affected. Answers that math-verify cannot read are compared as text and counted. A unit or percent sign on
    only one side is optional; lists match in any order, tuples do not.
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
        """hard limit of wall time per item; beyond it the item is invalid"""
        cpu_seconds: float = 0.5
        """hard limit of processor time per item, independent of the load of the host; beyond it the item is invalid"""
        workers: int = 0
        """number of processes; 0 means one per core, at most 8"""
        memory_gb: float = 4.0
        """address space per process; an item that needs more is invalid"""
        free_form: bool = False
        """without a \\boxed{}, use the last "answer is …", formula or number of the response; off: such a response is
        wrong"""

        def __post_init__(self) -> None:
            if min(self.seconds, self.cpu_seconds, self.memory_gb) <= 0 or self.workers < 0:
                raise ValueError("expected seconds, cpu_seconds and memory_gb > 0, and workers ≥ 0.")

    references = frozenset({"value", "choice", "boolean"})
    config: Config

    def setup(self, context: Context) -> None:
        """Makes the pool; its workers start with the first comparison."""
        super().setup(context)
        config = self.config
        limits = [str(limit) for limit in (config.memory_gb, config.seconds, config.cpu_seconds)]
        worker = Path(__file__).with_name("math_worker.py")
        workers = at_once(config.workers)
        # -P: without it this folder's math.py would hide the standard library's.
        self.pool = WorkerPool([sys.executable, "-P", str(worker), *limits], workers, config.seconds + _GRACE_SECONDS)
        self.killed = 0
        self.text_only = 0

    def run(self) -> Outputs:
        """Returns the verifier and logs the counts of its workers so far."""
        self.context.log(worker_restarts=self.pool.restarts, killed=self.killed, text_only=self.text_only)
        return super().run()

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item; an item that raises or hangs is `valid=False` with the reason."""
        answers = [self._answer(item) for item in items]
        # Equal questions go to a worker once: a batch holds many samples of the same prompt.
        pairs = [(item.answer, answer or "") for item, answer in zip(items, answers, strict=True)]
        quick = [_without_mathematics(gold, answer) for gold, answer in pairs]
        needed = list(dict.fromkeys(pair for pair, verdict in zip(pairs, quick, strict=True) if verdict is None))
        replies = dict(
            zip(needed, self.pool.run([{"gold": gold, "answer": answer} for gold, answer in needed]), strict=True)
        )
        return [
            self._verdict(replies[pair], pair[0]) if verdict is None else verdict
            for pair, verdict in zip(pairs, quick, strict=True)
        ]

    def _answer(self, item: Item) -> str | None:
        answer = item.extracted()
        return free_answer(item.text) if answer is None and self.config.free_form else answer

    def _verdict(self, reply: dict[str, Any], gold: str) -> Verdict:
        if "error" in reply:
            unjudged = reply["error"].startswith(("timed out", "took more", "RecursionError", "MemoryError"))
            self.killed += reply["error"].startswith(("timed out", "took more"))
            # Whoever means a plain number writes one that can be read in time.
            return wrong(reply["error"]) if unjudged and quantity(gold) is not None else undecided(reply["error"])
        self.text_only += bool(reply.get("text_only"))
        if reply["correct"]:
            return RIGHT
        return wrong("compared as text") if reply.get("text_only") else WRONG


def _without_mathematics(gold: str, answer: str) -> Verdict | None:
    """The verdict where no mathematics is needed."""
    if not gold.strip():
        return undecided("the prompt has no reference answer")
    if not answer:
        return wrong("no answer in the response")
    if answer.strip() == gold.strip():
        return RIGHT
    if len(answer) > MAX_ANSWER:
        return wrong(f"an answer of {len(answer)} characters; at most {MAX_ANSWER} are read")
    return None
