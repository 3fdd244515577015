"""Runs the nodes of a graph that some of its outputs need, once, and counts what each costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.core.handles import Policy
from pipeline.core.payloads import Weights
from pipeline.core.sockets import Node, Wire
from pipeline.run.compose import Experiment
from pipeline.run.session import GraphSession

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


class PartialRun(GraphSession):
    """A session of one iteration that measures its nodes.

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
        super().__init__(experiment, seed=seed, weights=weights, uids_from_top=uids_from_top)
        self.iteration = iteration
        self.costs: dict[str, Cost] = {}
        for name, values in (outputs or {}).items():
            self.give(name, iteration, values)

    def supply(self, wire: Wire, iteration: int) -> Any:
        """A value of this iteration, or an initial one: there is no iteration before."""
        if wire.delay and self._weights is None:
            raise ConfigError(f"{wire} is of an earlier iteration, which these rollouts do not have.")
        return super().supply(wire, iteration)

    def run(self, node: Node, iteration: int) -> dict[str, Any]:
        """Runs one node, and measures it."""
        self.runner(node)
        self.inputs(node, iteration)
        # Component and inputs exist by now, so the engines count for this node alone until it returns.
        before = self._engine_counters()
        begin = perf_counter()
        outputs = super().run(node, iteration)
        seconds = perf_counter() - begin
        spent = {name: count - before[name] for name, count in self._engine_counters().items()}
        self.costs[node.name] = Cost(**spent, seconds=seconds)
        return outputs

    def logged(self, *endings: str) -> float:
        """Sum of the metrics whose names end so, over all nodes that ran."""
        metrics = [runner.context.metrics for runner in self._runners.values()]
        return sum(value for logged in metrics for name, value in logged.items() if name.endswith(endings))

    def _engine_counters(self) -> dict[str, float]:
        """Tokens that all engines have counted so far."""
        engines = [runner for runner in self._runners.values() if runner.node.outputs_of(Policy)]
        return {name: sum(runner.context.metrics.get(name, 0.0) for runner in engines) for name in COUNTED}
