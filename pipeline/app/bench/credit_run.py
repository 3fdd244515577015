"""Runs the part of a recipe's graph that makes credit: from prompts to what the learner would read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pipeline.app.bench.partial_run import Cost, PartialRun
from pipeline.core.errors import ConfigError
from pipeline.core.graph import Graph
from pipeline.core.handles import Sampling
from pipeline.core.payloads import Credit, Prompts, Trajectories, Weights
from pipeline.core.sockets import Node
from pipeline.run.compose import Experiment


@dataclass
class CreditRun:
    """One batch on its way to the learner.

    Attributes:
        trajectories, credit: what the learner would read.
        outputs: node → its outputs, in graph order.
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
    learners = [n for n in graph.nodes if {"trajectories", "credit"} <= set(n.wires) and n.placement == "collective"]
    if len(learners) != 1:
        raise ConfigError(
            f"{len(learners)} nodes of the graph ({', '.join(graph.names)}) learn from 'trajectories' and 'credit'; "
            "expected exactly one, whose credit can be measured."
        )
    return learners[0]


def samples_rollouts(node: Node) -> bool:
    """Whether a node samples trajectories from a policy."""
    return bool(node.outputs_of(Trajectories)) and "policy" in node.wires


def sampling_of(graph: Graph) -> Sampling:
    """How the rollouts of a graph are sampled: the settings of its first node that samples any."""
    for node in graph.nodes:
        if samples_rollouts(node) and hasattr(node.config, "sampling"):
            return cast(Sampling, node.config.sampling())
    raise ConfigError(f"no node of the graph ({', '.join(graph.names)}) says how its rollouts are sampled.")


def first_of(run: CreditRun, kind: type) -> Any:
    """The first output of a kind in graph order, such as the `Policy` or the `Verifier`."""
    for outputs in run.outputs.values():
        for value in outputs.values():
            if isinstance(value, kind):
                return value
    raise ConfigError(f"the graph has no {kind.__name__}; expected one, to measure its credit.")


def shared_outputs(graph: Graph, reference: Graph, run: CreditRun) -> dict[str, dict[str, Any]]:
    """Outputs of `run` (of graph `reference`) that replace nodes of `graph`: its prompts, and rollouts sampled alike.

    Prompts are always taken over, so that every method gets the same problems; a sampler only when component, settings
    and wires are the same.
    """
    shared = {}
    for name, outputs in run.outputs.items():
        if name not in graph or graph[name].use != reference[name].use:
            continue
        # Only a source of prompts: a node that reads something would give prompts of another graph's making.
        prompts = any(isinstance(v, Prompts) for v in outputs.values()) and not graph[name].wires
        same = graph[name].config == reference[name].config and graph[name].wires == reference[name].wires
        if prompts or (same and name in run.rollouts):
            shared[name] = outputs
    return shared


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
        given: node → outputs that are used in place of running it, with `given_costs`.
        reference: numbers uids so that the outputs may be given to other graphs without meeting their uids.
    """
    given = given or {}
    learner = learner_of(experiment.graph)
    with PartialRun(experiment, seed, outputs=given, weights=weights, uids_from_top=reference) as partial:
        trajectories, credit = (partial.value(learner.wires[name][0], 0) for name in ("trajectories", "credit"))
        outputs = {n.name: partial.outputs(n.name, 0) for n in experiment.graph.nodes}
        nodes = [n for n in experiment.graph.nodes if outputs[n.name]]
        costs = {**(given_costs or {}), **partial.costs}
        yield CreditRun(
            trajectories=trajectories,
            credit=credit,
            outputs={n.name: outputs[n.name] for n in nodes},
            costs={n.name: costs[n.name] for n in nodes if n.name in costs},
            given=[n.name for n in nodes if n.name in given],
            rollouts=[n.name for n in nodes if n.use.partition(".")[0] in ("sampler", "expander")],
            learner=learner,
        )
