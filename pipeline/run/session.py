"""Runs part of a graph outside a run; the base of replay, `creditgraph credit` and creditbench."""

import dataclasses
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.graph import MAX_NODES
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.node_runner import NodeRunner, initial_value
from creditgraph.pipeline.run.run_settings import resolve_device
from creditgraph.pipeline.run.values import as_inputs

Tagged = tuple[str, str, int]  # node, output, iteration


class GraphSession:
    """Nodes of one graph, built when one of their values is requested, and run on the values of their wires.

        with GraphSession(experiment, weights=weights) as session:
            credit = session.value(Wire("advantage", "credit"), iteration=0)

    Subclasses override `supply` to provide values that this session does not compute.

    Args:
        experiment: the graph, and the run, model and data sections.
        seed: key of every random stream; by default the experiment's.
        weights: value of every delayed `Weights` wire; by default the learner's initial weights.
        uids_from_top: numbers nodes from the highest index down, so that the rows of this session can be passed to
            another session of a similar graph without sharing a uid with its rows.

    Attributes:
        graph: graph of the experiment.
        iterations: planned length of the run, as the nodes see it.
        notes: differences from the run, as sentences for the user.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        seed: int | None = None,
        weights: Weights | None = None,
        uids_from_top: bool = False,
    ) -> None:
        self.experiment = experiment
        self.graph = experiment.graph
        self.notes: list[str] = []
        self.iterations = experiment.run.iterations
        self._seed = experiment.run.seed if seed is None else seed
        self._weights = weights
        self._uids_from_top = uids_from_top
        self._values: dict[Tagged, Any] = {}
        self._runners: dict[str, NodeRunner] = {}
        self._all_runners: list[NodeRunner] = []

    def give(self, node: str, iteration: int, outputs: Mapping[str, Any]) -> None:
        """Sets the outputs of a node, which is then not run."""
        self._values.update({(node, output, iteration): value for output, value in outputs.items()})

    def outputs(self, node: str, iteration: int) -> dict[str, Any]:
        """Returns the outputs of a node that are known so far."""
        return {o: v for (name, o, tag), v in self._values.items() if (name, tag) == (node, iteration)}

    def value(self, wire: Wire, iteration: int) -> Any:
        """Returns the value of a wire in an iteration; runs the nodes needed for it."""
        key = (wire.source, wire.output, iteration - wire.delay)
        if key not in self._values:
            self._values[key] = self.supply(wire, key[2])
        return self._values[key]

    def supply(self, wire: Wire, iteration: int) -> Any:
        """Computes a value that is not known yet: the initial one of a delayed wire, else the node's output."""
        if wire.delay:
            return self.initial(wire)
        return self.run(self.graph[wire.source], iteration)[wire.output]

    def initial(self, wire: Wire) -> Any:
        """The value of a wire before the first iteration."""
        node = self.graph[wire.source]
        if self._weights is not None and node.sockets.outputs[wire.output].carries(Weights):
            return self._weights
        return initial_value(node, self.runner(node).initial(), wire)

    def run(self, node: Node, iteration: int) -> dict[str, Any]:
        """Runs one node on what its wires carry; returns its outputs, which later values read."""
        inputs = self.inputs(node, iteration)
        outputs = self.runner(node).run(iteration, inputs)
        self.give(node.name, iteration, outputs)
        return outputs

    def inputs(self, node: Node, iteration: int) -> dict[str, Any]:
        """The keyword arguments of a node's `run`."""
        values = {socket: [self.value(w, iteration) for w in wires] for socket, wires in node.wires.items()}
        return as_inputs(node, values)

    def runner(self, node: Node) -> NodeRunner:
        """The node's component, built and set up once."""
        if node.name not in self._runners:
            self._runners[node.name] = self.start(node)
        return self._runners[node.name]

    def start(self, node: Node) -> NodeRunner:
        """A new component of a node, set up; closed with the session."""
        place = self.graph.names.index(node.name)
        context = Context(
            node=node.name,
            node_index=MAX_NODES - 1 - place if self._uids_from_top else place,
            seed=self._seed,
            iterations=self.iterations,
            device=resolve_device(self.experiment.run.device),
            model=self.experiment.model,
            data=self.experiment.data,
        )
        runner = NodeRunner(dataclasses.replace(node, config=node.cls.alone(node.config)), context)
        self._all_runners.append(runner)
        runner.setup()
        return runner

    def close(self) -> None:
        """Closes every component that was built."""
        for runner in self._all_runners:
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
