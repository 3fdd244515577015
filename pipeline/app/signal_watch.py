"""Notices that a run trains nothing, or that a part of its method does nothing, and says why and what to do.

Both from the metrics of its iterations: what trains nothing is found here, what does nothing by the alarms that metrics
declare (`Metric.alarm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.payloads import Credit
from creditgraph.pipeline.core.sockets import Node

PATIENCE = 10  # iterations in a row before a run warns of them; then at 100, 1,000, …

Row = dict[str, Any]  # a row of metrics.jsonl: metrics, and "iteration"


class Streak:
    """The last iterations in a row of which something is true."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._ended = False

    def add(self, row: Row, holds: bool) -> bool:
        """Takes an iteration; returns whether it is the tenth, hundredth, … in a row."""
        if not holds:
            self._ended = True
            self.rows.clear()
            return False
        self.rows.append(row)
        count = len(self.rows)
        return count >= PATIENCE and set(str(count)[1:]) == {"0"} and str(count)[0] == "1"

    @property
    def worth_saying(self) -> bool:
        """Whether it held in all iterations, or in the last ten."""
        return bool(self.rows) and (not self._ended or len(self.rows) >= PATIENCE)

    @property
    def text(self) -> str:
        """Such as "iterations 0 to 9"."""
        first, last = (self.rows[place]["iteration"] for place in (0, -1))
        return f"iteration {first}" if first == last else f"iterations {first} to {last}"


class SignalWatch:
    """Keeps the last iterations in a row that trained nothing, or in which an alarm held, and puts them into words.

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
        self._untrained = Streak()
        self._alarms = {
            f"{node.name}/{metric.name}": (metric.alarm, Streak())
            for node in graph.nodes
            for metric in node.cls.metrics_of(node.config)
            if metric.alarm
        }
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> str:
        """Takes the metrics of an iteration; returns what to warn of, at the tenth, hundredth, … in a row.

        Rows of the final pass, which have no learner, count for nothing, and neither do metrics that are not logged.
        """
        said = []
        trained = trains(row)
        if trained is not None and self._untrained.add(row, not trained):
            said.append(self._untrained_text())
        for name, (alarm, streak) in self._alarms.items():
            if (value := row.get(name)) is not None and value == value and streak.add(row, value >= 1.0):
                said.append(_alarm_text(name, alarm, streak))
        return "\n".join(said)

    def summary(self) -> str:
        """What to warn of as the run ends, "" if nothing: what held in every iteration, or in the last ten."""
        said = [self._untrained_text()] if self._untrained.worth_saying else []
        said += [_alarm_text(n, alarm, streak) for n, (alarm, streak) in self._alarms.items() if streak.worth_saying]
        return "\n".join(said)

    def _untrained_text(self) -> str:
        return f"nothing was trained in {self._untrained.text}: {self._cause(self._untrained.rows)}"

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


def _alarm_text(name: str, alarm: str, streak: Streak) -> str:
    return f"{name} was 1 in {streak.text}: {alarm}"


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
