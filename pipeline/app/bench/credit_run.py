"""Runs the part of a recipe's graph that makes credit: from prompts to what the learner would read, without learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pipeline.core.component import Context
from pipeline.core.errors import ConfigError
from pipeline.core.graph import MAX_NODES, Graph
from pipeline.core.payloads import Credit, Policy, Prompts, Trajectories, Weights
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


@dataclass
class CreditRun:
    """One batch on its way to the learner.

    Attributes:
        trajectories, credit: what the learner would read.
        outputs: node → its outputs.
        costs: node → what it cost.
        given: names of nodes that did not run because their outputs were given.
        rollouts: names of nodes that sample trajectories (uses sampler.* and expander.*).
        learner: the node that reads the credit.
    """

    trajectories: Trajectories
    credit: Credit
    outputs: dict[str, dict[str, Any]]
    costs: dict[str, Cost]
    given: list[str]
    rollouts: list[str]
    learner: Node

    def cost(self, rollouts: bool) -> Cost:
        """Summed cost of the nodes that sample trajectories, or of all others."""
        return sum((c for n, c in self.costs.items() if (n in self.rollouts) == rollouts), Cost())

    @property
    def own_rollouts(self) -> bool:
        """Whether any trajectory was sampled by this graph."""
        return any(n not in self.given for n in self.rollouts)


def learner_of(graph: Graph) -> Node:
    """The node that reads trajectories and their credit; raises ConfigError unless there is exactly one."""
    found = [n for n in graph.nodes if {"trajectories", "credit"} <= set(n.wires) and n.placement == "collective"]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} nodes of the graph ({', '.join(graph.names)}) learn from 'trajectories' and 'credit'; "
            "wanted one whose credit "
            "can be judged."
        )
    return found[0]


def first_of(run: CreditRun, kind: type) -> Any:
    """The first output of a kind in graph order, such as the `Policy` or the `Verifier`."""
    for outputs in run.outputs.values():
        for value in outputs.values():
            if isinstance(value, kind):
                return value
    raise ConfigError(f"the graph has no {kind.__name__}; wanted one, to judge its credit.")


def shared_outputs(graph: Graph, reference: Graph, run: CreditRun) -> dict[str, dict[str, Any]]:
    """Outputs of `run` (of graph `reference`) that stand in for nodes of `graph`: its prompts, and rollouts sampled in the same way.

    Prompts are always taken over, so that every method meets the same problems; a sampler only when component, settings
    and wires are the same.
    """
    found = {}
    for name, outputs in run.outputs.items():
        if name not in graph or graph[name].use != reference[name].use:
            continue
        prompts = any(isinstance(v, Prompts) for v in outputs.values()) and not graph[name].wires
        same = graph[name].config == reference[name].config and graph[name].wires == reference[name].wires
        if prompts or (same and name in run.rollouts):
            found[name] = outputs
    return found


@dataclass
class _Pass:
    """The nodes of one pass over a graph."""

    experiment: Experiment
    weights: Weights
    seed: int
    index_from_top: bool
    runners: dict[str, NodeRunner] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)

    def runner(self, node: Node) -> NodeRunner:
        if node.name not in self.runners:
            place = self.experiment.graph.names.index(node.name)
            context = Context(
                node=node.name,
                node_index=MAX_NODES - 1 - place if self.index_from_top else place,
                seed=self.seed,
                iterations=self.experiment.run.iterations,
                device=resolve_device(self.experiment.run.device),
                model=self.experiment.model,
                data=self.experiment.data,
            )
            self.runners[node.name] = NodeRunner(node, context)
            self.runners[node.name].setup()
        return self.runners[node.name]

    def value(self, wire: Wire) -> Any:
        """What a wire carries in the first iteration; weights are the given ones."""
        if not wire.delay:
            return self.outputs[wire.source][wire.output]
        node = self.experiment.graph[wire.source]
        if node.sockets.outputs[wire.output].carries(Weights):
            return self.weights
        return set_origin(self.runner(node).initial()[wire.output], f"{wire.source}.{wire.output}")

    def counters(self) -> Cost:
        """Tokens that all engines have counted so far."""
        total = Cost()
        for runner in self.runners.values():
            if runner.node.outputs_of(Policy):
                total += Cost(**{k: runner.context.metrics.get(k, 0.0) for k in COUNTED})
        return total

    def run(self, node: Node) -> None:
        runner = self.runner(node)
        inputs = {socket: [self.value(w) for w in wires] for socket, wires in node.wires.items()}
        before, begin = self.counters(), perf_counter()
        self.outputs[node.name] = runner.run(0, as_inputs(node, inputs))
        seconds, after = perf_counter() - begin, self.counters()
        spent = {k: getattr(after, k) - getattr(before, k) for k in COUNTED}
        self.costs[node.name] = Cost(**spent, seconds=seconds)


@contextmanager
def run_credit(
    experiment: Experiment,
    weights: Weights,
    seed: int,
    given: Mapping[str, dict[str, Any]] | None = None,
    given_costs: Mapping[str, Cost] | None = None,
    reference: bool = False,
) -> Iterator[CreditRun]:
    """Runs what the learner's inputs need, once; policy and verifier are alive within the `with` block.

    Args:
        experiment: the recipe.
        weights: the state of the policy.
        seed: key of every random stream.
        given: node → outputs that stand in for running it, with `given_costs`.
        reference: numbers uids so that outputs may stand in for nodes of other graphs without meeting their uids.
    """
    given = given or {}
    graph = experiment.graph
    learner = learner_of(graph)
    wires = {name: learner.wires[name][0] for name in ("trajectories", "credit")}
    state = _Pass(
        experiment, weights, seed, index_from_top=reference, outputs=dict(given), costs=dict(given_costs or {})
    )
    try:
        for node in graph.nodes:
            if node.name in _needed(graph, {w.source for w in wires.values()}, given):
                state.run(node)
        made = {k: v for k, v in state.outputs.items() if k in graph}
        yield CreditRun(
            trajectories=state.value(wires["trajectories"]),
            credit=state.value(wires["credit"]),
            outputs=made,
            costs={k: v for k, v in state.costs.items() if k in made},
            given=[n for n in given if n in graph],
            rollouts=[
                n.name for n in graph.nodes if n.name in made and n.use.partition(".")[0] in ("sampler", "expander")
            ],
            learner=learner,
        )
    finally:
        for runner in state.runners.values():
            runner.close()


def _needed(graph: Graph, targets: set[str], given: Mapping[str, Any]) -> set[str]:
    """Nodes that must run: ancestors of the targets within the iteration, not looking behind given ones."""
    found: set[str] = set()
    open_names = [t for t in targets if t not in given]
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += [w.source for _, w in graph[name].all_wires if not w.delay and w.source not in given]
    return found
