"""A plain Python function of the user's own as the verifier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from creditgraph.components.sandbox.limits import at_once
from creditgraph.components.verifier.base import Item, Outputs, Verdict, VerifierComponent, undecided
from creditgraph.components.verifier.function_worker import load_function, worker_command
from creditgraph.components.verifier.worker_pool import WorkerPool
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.metric import Metric

_TRIED = 8  # responses of the first batch, spread over it, of which one must get a reward


class Function(VerifierComponent):
    """Verifies by a function of your own: `reward(prompt, response, answer)` returns a number.

    It may take any of the parameters prompt (the problem), response (without the special tokens at its end), answer
    (the reference, "" without one) and metadata (a dict: further columns of the data, and "messages" where the prompt
    is a list of them). Worker processes call it, one response at a time. A call that raises, takes too long, or returns
    no finite number from `lowest` to `highest` makes its row invalid (zero credit) with the reason. If that happens to
    all responses tried first, the run ends. `random` and `numpy.random` are seeded by the request before every call.
    """

    metrics = (
        Metric("raised", "items", "calls that raised since the run began"),
        Metric("timed_out", "items", "calls that took too long since the run began"),
        Metric("crashed", "items", "calls that ended their process since the run began"),
        Metric("unusable", "items", "calls that returned no finite number in the range since the run began"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The function, the range of its rewards, and limits."""

        function: str = ""
        """module:name, or path/to/file.py:name from the working directory"""
        lowest: float = 0.0
        """smallest reward; below it the response is invalid"""
        highest: float = 1.0
        """largest reward; above it the response is invalid"""
        correct_from: float | None = None
        """rewards from here on count as correct in accuracies; null: `highest`"""
        seconds: float = 10.0
        """limit of wall time per call; beyond it the response is invalid"""
        workers: int = 0
        """number of processes; 0 means one per core, at most 8"""

        def __post_init__(self) -> None:
            if not self.lowest < self.highest:
                raise ValueError(f"expected lowest < highest, got {self.lowest:g} and {self.highest:g}.")
            if self.seconds <= 0 or self.workers < 0:
                raise ValueError("expected seconds > 0 and workers ≥ 0.")
            if self.function:
                load_function(self.function)

        @property
        def threshold(self) -> float:
            """Smallest reward of a correct response."""
            return self.highest if self.correct_from is None else self.correct_from

    config: Config

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """The function."""
        if node.config.function:
            return []
        return [
            f"{node.name}.function: missing; set it to your reward, as module:name or path/to/file.py:name, such "
            f"as {node.name}.function=rewards.py:right."
        ]

    def setup(self, context: Context) -> None:
        """Makes the pool; its workers start with the first call."""
        super().setup(context)
        config = self.config
        workers = at_once(config.workers)
        command = worker_command(config.function, config.seconds)
        self.pool = WorkerPool(command, workers, config.seconds, show_errors=True)
        self.raised = 0
        self.timed_out = 0
        self.crashed = 0
        self.unusable = 0
        self._works = False
        if not config.function:
            raise ConfigError(
                f"node '{context.node}': no function; set function to module:name or path/to/file.py:name, such as "
                f"{context.node}.function=rewards.py:reward."
            )

    def run(self) -> Outputs:
        """Returns the verifier and logs the counts of failed calls so far."""
        self.context.log(raised=self.raised, timed_out=self.timed_out, crashed=self.crashed, unusable=self.unusable)
        return super().run()

    def close(self) -> None:
        """Ends the worker processes."""
        self.pool.close()

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item.

        Raises:
            RunError: no call of the first batch's tried responses gave a reward.
        """
        tried = [] if self._works else list(range(0, len(items), max(1, len(items) // _TRIED)))[:_TRIED]
        verdicts = dict(zip(tried, self._call([items[i] for i in tried]), strict=True))
        if tried:
            self._works = any(verdict.valid for verdict in verdicts.values())
            if not self._works:
                raise RunError(
                    f"node '{self.context.node}': {self.config.function} {verdicts[tried[0]].detail}, and gave no "
                    f"reward for any of {len(tried)} responses, expected a number from {self.config.lowest:g} to "
                    f"{self.config.highest:g} for each. Correct the function"
                    f"{' or the range' if self.unusable else ''}."
                )
        rest = [i for i in range(len(items)) if i not in verdicts]
        verdicts.update(zip(rest, self._call([items[i] for i in rest]), strict=True))
        return [verdicts[i] for i in range(len(items))]

    def _call(self, items: list[Item]) -> list[Verdict]:
        requests = [
            {"prompt": item.prompt, "response": item.text, "answer": item.answer, "metadata": item.metadata}
            for item in items
        ]
        return [self._verdict(reply) for reply in self.pool.run(requests)]

    def _verdict(self, reply: dict[str, Any]) -> Verdict:
        if "error" in reply:
            self.timed_out += reply["timed_out"]
            self.crashed += not reply["timed_out"]
            return undecided(reply["error"])
        if "raised" in reply:
            self.raised += 1
            return undecided(f"raised {reply['raised']}")
        value = reply.get("value")
        low, high = self.config.lowest, self.config.highest
        if value is None or not math.isfinite(value):
            self.unusable += 1
            return undecided(f"returned {reply.get('returned', value)}, expected a finite number")
        if not low <= value <= high:
            self.unusable += 1
            return undecided(f"returned {value:g}, outside {low:g} to {high:g} (settings lowest and highest)")
        correct = value >= self.config.threshold
        return Verdict(value=value, correct=correct, detail="" if correct else f"reward {value:g}")
