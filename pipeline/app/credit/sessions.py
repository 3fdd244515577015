"""Runs the part of a recipe's graph that makes credit: from prompts to the inputs of the learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, cast

import torch

from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Sampling, Scores, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Prompts, Rewards, Trajectories, Weights
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.session import GraphSession


class NoPolicy(Policy):
    """The policy of a run that has none: its rollouts were imported. Whatever is asked of it is a RunError."""

    version = 0

    @property
    def tokenizer(self) -> Any:
        """Raises RunError."""
        raise RunError(
            "it samples or scores texts, and this run has no policy: its rollouts were imported. Choose a recipe whose "
            "credit needs the rollouts alone."
        )

    def generate(self, requests: Requests) -> Completions:
        """Raises RunError."""
        return cast(Completions, self.tokenizer)

    def score(self, context: Jagged, tokens: Jagged, temperature: float = 1.0, top: int = 0) -> Scores:
        """Raises RunError."""
        return cast(Scores, self.tokenizer)


class RecordedVerdicts(Verifier):
    """Rewards that are known, by uid."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """The recorded reward of each row; raises RunError for a row without one, which a node has sampled."""
        place = {uid: i for i, uid in enumerate(self._rewards.uid.tolist())}
        rows = [place.get(uid, -1) for uid in trajectories.uid.tolist()]
        if -1 in rows:
            raise RunError(
                f"it samples, and nothing here verifies what it sampled: of {len(rows)} responses {rows.count(-1)} "
                "have no recorded reward. Choose a recipe that samples nothing, or see `creditgraph values`."
            )
        return self._rewards.select(torch.tensor(rows, dtype=torch.int64))


class CreditRun(GraphSession):
    """One run of the nodes that the learner's inputs need.

    Policy and verifier exist within the `with` block.

    Args:
        experiment: the recipe.
        seed: key of every random stream.
        weights: value of the delayed wires that carry `Weights`; other delayed wires carry their producer's initial
            value. Without it a delayed wire is an error.
        iteration: the iteration to run.
        shared: node → outputs that are used instead of running it.
        uids_from_top: numbers the nodes from the largest index down, so that the outputs may be passed to other graphs
            without sharing their uids.

    Attributes:
        trajectories, credit: the inputs of the learner, available inside the `with` block.
        learner: the node that reads the credit.
    """

    trajectories: Trajectories
    credit: Credit

    def __init__(
        self,
        experiment: Experiment,
        seed: int,
        weights: Weights | None = None,
        *,
        iteration: int = 0,
        shared: Mapping[str, Mapping[str, Any]] | None = None,
        uids_from_top: bool = False,
    ) -> None:
        super().__init__(experiment, seed=seed, weights=weights, uids_from_top=uids_from_top)
        self.iteration = iteration
        self.learner = learner_of(self.graph)
        self.shared = dict(shared or {})
        for name, values in self.shared.items():
            self.give(name, iteration, values)

    def __enter__(self) -> Self:
        try:
            self.trajectories = self.value(self.learner.wires["trajectories"][0], self.iteration)
            self.credit = self.value(self.learner.wires["credit"][0], self.iteration)
        except BaseException:
            self.close()  # an error in __enter__ calls no __exit__
            raise
        return self

    def supply(self, wire: Wire, iteration: int) -> Any:
        """Returns a value of this iteration, or an initial one, as there is no earlier iteration."""
        if wire.delay and self._weights is None:
            raise ConfigError(f"{wire} is of an earlier iteration, which these rollouts do not have.")
        return super().supply(wire, iteration)

    def logged(self, metric: str) -> float:
        """Sum of a metric over all nodes that ran, engines left out."""
        nodes = [runner for runner in self._runners.values() if not runner.node.outputs_of(Policy)]
        return sum(runner.context.metrics.get(metric, 0.0) for runner in nodes)


def learner_of(graph: Graph) -> Node:
    """The node that reads trajectories and their credit; raises ConfigError unless there is exactly one."""
    learners = graph.learners
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
    """Sampling of the rollouts of a graph: the settings of its first node that samples any."""
    for node in graph.nodes:
        if samples_rollouts(node) and hasattr(node.config, "sampling"):
            return cast(Sampling, node.config.sampling())
    raise ConfigError(f"no node of the graph ({', '.join(graph.names)}) says how its rollouts are sampled.")
