"""Runs a graph: iterations, two overlapping lanes, records, metrics, checkpoints, resume.

Every value carries the iteration it belongs to, and a wire declares which iteration it reads. So the graph fixes which
policy version samples which rollout; overlapping generation with learning changes when things are computed, never what.
A wire `@<=k` alone reads what is there, and schedule.py writes down what that was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time
from types import TracebackType
from typing import Any

from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, LostError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.checkpoint import SHARDS, Checkpoints
from creditgraph.pipeline.run.distributed.team import Team
from creditgraph.pipeline.run.metrics import JsonLines, Sink
from creditgraph.pipeline.run.node_runner import LaneReport, NodeReport, initial_value, lacking
from creditgraph.pipeline.run.placement import InFlight, RankView
from creditgraph.pipeline.run.recorder import Recorder
from creditgraph.pipeline.run.run_directory import METRICS, REJECTED, RunDirectory
from creditgraph.pipeline.run.run_settings import Observer, RunSettings
from creditgraph.pipeline.run.schedule import Schedule
from creditgraph.pipeline.run.snapshots import Snapshots
from creditgraph.pipeline.run.stops import Outcome, Stops
from creditgraph.pipeline.run.timeline.spans import Timeline
from creditgraph.pipeline.run.values import Stopped, Values, as_inputs

logger = logging.getLogger("creditgraph")


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
        run: run directory; None on ranks other than 0, and for a run that writes nothing.
        path: path of the run directory on ranks that do not have it open.
        sinks: further sinks for metrics; closed with the executor.
        observer: receives progress, for a display.
        team: the processes that run this graph together; each has its own executor.
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
        self.observer = observer or Observer()
        self._run = run
        self._sinks = list(sinks)
        self._logs: dict[str, JsonLines] = {}  # by file name, after `restore`, on the rank that writes
        self._team = team or Team()
        self._view = RankView(graph, self._team)
        ranks = self._team.ranks
        path = run.path if run else path
        self._team.folder = path
        self._trace = Timeline(path, settings.trace, ranks.rank, ranks.world)
        self._recorder = Recorder(path / "record", settings.record, graph, self._trace) if path else None
        self._schedule = Schedule(path, self._view.first, settings.schedule)
        self._values = Values(self._view.nodes, self._trace, self._schedule)
        self._stops = Stops(settings.iterations, self._values, self._team, self._trace)
        self._start = -1  # unknown before restore
        self._reports: dict[tuple[str, int], LaneReport] = {}
        self._carried: dict[str, float] = {}  # seconds that the next iteration logs
        self._overlaps = settings.overlap and graph.overlaps
        self._runners = self._view.runners(settings, model or ModelSpec(), data or {}, path, self._trace)
        self._snapshots = Snapshots(
            graph,
            self._runners,
            self._view,
            self._values,
            Checkpoints(path / "checkpoints", settings.checkpoint.keep) if path else None,
            settings.checkpoint,
        )

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
        """Continues from the newest valid checkpoint, if there is one; returns the number of completed iterations.

        Raises RunError when it lacks a state or a value in flight that this graph needs."""
        checkpoint = self._snapshots.newest_checkpoint()
        self._start = 0 if checkpoint is None else checkpoint.iteration + 1
        groups = checkpoint.groups if checkpoint else {}
        states = self._view.states_of(groups)
        self._schedule.restore(self._team.from_first)
        if checkpoint:
            for node in self._view.nodes:
                self._runners[node.name].refuse_missing(states, checkpoint.iteration)
        for name, state in states.items():
            if name in self._runners:
                self._runners[name].load(state)
            elif name not in self.graph:
                logger.warning("the checkpoint has a state of node '%s', which this graph lacks; it is ignored.", name)
        if checkpoint:
            for runner in self._runners.values():
                if runner.has_shards:
                    runner.load_shards(checkpoint.path / SHARDS)
                runner.harvest()  # drops what `setup` logged and rejected: the first start has already reported it
        self._seed_values(self._view.values_of(groups))
        if self._run:
            logs = checkpoint.logs if checkpoint else {}
            self._logs = {
                path.name: JsonLines(path, self._start - 1, logs.get(path.name))
                for path in (self._run.metrics_path, self._run.rejected_path)
            }
            if self._recorder:
                self._recorder.resume(self._start - 1, logs)
        # From here on the state is as if this attempt had run the earlier iterations.
        self._values.completed = self._start - 1
        self._snapshots.saved = self._start - 1
        return self._start

    def run(self) -> Outcome:
        """Runs the remaining iterations and the final evaluation pass; call `setup` and `restore` before."""
        if self._start < 0:
            raise RuntimeError(
                "Executor.run: call setup() and restore() first; restore() also sets the values that '@k' wires start "
                "from."
            )
        with self._stops.signals():
            try:
                self._run_lanes()
            except LostError:
                self._view.slots.recall()
                self._snapshots.save_finished(self._flush)
                raise
            reason = self._stops.agreed()
            if reason:
                return Outcome(reason, self._values.completed + 1)
            final = self.evaluate()
            if final:
                self._log(self.settings.iterations, final)
            return Outcome("finished", self._values.completed + 1, final)

    def evaluate(self) -> dict[str, float]:
        """Runs the nodes with `final_pass`, and those they depend on, on the latest values; returns their metrics.

        The iteration is the number of iterations of the run; `@k` wires carry their newest value.
        """
        self._view.slots.end()
        names = [n.name for n in self.graph.nodes if n.cls.final_pass]
        needed = self.graph.ancestors(names)
        outputs: dict[tuple[str, str], Any] = {}
        for node in self.graph.nodes:
            if node.name in needed and node.placement == "collective":
                raise ConfigError(
                    f"{node.name}: evaluating {', '.join(names)} would train it once more; read its output with '@1'."
                )
            if node.name not in needed or node.name not in self._runners:
                continue
            inputs = {
                socket: [self._values.latest(w) if w.delay else outputs[w.source, w.output] for w in wires]
                for socket, wires in node.wires.items()
            }
            self.observer.node_started(node.name, self.settings.iterations)
            returned = self._runners[node.name].run(self.settings.iterations, as_inputs(node, inputs))
            outputs.update({(node.name, output): value for output, value in returned.items()})
        reports = {n.name: self._runners[n.name].harvest() for n in self._view.nodes if n.name in needed}
        metrics: dict[str, float] = {}
        for report in self._view.merge(reports).values():
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
        self._schedule.close()
        for sink in [*self._logs.values(), *self._sinks]:
            sink.close()
        self._logs = {}

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            logger.warning("closing the run after an error: %s", second)  # must not hide the first one

    def _seed_values(self, in_flight: InFlight) -> None:
        """Values that '@k' wires read in the first iterations: from the checkpoint or made again, else initial ones."""
        initial: dict[str, dict[str, Any]] = {}
        restored = set(self._team.from_first(list(in_flight)))
        # Every rank computes the initial values of collective nodes, whether it reads them or not, because that may
        # be a collective operation.
        for (name, output), delay in Values(self.graph.nodes).delays.items():
            if name not in self._runners:
                continue
            for tag in range(self._start - delay, self._start):
                if (name, output, tag) in restored:
                    self._values.put(name, output, tag, in_flight.get((name, output, tag)))
                    continue
                if self._start > 0 and not (tag == self._start - 1 and output in self.graph[name].cls.remakes):
                    what = f"{name}.{output} of iteration {tag}, which a wire '@{delay}' of this graph reads"
                    raise lacking(self._start - 1, what)
                if name not in initial:
                    initial[name] = self._runners[name].initial()
                first = initial_value(self.graph[name], initial[name], Wire(name, output, delay))
                self._values.put(name, output, tag, first)

    def _run_lanes(self) -> None:
        lanes = self.graph.lanes
        if not self._overlaps:
            # The learner last: a node that runs after it would need the weights of before.
            self._main_lane("main", sorted(self._view.nodes, key=lambda n: lanes[n.name]), others=[])
            return
        generation = [n for n in self._view.nodes if lanes[n.name] == "generation"]
        learning = [n for n in self._view.nodes if lanes[n.name] == "learning"]
        # The learning lane runs in the main thread, because signals arrive there.
        thread = threading.Thread(target=self._generation_lane, args=(generation,), name="generation", daemon=True)
        thread.start()
        try:
            self._main_lane("learning", learning, others=["generation"])
        except KeyboardInterrupt as error:
            self._values.fail(error)  # not joined: the thread is a daemon, so an interrupt ends the process at once
            raise
        except BaseException as error:
            self._values.fail(error)
            thread.join()
            # The generation lane failed first, so its error is raised.
            if isinstance(error, Stopped) and self._values.error is not None:
                raise self._values.error from self._values.error.__cause__
            raise
        thread.join()

    def _main_lane(self, lane: str, nodes: list[Node], others: list[str]) -> None:
        lanes = [lane, *others]
        self._mark = perf_counter()
        self._cpu_mark = process_time()
        self._trace.shares()  # the first call starts the measurement
        for iteration in self._stops.iterations(lane, self._start):
            self._run_nodes(lane, nodes, iteration)
            self._complete(iteration, lanes)
            if self._snapshots.is_due(iteration):
                self._checkpoint(iteration, lanes)
            elif self._recorder:
                self._recorder.pack(iteration)
            self._snapshots.poll()
            self._values.complete(iteration)
        last = self._values.completed
        if last > self._snapshots.saved:
            self._snapshots.take_last(lane, nodes, last)
            self._checkpoint(last, lanes)
        self._snapshots.finish()

    def _generation_lane(self, nodes: list[Node]) -> None:
        lane = "generation"
        try:
            last = self._start - 1
            for last in self._stops.iterations(lane, self._start, lead=max(1, self.graph.max_delay) + 1):
                self._run_nodes(lane, nodes, last)
            if last >= self._start:
                self._snapshots.take_last(lane, nodes, last)
        except Stopped:
            pass
        except BaseException as error:
            self._values.fail(error)
            self._team.report(error)  # the main thread may be waiting for a rank that waits for this thread

    def _run_nodes(self, lane: str, nodes: list[Node], iteration: int) -> None:
        """One iteration of a lane."""
        begin = perf_counter()
        self._view.slots.end()
        waited = self._values.waited()
        report = LaneReport()
        for node in nodes:
            self._run_node(node, iteration)
        report.nodes = {node.name: self._runners[node.name].harvest() for node in nodes}
        report.waited = self._values.waited() - waited
        report.overhead = perf_counter() - begin - report.waited - sum(r.seconds for r in report.nodes.values())
        self._snapshots.take(lane, nodes, iteration)
        with self._values.changed:
            self._reports[lane, iteration] = report
            self._values.changed.notify_all()

    def _run_node(self, node: Node, iteration: int) -> None:
        with self._trace.waiting(f"inputs of {node.name}", iteration, node=node.name):
            inputs = self._view.inputs(self._values, node, iteration)
        self.observer.node_started(node.name, iteration)
        outputs = self._runners[node.name].run(iteration, inputs)
        del inputs  # a batch without another reference is freed before the next node runs
        for output, value in outputs.items():
            if self._recorder and self._recorder.wants(node.name, output, iteration):
                with self._trace.waiting(f"rows of {node.name}", iteration, node=node.name):  # of other ranks
                    recorded = self._view.recorded(node, value)
                if self._view.first:
                    self._recorder.put(node.name, output, iteration, recorded)
            self._values.put(node.name, output, iteration, value)
        self._values.release(node, iteration)

    def _complete(self, iteration: int, lanes: list[str]) -> None:
        """Waits for the other lane's part of an iteration, then logs the metrics of both."""
        self._values.wait_until(lambda: all((lane, iteration) in self._reports for lane in lanes))
        begin = perf_counter()
        cpu = process_time()
        by_lane = {lane: self._reports.pop((lane, iteration)) for lane in lanes}
        by_node = {name: report for r in by_lane.values() for name, report in r.nodes.items()}
        busy = NodeReport({f"utilisation/{role}": share for role, share in self._trace.shares().items()})
        with self._trace.waiting("reports of other ranks", iteration):
            merged = self._view.merge(by_node | {"utilisation": busy})
        metrics = dict(merged["utilisation"].metrics)
        for node in self._view.nodes:
            metrics.update(merged[node.name].metrics)
            self._reject(merged[node.name].rejected)
        metrics.update(self._carried)
        if len(lanes) > 1:
            metrics.update({f"seconds/waiting_{lane}": r.waited for lane, r in by_lane.items()})
        metrics["seconds/executor"] = sum(r.overhead for r in by_lane.values()) + metrics.pop("seconds/logging", 0.0)
        metrics["seconds/iteration"] = begin - self._mark
        metrics["seconds/cpu"] = cpu - self._cpu_mark
        self._mark = begin
        self._cpu_mark = cpu
        with self._trace.span("logging", "recording", iteration):
            self._log(iteration, metrics)
        self._carried = {"seconds/logging": perf_counter() - begin}

    def _checkpoint(self, iteration: int, lanes: list[str]) -> None:
        with self._trace.span("checkpoint", "checkpoint", iteration):
            seconds = self._snapshots.save(iteration, lanes, self._flush)
        if self._view.first and seconds:
            self._carried["seconds/checkpoint"] = seconds

    def _flush(self, iteration: int) -> dict[str, dict[str, Any]]:
        """Makes records, metrics and rejected rows durable; returns the marks that a checkpoint keeps of them."""
        if self._recorder:
            self._recorder.flush(iteration)
        for sink in [*self._logs.values(), *self._sinks]:
            sink.sync()
        marks = {name: lines.mark() for name, lines in self._logs.items()}
        return marks | (self._recorder.marks() if self._recorder else {})

    def _log(self, iteration: int, metrics: dict[str, float]) -> None:
        if METRICS in self._logs:
            self._logs[METRICS].log(iteration, metrics)
        for sink in self._sinks:
            sink.log(iteration, metrics)
        self.observer.iteration_done(iteration, metrics)

    def _reject(self, rows: list[dict[str, Any]]) -> None:
        if rows and REJECTED in self._logs:
            self._logs[REJECTED].write(rows)
