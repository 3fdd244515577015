"""The costs of a recipe's credit, node by node, and the outputs that several recipes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from creditgraph.components.rollouts.episodes import EpisodePlayer
from creditgraph.pipeline.app.credit.sessions import CreditRun, samples_rollouts
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Turns, Weights
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.experiment import Experiment

COUNTED = ("sampled_tokens", "prefill_tokens", "scored_tokens")


@dataclass
class Cost:
    """Cost of a node in tokens, as engines count them, and in seconds of wall time.

    Attributes:
        sampled_tokens: sampled tokens.
        prefill_tokens: tokens of prompts and prefixes, before the first sampled token.
        scored_tokens: tokens of teacher-forced passes, context included.
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


class MeasuredRun(CreditRun):
    """A `CreditRun` that measures what each of its nodes costs.

    Args:
        experiment, seed, weights, shared: as of `CreditRun`.
        shared_costs: node → its cost, of those whose outputs are `shared`.
        uids_from_top: numbers the nodes from the largest index down, so that the outputs may be passed to other graphs
            without sharing their uids.

    Attributes:
        costs: node → cost.
    """

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        weights: Weights | None = None,
        *,
        shared: Mapping[str, Mapping[str, Any]] | None = None,
        shared_costs: Mapping[str, Cost] | None = None,
        uids_from_top: bool = False,
    ) -> None:
        super().__init__(experiment, seed, weights, shared=shared, uids_from_top=uids_from_top)
        self.costs = dict(shared_costs or {})

    @property
    def by_node(self) -> dict[str, dict[str, Any]]:
        """Node → its outputs, in graph order; nodes that were not needed are left out."""
        outputs = {node.name: self.outputs(node.name, self.iteration) for node in self.graph.nodes}
        return {name: values for name, values in outputs.items() if values}

    @property
    def rollouts(self) -> list[str]:
        """Names of the needed nodes that sample rollouts, in an output `trajectories`.

        Trajectories under another name, such as the revisions of `reviser.compare`, are a cost of the credit.
        """
        nodes = [self.graph[name] for name in self.by_node]
        return [n.name for n in nodes if samples_rollouts(n) and "trajectories" in n.outputs_of(Trajectories)]

    @property
    def turns(self) -> Turns | None:
        """Which turns the trajectories are; None where they are whole responses."""
        source = self.graph[self.learner.wires["trajectories"][0].source]
        names = source.outputs_of(Turns)
        return cast(Turns, self.value(Wire(source.name, names[0]), self.iteration)) if names else None

    @property
    def player(self) -> EpisodePlayer:
        """The component that played the first episodes, with which others can be played."""
        return next(r.component for r in self._runners.values() if isinstance(r.component, EpisodePlayer))

    @property
    def own_rollouts(self) -> bool:
        """Whether any trajectory was sampled by this graph."""
        return any(name not in self.shared for name in self.rollouts)

    def cost(self, rollouts: bool) -> Cost:
        """Summed cost of the nodes that sample trajectories, or of all others."""
        names = self.rollouts
        return sum((cost for name, cost in self.costs.items() if (name in names) == rollouts), Cost())

    def first(self, kind: type) -> Any:
        """Returns the first output of a kind in graph order, such as the `Policy` or the `Verifier`."""
        for outputs in self.by_node.values():
            for value in outputs.values():
                if isinstance(value, kind):
                    return value
        raise ConfigError(f"the graph has no {kind.__name__}; expected one, to measure its credit.")

    def run(self, node: Node, iteration: int) -> dict[str, Any]:
        """Runs one node, and measures it."""
        self.runner(node)
        self.inputs(node, iteration)
        # Component and inputs exist now, so the engines count only for this node until it returns.
        before = self._engine_counters()
        begin = perf_counter()
        outputs = super().run(node, iteration)
        seconds = perf_counter() - begin
        spent = {name: count - before[name] for name, count in self._engine_counters().items()}
        self.costs[node.name] = Cost(**spent, seconds=seconds)
        return outputs

    def _engine_counters(self) -> dict[str, float]:
        """Tokens that all engines have counted so far."""
        engines = [runner for runner in self._runners.values() if runner.node.outputs_of(Policy)]
        return {name: sum(runner.context.metrics.get(name, 0.0) for runner in engines) for name in COUNTED}


def shared_outputs(graph: Graph, run: MeasuredRun) -> dict[str, dict[str, Any]]:
    """Outputs of `run` that replace nodes of `graph`: its prompts, and rollouts sampled alike.

    Prompts are always taken over, so that every method gets the same problems; a sampler only when component, settings
    and wires are the same, and so is its environment.
    """
    shared = {}
    reference = run.graph
    for name, outputs in run.by_node.items():
        if name not in graph or graph[name].use != reference[name].use:
            continue
        # Only a source of prompts: a node with inputs would return prompts that depend on another graph.
        prompts = any(isinstance(v, Prompts) for v in outputs.values()) and not graph[name].wires
        wires = graph[name].wires
        same = graph[name].config == reference[name].config and wires == reference[name].wires
        sources = {wire.source for wires in wires.values() for wire in wires} if same else set()
        worlds = [source for source in sources if graph[source].outputs_of(Environments)]
        same = same and all((graph[w].use, graph[w].config) == (reference[w].use, reference[w].config) for w in worlds)
        if prompts or (same and name in run.rollouts):
            shared[name] = outputs
    return shared
