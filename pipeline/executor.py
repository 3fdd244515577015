"""Runs a graph: iterations, two overlapping lanes, records, metrics, checkpoints, resume.

Every value carries the iteration it belongs to, and a wire says which iteration it reads. So which policy version made which
rollout is fixed by the graph; overlapping generation with learning changes when things are computed, never what.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, process_time
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pipeline.checkpoint import Checkpoints, CheckpointSettings, Encoded, encode, is_storable
from pipeline.component import Context, ModelSpec, identity_sum
from pipeline.errors import ConfigError
from pipeline.graph import Graph
from pipeline.metrics import FanOut, JsonLines, Sink, WandbSettings
from pipeline.node_runner import NodeReport, NodeRunner, set_origin
from pipeline.recording import Recorder, RecordSettings
from pipeline.run_directory import RunDirectory
from pipeline.sockets import Node
from pipeline.values import Stopped, Values, as_inputs

logger = logging.getLogger("creditgraph")

Status = Literal["finished", "interrupted", "preempted"]
EXIT_CODES: dict[Status, int] = {"finished": 0, "interrupted": 130, "preempted": 75}
_AGAIN: dict[Status, str] = {"interrupted": "Ctrl-C once more ends it at once", "preempted": "start the run again to continue"}
_SIGNALS: dict[int, Status] = {signal.SIGINT: "interrupted", signal.SIGTERM: "preempted", signal.SIGUSR1: "preempted"}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The `run` section of a configuration."""

    name: str = "run"
    """name of the run and of its directory below `root`"""
    root: str = "runs"
    """folder that holds run directories"""
    iterations: int = 100
    """iterations to run in all; raising it later continues a finished run"""
    seed: int = 0
    """key of every random stream"""
    device: str = "auto"
    """where models live: cpu, cuda, cuda:1; auto takes CUDA when torch sees it"""
    threads: int = 1
    """torch threads on a CPU; 0 leaves torch's own choice (two that compete were seen to be 10 to 20 times slower than one)"""
    overlap: bool = True
    """generate later iterations beside learning where the wires allow it; the results are the same"""
    allow_changes: bool = False
    """continue an earlier run although its graph, model, data or seed differ"""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """when the state is saved"""
    record: RecordSettings = field(default_factory=RecordSettings)
    """which outputs are written as Parquet"""
    wandb: WandbSettings = field(default_factory=WandbSettings)
    """mirroring to Weights & Biases"""

    def __post_init__(self) -> None:
        if self.iterations < 0 or self.iterations >= 1 << 24:
            raise ValueError(f"iterations {self.iterations}: wanted 0 to {(1 << 24) - 1}.")


def resolve_device(name: str) -> str:
    """ "auto" becomes cuda when torch sees it, else cpu; raises ConfigError for a device that is not there."""
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"run.device: found '{name}'; wanted auto, cpu, cuda or cuda:N.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"run.device: found '{name}', but torch sees no CUDA device here; run on a GPU machine or set run.device=cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


class Observer(Protocol):
    """Is told what happens, for a progress display. `node_started` may come from either lane's thread."""

    def node_started(self, node: str, iteration: int) -> None:
        """A node begins an iteration."""

    def iteration_done(self, iteration: int, metrics: dict[str, float]) -> None:
        """An iteration is over; `iteration` equals the number of iterations after the final pass."""


class Silent:
    """An observer that does nothing."""

    def node_started(self, node: str, iteration: int) -> None:
        """Does nothing."""

    def iteration_done(self, iteration: int, metrics: dict[str, float]) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Outcome:
    """How `Executor.run` ended.

    Attributes:
        status: "finished", "interrupted" (Ctrl-C) or "preempted" (SIGTERM, SIGUSR1).
        completed: number of iterations that are done and checkpointed.
        final: metrics of the final evaluation pass, empty when there was none.
    """

    status: Status
    completed: int
    final: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0, 130 (Ctrl-C) or 75 (preempted: start again to continue)."""
        return EXIT_CODES[self.status]


@dataclass
class LaneReport:
    """What one lane did in one iteration: node → report, and the seconds the lane itself took and waited."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    overhead: float = 0.0
    waited: float = 0.0


