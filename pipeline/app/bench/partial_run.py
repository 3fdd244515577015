"""Runs the nodes of a graph that some of its outputs need, once and without an executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from pipeline.core.component import Context
from pipeline.core.errors import ConfigError
from pipeline.core.graph import MAX_NODES
from pipeline.core.payloads import Policy, Weights
from pipeline.core.sockets import Node, Wire
from pipeline.run.compose import Experiment
from pipeline.run.node_runner import NodeRunner, set_origin
from pipeline.run.run_settings import resolve_device
from pipeline.run.values import as_inputs

COUNTED = ("sampled_tokens", "prefill_tokens", "scored_tokens")


@dataclass
class Cost:
    """What a node cost in tokens, as engines count them, and in seconds of wall time.

    Attributes:
        sampled_tokens: drawn.
        prefill_tokens: of prompts and prefixes, before the first drawn token.
        scored_tokens: of teacher-forced passes, context included.
    """

    sampled_tokens: float = 0.0
    prefill_tokens: float = 0.0
    scored_tokens: float = 0.0
    seconds: float = 0.0

    @property
    def processed(self) -> float:
        """Tokens that went through the model."""
        return self.sampled_tokens + self.prefill_tokens + self.scored_tokens

    def __add__(self, other: Cost) -> Cost:
        return Cost(**{k: v + getattr(other, k) for k, v in vars(self).items()})


class PartialRun:
    """Builds and runs nodes when a value of theirs is read; leaving the `with` block closes them.

    Args:
        experiment: graph, model and data.
        seed: key of every random stream.
        iteration: the iteration that is run.
        outputs: node → outputs that are used in place of running it.
        weights: value of the delayed wires that carry `Weights`; other delayed wires carry their producer's initial
            value. Without it a delayed wire is an error.
        uids_from_top: numbers the nodes from the largest index down, so that their uids never meet those of another
            graph that gets some of their outputs.

    Attributes:
        outputs: node → outputs, of the nodes that ran and of those that were not run.
        costs: node → cost, of the nodes that ran.
    """

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        iteration: int = 0,
        outputs: Mapping[str, Mapping[str, Any]] | None = None,
        weights: Weights | None = None,
        uids_from_top: bool = False,
    ) -> None:
        self.experiment = experiment
        self.graph = experiment.graph
        self.outputs: dict[str, dict[str, Any]] = {name: dict(values) for name, values in (outputs or {}).items()}
        self.costs: dict[str, Cost] = {}
        self._seed = seed
        self._iteration = iteration
        self._weights = weights
        self._uids_from_top = uids_from_top
        self._runners: dict[str, NodeRunner] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self._runners.values():
            runner.close()

    def value(self, wire: Wire) -> Any:
        """What a wire carries; its node runs first where that is needed."""
        if wire.delay:
            return self._earlier(wire)
        if wire.output not in self.outputs.get(wire.source, {}):
            self._run(self.graph[wire.source])
        return self.outputs[wire.source][wire.output]

    def logged(self, *endings: str) -> float:
        """Sum of the metrics whose names end so, over all nodes that ran."""
        metrics = [runner.context.metrics for runner in self._runners.values()]
        return sum(value for logged in metrics for name, value in logged.items() if name.endswith(endings))

    def _earlier(self, wire: Wire) -> Any:
        # There is no iteration before this one: delayed wires carry what the first iteration of a run would read.
        if self._weights is None:
            raise ConfigError(f"{wire} is of an earlier iteration, which these rollouts do not have.")
        source = self.graph[wire.source]
        if source.sockets.outputs[wire.output].carries(Weights):
            return self._weights
        return set_origin(self._runner(source).initial()[wire.output], f"{wire.source}.{wire.output}")

    def _run(self, node: Node) -> None:
        inputs = {socket: [self.value(w) for w in wires] for socket, wires in node.wires.items()}
        runner = self._runner(node)
        # Inputs exist by now, so the engines count for this node alone until it returns.
        before = self._engine_counters()
        begin = perf_counter()
        outputs = runner.run(self._iteration, as_inputs(node, inputs))
        seconds = perf_counter() - begin
        spent = {name: count - before[name] for name, count in self._engine_counters().items()}
        self.outputs.setdefault(node.name, {}).update(outputs)
        self.costs[node.name] = Cost(**spent, seconds=seconds)

    def _runner(self, node: Node) -> NodeRunner:
        if node.name in self._runners:
            return self._runners[node.name]
        index = self.graph.names.index(node.name)
        context = Context(
            node=node.name,
            node_index=MAX_NODES - 1 - index if self._uids_from_top else index,
            seed=self._seed,
            iterations=self.experiment.run.iterations,
            device=resolve_device(self.experiment.run.device),
            model=self.experiment.model,
            data=self.experiment.data,
        )
        runner = NodeRunner(node, context)
        self._runners[node.name] = runner
        runner.setup()
        return runner

    def _engine_counters(self) -> dict[str, float]:
        """Tokens that all engines have counted so far."""
        engines = [runner for runner in self._runners.values() if runner.node.outputs_of(Policy)]
        return {name: sum(runner.context.metrics.get(name, 0.0) for runner in engines) for name in COUNTED}
