"""Runs a graph: iterations, two overlapping lanes, records, metrics, checkpoints, resume.

Every value carries the iteration it belongs to, and a wire says which iteration it reads. So which policy version made
which rollout is fixed by the graph; overlapping generation with learning changes when things are computed, never what.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from types import FrameType, TracebackType
from typing import Any

from pipeline.core.component import Context, ModelSpec, identity_sum
from pipeline.core.errors import ConfigError, LostError
from pipeline.core.graph import Graph
from pipeline.core.metric import Metric
from pipeline.core.payloads import Handle
from pipeline.core.sockets import Node
from pipeline.run.checkpoint import SHARDS, Checkpoint, Checkpoints, Encoded, load
from pipeline.run.distributed.team import Team
from pipeline.run.metrics import FanOut, JsonLines, Sink
from pipeline.run.node_runner import LaneReport, NodeReport, NodeRunner, set_origin
from pipeline.run.placement import Placement
from pipeline.run.recording import Recorder
from pipeline.run.run_directory import RunDirectory
from pipeline.run.run_settings import (
    AGAIN,
    SIGNALS,
    STOPS,
    Observer,
    Outcome,
    RunSettings,
    Silent,
    Status,
    resolve_device,
)
from pipeline.run.timeline.timeline import Timeline
from pipeline.run.values import Stopped, Values, as_inputs

logger = logging.getLogger("creditgraph")

EXECUTOR_METRICS = (
    Metric("iteration", "number", "the iteration, from 0; the final pass has the number of iterations"),
    Metric("seconds/<node>", "s", "wall time of the node's `run`; of several replicas the longest"),
    Metric("seconds/iteration", "s", "wall time since the iteration before was logged"),
    Metric("seconds/cpu", "s", "processor time of this process, all threads, in `seconds/iteration`; no phase of it"),
    Metric(
        "seconds/executor",
        "s",
        "wall time of the executor between nodes, and of writing the metrics of the iteration before",
    ),
    Metric("seconds/checkpoint", "s", "wall time of the checkpoint that the iteration before made"),
    Metric("seconds/waiting_<lane>", "s", "wall time in which a lane (generation, learning) waited for the other one"),
    Metric(
        "utilisation/engine",
        "share",
        "time since the iteration before in which the engine took weights, generated or scored",
    ),
    Metric("utilisation/learner", "share", "time in which the learner ran"),
    Metric("utilisation/credit", "share", "time in which verifiers, rewards and credit nodes ran"),
    Metric("utilisation/waiting", "share", "time in which the main lane waited for the other lane or for other ranks"),
    Metric(
        "rejected/<node>", "rows", "rows the node skipped in this iteration; rejected.jsonl has each with its reason"
    ),
)


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
        run: run directory; None keeps nothing (no metrics file, records or checkpoints), or is that of rank 0.
        path: of the run directory, where rank 0 of several has it open.
        sinks: further places for metrics; closed with the executor.
        observer: progress display.
        team: the processes that run this graph together; each has an executor of its own.
    """

    def __init__(
        self,
        graph: Graph,
        settings: RunSettings,
        *,
        model: ModelSpec | None = None,
        data: dict[str, dict[str, Any]] | None = None,
        run: RunDirectory | None = None,
        path: Path | None = None,
        sinks: Sequence[Sink] = (),
        observer: Observer | None = None,
        team: Team | None = None,
    ) -> None:
        self.graph = graph
        self.settings = settings
        self.observer = observer or Silent()
        self._run = run
        self._sinks = FanOut(sinks)
        self._rejected: JsonLines | None = None
        self._team = team or Team()
        self._place = Placement(graph, self._team)
        ranks = self._team.ranks
        path = run.path if run else path
        checkpoints = path / "checkpoints" if path else None
        self._checkpoints = Checkpoints(checkpoints, settings.checkpoint.keep) if checkpoints else None
        self._trace = Timeline(path, settings.trace, ranks.rank, ranks.world)
        self._team.folder = path
        self._recorder = Recorder(path / "record", settings.record, graph, self._trace) if path else None
        self._values = Values(self._place.nodes, self._trace)
        self._start = -1  # unknown before restore
        self._saved = -1
        self._stop: Status | None = None
        self._stop_after: int | None = None
        self._agreeing = False
        self._started: dict[str, int] = {}
        self._reports: dict[tuple[str, int], LaneReport] = {}
        self._snapshots: dict[tuple[str, int], dict[str, Encoded]] = {}
        self._light: dict[tuple[str, int], dict[str, Encoded]] = {}
        self._carried: dict[str, float] = {}
        shared: dict[str, Any] = {
            "seed": settings.seed,
            "iterations": settings.iterations,
            "device": resolve_device(settings.device, ranks.local_rank if ranks.world > 1 else None),
            "model": model or ModelSpec(),
            "data": data or {},
            "run_dir": path,
            "ranks": ranks,
            "trace": self._trace,
        }
        self._runners = {}
        for index, node in enumerate(graph.nodes):
            if node in self._place.nodes:
                reducer = self._place.lane(node.name).all_sum if ranks.num_replicas > 1 else identity_sum
                self._runners[node.name] = NodeRunner(
                    node, Context(node=node.name, node_index=index, all_sum=reducer, **shared)
                )
        self._refuse_delayed_handles()

    @property
    def components(self) -> dict[str, Any]:
        """Node name → component, after `setup`."""
        return {name: runner.component for name, runner in self._runners.items()}

    def setup(self) -> None:
        """Builds every component and loads its models and files, in graph order."""
        self._trace.start(self._team)
        for runner in self._runners.values():
            runner.setup()

    def restore(self) -> int:
        """Continues from the newest sound checkpoint, if there is one; returns the number of iterations already done."""
        found = self._latest()
        self._start = 0 if found is None else found.iteration + 1
        if self._run:
            self._sinks.sinks.insert(0, JsonLines(self._run.metrics_path, self._start - 1))
            self._rejected = JsonLines(self._run.rejected_path, self._start - 1)
        groups = found.groups if found else {}
        self._seed_values(self._place.values_of(groups))
        for name, state in self._place.states_of(groups).items():
            if name in self._runners:
                self._runners[name].load(state)
            elif name not in self.graph:
                logger.warning(
                    "the checkpoint holds a state of node '%s', which this graph lacks; it is ignored.", name
                )
        if found:
            for runner in self._runners.values():
                if runner.has_shards:
                    runner.load_shards(found.path / SHARDS)
                runner.harvest()  # what `setup` logs and rejects belongs to the first start
        self._values.completed = self._saved = self._start - 1
        return self._start

    def _latest(self) -> Checkpoint | None:
        """The newest sound checkpoint as rank 0 finds it; every rank reads the groups it needs."""
        if self._checkpoints is None:
            return None
        found = None
        if self._place.first:
            self._checkpoints.clean()
            found = self._checkpoints.latest()
        if self._team.ranks.world == 1:
            return found
        name = self._team.from_first(found.path.name if found else "")
        if found is None and name:
            found = load(self._checkpoints.path / name, self._place.wanted, verify=False)
        return found

    def run(self) -> Outcome:
        """Runs the remaining iterations and the final evaluation pass; call `setup` and `restore` before."""
        if self._start < 0:
            raise RuntimeError(
                "Executor.run: call setup() and restore() first; restore() also sets the values that '@k' wires start "
                "from."
            )
        with self._signals():
            try:
                self._run_lanes()
            except LostError:
                self._save_finished()
                raise
            if stop := self._agreed_stop():
                return Outcome(stop, self._values.completed + 1)
            final = self.evaluate()
            if final:
                self._log(self.settings.iterations, final)
            return Outcome("finished", self._values.completed + 1, final)

    def evaluate(self, targets: Sequence[str] | None = None) -> dict[str, float]:
        """Runs only `targets` (default: every node whose class has `final_pass`) and what they need, on the latest values.

        The iteration is the number of iterations of the run; `@k` wires carry their newest value. Returns the metrics.
        """
        names = (
            [n.name for n in self.graph.nodes if getattr(n.cls, "final_pass", False)]
            if targets is None
            else list(targets)
        )
        needed = self.graph.ancestors(names, within_iteration=True)
        metrics: dict[str, float] = {}
        local: dict[tuple[str, str], Any] = {}
        for node in self.graph.nodes:
            if node.name in needed and node.placement == "collective":
                raise ConfigError(
                    f"{node.name}: evaluating {', '.join(names)} would train it once more; read its output with '@1'."
                )
            if node.name not in needed or node.name not in self._runners:
                continue
            found = {
                s: [self._values.latest(w) if w.delay else local[w.source, w.output] for w in ws]
                for s, ws in node.wires.items()
            }
            self.observer.node_started(node.name, self.settings.iterations)
            outputs = self._runners[node.name].run(self.settings.iterations, as_inputs(node, found))
            local.update({(node.name, output): value for output, value in outputs.items()})
        reports = self._place.merge(
            {n.name: self._runners[n.name].harvest() for n in self._place.nodes if n.name in needed}
        )
        for report in reports.values():
            metrics.update(report.metrics)
            self._reject(report.rejected)
        return metrics

    def close(self) -> None:
        """Closes components, recorder and sinks."""
        for runner in self._runners.values():
            runner.close()
        if self._recorder:
            self._recorder.close()
        self._trace.close()
        self._sinks.close()
        if self._rejected:
            self._rejected.close()
            self._rejected = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                output = self.graph[wire.source].sockets.outputs[wire.output]
                if wire.delay and output.carries(Handle):
                    raise ConfigError(
                        f"{node.name}.{socket}: wire '{wire}' delays a {output.type_text}, a handle whose past cannot "
                        "be kept; delay the weights it is made of instead."
                    )

    def _seed_values(self, in_flight: dict[tuple[str, str, int], Any]) -> None:
        initial: dict[str, dict[str, Any]] = {}
        known = set(self._team.from_first(list(in_flight)))
        # Every rank asks collective nodes for their initial values, whether it reads them or not: making them may take
        # all ranks.
        for (name, output), delay in Values(self.graph.nodes).delays.items():
            if name not in self._runners:
                continue
            for tag in range(self._start - delay, self._start):
                if (name, output, tag) in known:
                    self._values.put(name, output, tag, in_flight.get((name, output, tag)))
                    continue
                if self._start > 0:
                    logger.warning(
                        "%s.%s of iteration %d is not in the checkpoint; its initial value takes its place.",
                        name,
                        output,
                        tag,
                    )
                if name not in initial:
                    initial[name] = self._runners[name].initial()
                if output not in initial[name]:
                    raise ConfigError(
                        f"{name}.{output}: read with '@{delay}', but initial() of {self.graph[name].use} gives no "
                        "value for it; "
                        f"it gives {sorted(initial[name]) or 'none'}. Return it from initial()."
                    )
                self._values.put(name, output, tag, set_origin(initial[name][output], f"{name}.{output}"))

    # Lanes

    def _run_lanes(self) -> None:
        lanes = self.graph.lanes()
        if not (self.settings.overlap and self.graph.overlaps):
            self._main_lane("main", list(self._place.nodes), others=[])
            return
        generation = [n for n in self._place.nodes if lanes[n.name] == "generation"]
        learning = [n for n in self._place.nodes if lanes[n.name] == "learning"]
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
        self._trace.shares()  # from here on
        for iteration in self._iterations(lane):
            self._post(lane, nodes, iteration)
            self._complete(iteration, lanes)
            if self._is_checkpoint(iteration):
                with self._trace.span("checkpoint", "checkpoint", iteration):
                    self._checkpoint(iteration, lanes)
            self._values.complete(iteration)
        last = self._values.completed
        if last > self._saved:
            self._snapshots[lane, last] = self._snapshot(nodes, copy=False)
            with self._trace.span("checkpoint", "checkpoint", last):
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
            self._team.report(error)  # the main thread may be waiting for a rank that waits for this thread

    def _may_begin(self, floor: int) -> bool:
        """Whether a lane that may lead by some iterations may go on, the last one it waits for being `floor`."""
        return self._values.completed >= floor or self._stop_after is not None

    def _iterations(self, lane: str, lead: int | None = None) -> Iterator[int]:
        """The iterations a lane still has to run: until the end, or the last one that any lane had begun when a stop was asked for."""
        for iteration in range(self._start, self.settings.iterations):
            if lead is not None:
                self._values.wait_until(partial(self._may_begin, iteration - lead))
            if lead is None:
                self._agree_to_stop()
            with self._values.changed:
                while self._agreeing and self._stop_after is None:
                    self._values.pause()
                self._values.check()
                if self._stop and self._stop_after is None and self._team.ranks.world == 1:
                    self._stop_after = max(self._started.values(), default=self._start - 1)
                    self._values.changed.notify_all()
                if self._stop_after is not None and iteration > self._stop_after:
                    return
                self._started[lane] = iteration
            yield iteration

    def _agreed_stop(self) -> Status | None:
        """The reason to stop that any rank has seen."""
        return STOPS[self._team.most(STOPS.index(self._stop))]

    def _agree_to_stop(self) -> None:
        """Once per iteration, in the main lane: when any rank was told to stop, all stop after the same iteration."""
        if self._team.ranks.world == 1 or self._stop_after is not None:
            return
        with self._trace.waiting("other ranks"):
            stop = self._agreed_stop()
        if stop is None:
            return
        with self._values.changed:
            self._stop = stop
            self._agreeing = True  # no lane begins another iteration
            begun = max(self._started.values(), default=self._start - 1)
        last = self._team.most(begun)
        with self._values.changed:
            self._stop_after = last
            self._values.changed.notify_all()

    def _post(self, lane: str, nodes: list[Node], iteration: int) -> None:
        """Runs a lane's nodes for one iteration, and snapshots them where a checkpoint is due."""
        begin, waited = perf_counter(), self._values.waited()
        report = LaneReport()
        for node in nodes:
            with self._trace.waiting(f"inputs of {node.name}", iteration):
                inputs = self._place.inputs(self._values, node, iteration)
            self.observer.node_started(node.name, iteration)
            outputs = self._runners[node.name].run(iteration, inputs)
            del inputs
            for output, value in outputs.items():
                if self._recorder and self._recorder.wants(node.name, output, iteration):
                    with self._trace.waiting(f"rows of {node.name}", iteration):  # of other ranks
                        recorded = self._place.recorded(node, value)
                    if self._place.first:
                        self._recorder.put(node.name, output, iteration, recorded)
                self._values.put(node.name, output, iteration, value)
            self._values.release(node, iteration)
            del outputs
        report.nodes = {node.name: self._runners[node.name].harvest() for node in nodes}
        report.waited = self._values.waited() - waited
        report.overhead = perf_counter() - begin - report.waited - sum(r.seconds for r in report.nodes.values())
        snapshot = self._snapshot(nodes, copy=lane == "generation") if self._is_checkpoint(iteration) else None
        self._light[lane, iteration] = self._snapshot([n for n in nodes if n.placement != "collective"], copy=True)
        self._light.pop((lane, iteration - self.graph.max_delay - 3), None)  # no lane is further ahead of another
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
        found = {name: report for r in reports.values() for name, report in r.nodes.items()}
        busy = NodeReport({f"utilisation/{role}": share for role, share in self._trace.shares().items()})
        with self._trace.waiting("reports of other ranks", iteration):
            by_node = self._place.merge(found | {"utilisation": busy})
        metrics = dict(by_node["utilisation"].metrics)
        for node in self._place.nodes:
            metrics.update(by_node[node.name].metrics)
            self._reject(by_node[node.name].rejected)
        metrics.update(self._carried)
        if len(lanes) > 1:
            metrics.update({f"seconds/waiting_{lane}": r.waited for lane, r in reports.items()})
        metrics["seconds/executor"] = sum(r.overhead for r in reports.values()) + metrics.pop("seconds/logging", 0.0)
        cpu = process_time()
        metrics["seconds/iteration"], metrics["seconds/cpu"] = begin - self._mark, cpu - self._cpu_mark
        self._mark, self._cpu_mark = begin, cpu
        with self._trace.span("logging", "recording", iteration):
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
        groups = self._place.states({g: s for lane in lanes for g, s in self._snapshots.pop((lane, iteration)).items()})
        groups |= self._place.in_flight(self._values.in_flight(iteration))
        if not self._place.first:
            self._save_shards(self._checkpoints.aside(iteration) / SHARDS)
            self._saved = iteration
            return
        if self._recorder:
            self._recorder.flush()
        self._sinks.sync()
        if self._rejected:
            self._rejected.sync()
        sharded = any(runner.has_shards for runner in self._runners.values())
        self._checkpoints.save(iteration, dict(sorted(groups.items())), self._save_shards if sharded else None)
        self._saved = iteration
        self._carried["seconds/checkpoint"] = perf_counter() - begin

    def _save_finished(self) -> None:
        """Saves the state after the last finished iteration, where a loss ends the run before the learner has gone beyond it."""
        last = self._values.completed
        collective = [n for n in self.graph.nodes if n.placement == "collective"]
        beyond = any(self._runners[n.name].context.iteration != last for n in collective)
        if self._team.ranks.world > 1 or last <= self._saved or beyond:
            return  # the newest checkpoint stands
        lanes = [lane for lane, iteration in self._light if iteration == last]
        for lane in lanes:
            self._snapshots[lane, last] = self._light[lane, last]
        self._snapshots[lanes[0], last] |= self._snapshot(collective, copy=False)
        self._values.error = None  # both lanes have ended
        self._checkpoint(last, lanes)
        logger.warning("iteration %d, the last finished one, is checkpointed.", last)

    def _save_shards(self, folder: Path) -> None:
        """Every rank writes its parts, between the making of the folder and the manifest."""
        sharded = [runner for runner in self._runners.values() if runner.has_shards]
        if sharded:
            self._team.barrier()
            for runner in sharded:
                runner.save_shards(folder)
            self._team.barrier()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGUSR1 end the run after the iteration; a second Ctrl-C ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and self._stop == "interrupted":
                raise KeyboardInterrupt
            self._stop = SIGNALS[number]
            logger.warning(
                "%s: finishing this iteration and saving; %s.", signal.Signals(number).name, AGAIN[self._stop]
            )

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