class Executor:
    """Owns the components of a graph and runs them.

        with RunDirectory.open(path, config) as run, Executor(graph, settings, run=run) as executor:
            executor.setup()
            executor.restore()
            outcome = executor.run()

    Args:
        graph: checked graph.
        settings: the run section.
        model, data: given to every node's context.
        run: run directory; None keeps nothing (no metrics file, records or checkpoints).
        sinks: further places for metrics; closed with the executor.
        observer: progress display.
        all_sum: reducer over data-parallel replicas.
    """

    def __init__(
        self,
        graph: Graph,
        settings: RunSettings,
        *,
        model: ModelSpec | None = None,
        data: dict[str, dict[str, Any]] | None = None,
        run: RunDirectory | None = None,
        sinks: Sequence[Sink] = (),
        observer: Observer | None = None,
        all_sum: Callable[[Tensor], Tensor] = identity_sum,
    ) -> None:
        self.graph = graph
        self.settings = settings
        self.observer = observer or Silent()
        self._run = run
        self._sinks = FanOut(sinks)
        self._rejected: JsonLines | None = None
        self._checkpoints = Checkpoints(run.checkpoints_path, settings.checkpoint.keep) if run else None
        self._recorder = Recorder(run.record_path, settings.record, graph) if run else None
        self._values = Values(graph)
        self._start = -1  # unknown before restore
        self._saved = -1
        self._stop: Status | None = None
        self._stop_after: int | None = None
        self._started: dict[str, int] = {}
        self._reports: dict[tuple[str, int], LaneReport] = {}
        self._snapshots: dict[tuple[str, int], dict[str, Encoded]] = {}
        self._carried: dict[str, float] = {}
        shared: dict[str, Any] = {
            "seed": settings.seed,
            "iterations": settings.iterations,
            "device": resolve_device(settings.device),
            "model": model or ModelSpec(),
            "data": data or {},
            "run_dir": run.path if run else None,
            "all_sum": all_sum,
        }
        self._runners = {n.name: NodeRunner(n, Context(node=n.name, node_index=i, **shared)) for i, n in enumerate(graph.nodes)}
        self._refuse_delayed_handles()

    @property
    def components(self) -> dict[str, Any]:
        """Node name → component, after `setup`."""
        return {name: runner.component for name, runner in self._runners.items()}

    def setup(self) -> None:
        """Builds every component and loads its models and files, in graph order."""
        for runner in self._runners.values():
            runner.setup()

    def restore(self) -> int:
        """Continues from the newest sound checkpoint, if there is one; returns the number of iterations already done."""
        found = None
        if self._checkpoints:
            self._checkpoints.clean()
            found = self._checkpoints.latest()
        self._start = 0 if found is None else found.iteration + 1
        if self._run:
            self._sinks.sinks.insert(0, JsonLines(self._run.metrics_path, self._start - 1))
            self._rejected = JsonLines(self._run.rejected_path, self._start - 1)
        groups = dict(found.groups) if found else {}
        in_flight = groups.pop("values", {})
        self._seed_values(in_flight)
        for group, state in groups.items():
            name = group.removeprefix("node.")
            if name in self._runners:
                self._runners[name].load(state)
            else:
                logger.warning("the checkpoint holds a state of node '%s', which this graph lacks; it is ignored.", name)
        if found:
            for runner in self._runners.values():
                runner.harvest()  # what `setup` logs and rejects belongs to the first start
        self._values.completed = self._saved = self._start - 1
        return self._start

    def run(self) -> Outcome:
        """Runs the remaining iterations and the final evaluation pass; call `setup` and `restore` before."""
        if self._start < 0:
            raise RuntimeError("Executor.run: call setup() and restore() first; restore() also sets the values that '@k' wires start from.")
        with self._signals():
            self._run_lanes()
            if self._stop:
                return Outcome(self._stop, self._values.completed + 1)
            final = self.evaluate()
            if final:
                self._log(self.settings.iterations, final)
            return Outcome("finished", self._values.completed + 1, final)

    def evaluate(self, targets: Sequence[str] | None = None) -> dict[str, float]:
        """Runs only `targets` (default: every node whose class has `final_pass`) and what they need, on the latest values.

        The iteration is the number of iterations of the run; `@k` wires carry their newest value. Returns the metrics.
        """
        names = [n.name for n in self.graph.nodes if getattr(n.cls, "final_pass", False)] if targets is None else list(targets)
        needed = self.graph.ancestors(names, within_iteration=True)
        metrics: dict[str, float] = {}
        local: dict[tuple[str, str], Any] = {}
        for node in self.graph.nodes:
            if node.name not in needed:
                continue
            if node.placement == "collective":
                raise ConfigError(f"{node.name}: evaluating {', '.join(names)} would train it once more; read its output with '@1'.")
            found = {s: [self._values.latest(w) if w.delay else local[w.source, w.output] for w in ws] for s, ws in node.wires.items()}
            self.observer.node_started(node.name, self.settings.iterations)
            outputs = self._runners[node.name].run(self.settings.iterations, as_inputs(node, found))
            local.update({(node.name, output): value for output, value in outputs.items()})
        for node in self.graph.nodes:
            if node.name in needed:
                report = self._runners[node.name].harvest()
                metrics.update(report.metrics)
                self._reject(report.rejected)
        return metrics

    def close(self) -> None:
        """Closes components, recorder and sinks."""
        for runner in self._runners.values():
            runner.close()
        if self._recorder:
            self._recorder.close()
        self._sinks.close()
        if self._rejected:
            self._rejected.close()
            self._rejected = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:
            logger.warning("closing the run after an error: %s", second)  # must not hide the first one

    # Values

    def _refuse_delayed_handles(self) -> None:
        for node in self.graph.nodes:
            for socket, wire in node.all_wires:
                if wire.delay:
                    types = self.graph[wire.source].sockets.outputs[wire.output].types
                    bad = [t for t in types if isinstance(t, type) and not is_storable(t)]
                    if bad:
                        raise ConfigError(
                            f"{node.name}.{socket}: wire '{wire}' delays a {bad[0].__name__}, a handle whose past cannot be kept; "
                            "delay the weights it is made of instead."
                        )

    def _seed_values(self, in_flight: dict[tuple[str, str, int], Any]) -> None:
        initial: dict[str, dict[str, Any]] = {}
        for (name, output), delay in self._values.delays.items():
            for tag in range(self._start - delay, self._start):
                if (name, output, tag) in in_flight:
                    self._values.put(name, output, tag, in_flight[name, output, tag])
                    continue
                if self._start > 0:
                    logger.warning("%s.%s of iteration %d is not in the checkpoint; its initial value takes its place.", name, output, tag)
                if name not in initial:
                    initial[name] = self._runners[name].initial()
                if output not in initial[name]:
                    raise ConfigError(
                        f"{name}.{output}: read with '@{delay}', but initial() of {self.graph[name].use} gives no value for it; "
                        f"it gives {sorted(initial[name]) or 'none'}. Return it from initial()."
                    )
                self._values.put(name, output, tag, set_origin(initial[name][output], f"{name}.{output}"))

    # Lanes

    def _run_lanes(self) -> None:
        lanes = self.graph.lanes()
        if not (self.settings.overlap and self.graph.overlaps):
            self._main_lane("main", list(self.graph.nodes), others=[])
            return
        generation = [n for n in self.graph.nodes if lanes[n.name] == "generation"]
        learning = [n for n in self.graph.nodes if lanes[n.name] == "learning"]
        thread = threading.Thread(target=self._generation_lane, args=(generation,), name="generation", daemon=True)
        thread.start()
        try:
            self._main_lane("learning", learning, others=["generation"])
        except KeyboardInterrupt as error:
            self._values.fail(error)  # at once: the thread is a daemon
            raise
        except BaseException as error:
            self._values.fail(error)
            thread.join()
            if isinstance(error, Stopped) and self._values.error is not None:
                raise self._values.error from self._values.error.__cause__
            raise
        thread.join()

    def _main_lane(self, lane: str, nodes: list[Node], others: list[str]) -> None:
        lanes = [lane, *others]
        self._mark, self._cpu_mark = perf_counter(), process_time()
        for iteration in self._iterations(lane):
            self._post(lane, nodes, iteration)
            self._complete(iteration, lanes)
            if self._is_checkpoint(iteration):
                self._checkpoint(iteration, lanes)
            self._values.complete(iteration)
        last = self._values.completed
        if last > self._saved:
            self._snapshots[lane, last] = self._snapshot(nodes, copy=False)
            self._checkpoint(last, lanes)

    def _generation_lane(self, nodes: list[Node]) -> None:
        lane = "generation"
        try:
            last = self._start - 1
            for last in self._iterations(lane, lead=max(1, self.graph.max_delay) + 1):
                self._post(lane, nodes, last)
            with self._values.changed:
                if last >= self._start and (lane, last) not in self._snapshots:
                    self._snapshots[lane, last] = self._snapshot(nodes, copy=False)
                    self._values.changed.notify_all()
        except Stopped:
            pass
        except BaseException as error:
            self._values.fail(error)

    def _iterations(self, lane: str, lead: int | None = None) -> Iterator[int]:
        """The iterations a lane still has to run: until the end, or the last one that any lane had begun when a stop was asked for."""
        for iteration in range(self._start, self.settings.iterations):
            if lead is not None:
                floor = iteration - lead
                self._values.wait_until(lambda floor=floor: self._values.completed >= floor or self._stop_after is not None)  # type: ignore[misc]
            with self._values.changed:
                self._values.check()
                if self._stop and self._stop_after is None:
                    self._stop_after = max(self._started.values(), default=self._start - 1)
                    self._values.changed.notify_all()
                if self._stop_after is not None and iteration > self._stop_after:
                    return
                self._started[lane] = iteration
            yield iteration

    def _post(self, lane: str, nodes: list[Node], iteration: int) -> None:
        """Runs a lane's nodes for one iteration, and snapshots them where a checkpoint is due."""
        begin, waited = perf_counter(), self._values.waited()
        report = LaneReport()
        for node in nodes:
            inputs = self._values.gather(node, iteration)
            self.observer.node_started(node.name, iteration)
            outputs = self._runners[node.name].run(iteration, inputs)
            del inputs
            for output, value in outputs.items():
                if self._recorder:
                    self._recorder.put(node.name, output, iteration, value)
                self._values.put(node.name, output, iteration, value)
            self._values.release(node, iteration)
            del outputs
        report.nodes = {node.name: self._runners[node.name].harvest() for node in nodes}
        report.waited = self._values.waited() - waited
        report.overhead = perf_counter() - begin - report.waited - sum(r.seconds for r in report.nodes.values())
        snapshot = self._snapshot(nodes, copy=lane == "generation") if self._is_checkpoint(iteration) else None
        with self._values.changed:
            if snapshot is not None:
                self._snapshots[lane, iteration] = snapshot
            self._reports[lane, iteration] = report
            self._values.changed.notify_all()

    def _complete(self, iteration: int, lanes: list[str]) -> None:
        """Waits for the other lane's part of an iteration, then logs the whole."""
        self._values.wait_until(lambda: all((lane, iteration) in self._reports for lane in lanes))
        begin = perf_counter()
        reports = {lane: self._reports.pop((lane, iteration)) for lane in lanes}
        by_node = {name: report for r in reports.values() for name, report in r.nodes.items()}
        metrics: dict[str, float] = {}
        for node in self.graph.nodes:
            metrics.update(by_node[node.name].metrics)
            self._reject(by_node[node.name].rejected)
        metrics.update(self._carried)
        if len(lanes) > 1:
            metrics.update({f"seconds/waiting_{lane}": r.waited for lane, r in reports.items()})
        metrics["seconds/executor"] = sum(r.overhead for r in reports.values()) + metrics.pop("seconds/logging", 0.0)
        cpu = process_time()
        metrics["seconds/iteration"], metrics["seconds/cpu"] = begin - self._mark, cpu - self._cpu_mark
        self._mark, self._cpu_mark = begin, cpu
        self._log(iteration, metrics)
        self._carried = {"seconds/logging": perf_counter() - begin}

    def _log(self, iteration: int, metrics: dict[str, float]) -> None:
        self._sinks.log(iteration, metrics)
        self.observer.iteration_done(iteration, metrics)

    def _reject(self, rows: list[dict[str, Any]]) -> None:
        if rows and self._rejected:
            self._rejected.write(rows)

    # Checkpoints and signals

    def _is_checkpoint(self, iteration: int) -> bool:
        every = self.settings.checkpoint.every
        return self._checkpoints is not None and every > 0 and (iteration + 1) % every == 0

    def _snapshot(self, nodes: list[Node], copy: bool) -> dict[str, Encoded]:
        """The states of a lane's nodes. All have run the same iterations, so this is one side of a consistent cut."""
        if self._checkpoints is None:
            return {}
        found = {n.name: self._runners[n.name].snapshot(copy) for n in nodes}
        return {f"node.{name}": state for name, state in found.items() if state is not None}

    def _checkpoint(self, iteration: int, lanes: list[str]) -> None:
        """Saves the state after `iteration`: both lanes' snapshots and the values still in flight on `@k` wires."""
        if self._checkpoints is None:
            return
        self._values.wait_until(lambda: all((lane, iteration) in self._snapshots for lane in lanes))
        begin = perf_counter()
        groups = {group: state for lane in lanes for group, state in self._snapshots.pop((lane, iteration)).items()}
        values = {(node, output, tag): value for node, output, tag, value in self._values.in_flight(iteration)}
        groups["values"] = encode(values, "values in flight", copy=False)
        if self._recorder:
            self._recorder.flush()
        self._sinks.sync()
        if self._rejected:
            self._rejected.sync()
        self._checkpoints.save(iteration, dict(sorted(groups.items())))
        self._saved = iteration
        self._carried["seconds/checkpoint"] = perf_counter() - begin

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGUSR1 end the run after the iteration; a second Ctrl-C ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self._stop == "interrupted":
                raise KeyboardInterrupt
            self._stop = _SIGNALS[number]
            logger.warning("%s: finishing this iteration and saving; %s.", signal.Signals(number).name, _AGAIN[self._stop])

        before = {number: signal.signal(number, handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
