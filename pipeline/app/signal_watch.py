"""Notices that a run trains nothing, and says why and what to do; from the metrics of its iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.payloads import Credit
from creditgraph.pipeline.core.sockets import Node

PATIENCE = 10  # iterations in a row without training before a run says so; then at 100, 1,000, …

Row = dict[str, Any]  # a row of metrics.jsonl: metrics, and "iteration"


class SignalWatch:
    """Keeps the last iterations in a row that trained nothing, and puts their likely cause into a sentence.

    Args:
        graph: graph of the run; its node names say which setting to change and which node to look at.
        run: run directory, named in the next command.
        record_every: iterations between records, 0 for none; only a recorded iteration can be replayed.
        rows: iterations of earlier starts.
    """

    def __init__(self, graph: Graph, run: Path, record_every: int = 1, rows: Sequence[Row] = ()) -> None:
        self._graph = graph
        self._run = run
        self._record_every = record_every
        self._untrained: list[Row] = []
        self._any_trained = False
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> str:
        """Takes the metrics of an iteration; returns a warning when the tenth, hundredth, … in a row trained nothing.

        Rows of the final pass, which have no learner, count for nothing.
        """
        trained = trains(row)
        if trained is None:
            return ""
        if trained:
            self._any_trained = True
            self._untrained.clear()
            return ""
        self._untrained.append(row)
        count = len(self._untrained)
        return self._sentence() if count >= PATIENCE and set(str(count)[1:]) == {"0"} and str(count)[0] == "1" else ""

    def summary(self) -> str:
        """A warning about the run as it ends, "" if it trained: no iteration did, or the last ten did not."""
        if not self._untrained or (self._any_trained and len(self._untrained) < PATIENCE):
            return ""
        return self._sentence()

    def _sentence(self) -> str:
        first, last = (self._untrained[place]["iteration"] for place in (0, -1))
        which = f"iteration {first}" if first == last else f"iterations {first} to {last}"
        return f"nothing was trained in {which}: {self._cause(self._untrained)}"

    def _cause(self, rows: list[Row]) -> str:
        """The likely cause, and the next command."""
        report = f"`creditgraph report {self._run}`"
        if not _total(rows, "/groups") and not _total(rows, "/skipped_nonfinite", "/skipped_zero_credit", "/steps"):
            return f"no response reached the learner. See {self._run / 'rejected.jsonl'} and {report}."
        if _total(rows, "/skipped_nonfinite"):
            return f"the loss or its gradient was NaN or infinite. Look for NaN in the credit: {self._replay(rows)}."
        if 0 < _largest(rows, "/group_size") <= 1:
            return (
                "every group has one response, and a reward is compared with the others of its group. "
                f"{self._larger_groups()}."
            )
        correct = _values(rows, "rewards/correct")
        reward = _values(rows, "rewards/mean")
        if correct and not any(correct) and not any(reward):
            if unverified := _total(rows, "rewards/invalid"):
                return (
                    f"no response was correct, and {unverified:,.0f} could not be verified. See the reasons in "
                    f"{self._run / 'rejected.jsonl'}."
                )
            return (
                "no response was correct (reward 0 everywhere). Read what the model answers and why the verifier "
                f"refuses it: {report}. If it is the model, take easier problems or a stronger model."
            )
        if correct and min(correct) == 1.0:
            return f"every response was correct, so nothing is left to learn here. Take harder problems; {report}."
        silent = _values(rows, "/zero_variance_share")
        if silent and min(silent) == 1.0:
            return (
                "the rewards within each group were equal. Take more responses per prompt, or problems of middling "
                f"difficulty (sampler.dynamic looks for them); {report} shows the groups."
            )
        return f"the credit of every token was 0. Look at the node that gives it: {self._replay(rows)}."

    def _replay(self, rows: list[Row]) -> str:
        """The command that runs the node which gives the learner its credit again, in a recorded iteration."""
        credit = next((wire for node in self._graph.nodes for wire in _credit_wires(node)), None)
        recorded = [r["iteration"] for r in rows if self._record_every and r["iteration"] % self._record_every == 0]
        if credit is None or not recorded:
            return f"`creditgraph report {self._run}`, with run.record.every=1"
        return f"`creditgraph replay {self._run} --iteration {recorded[-1]} --node {credit}`"

    def _larger_groups(self) -> str:
        for node in self._graph.nodes:
            if hasattr(node.config, "group_size"):
                return f"Train with {node.name}.group_size=8 and another run.name"
        return "Let the sampler make several responses per prompt (`creditgraph components sampler`)"


def trains(row: Row) -> bool | None:
    """Whether an iteration made an optimiser step; None for a row that does not count.

    That is one without a learner that counts its steps, or one in which a node withholds credit while others warm up.
    """
    if not _values([row], "/skipped_zero_credit") or _total([row], "/warming_up"):
        return None
    return _total([row], "/steps") > 0


def _credit_wires(node: Node) -> list[str]:
    """Names of the nodes whose credit a learner takes."""
    if not any(metric.name == "skipped_zero_credit" for metric in node.cls.metrics):
        return []
    inputs = node.sockets.inputs
    return [wire.source for socket, wire in node.all_wires if inputs[socket].carries(Credit)]


def _values(rows: list[Row], ending: str) -> list[float]:
    """The numbers of all metrics whose name ends so; NaN counts as absent."""
    numbers = [value for row in rows for name, value in row.items() if name.endswith(ending)]
    return [value for value in numbers if isinstance(value, int | float) and value == value]


def _total(rows: list[Row], *endings: str) -> float:
    return sum(value for ending in endings for value in _values(rows, ending))


def _largest(rows: list[Row], ending: str) -> float:
    return max(_values(rows, ending), default=0.0)
