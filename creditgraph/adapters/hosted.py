"""A session of a graph whose sampler, rewards, prompts, policy and critic are another trainer's.

A graph that makes its rows itself, by resets, trees or revisions, gets prompts and policy alone. What is sampled here
is verified by the trainer's verifier, if it has one, and else by the graph's own.
"""

from __future__ import annotations

from typing import Any

import torch

from creditgraph.adapters.rows import Rollouts, Spans
from creditgraph.pipeline.app.credit.sessions import samples_rollouts
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, SegmentValues, Trajectories, Turns
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.session import GraphSession

CRITIC = "value.critic"
# Kinds of values that a trainer gives, whatever node of the graph makes them in a run.
GIVEN = (Trajectories, Rewards, Prompts, Turns, Policy)
GIVEN_ROWLESS = (Prompts, Policy)


class HostedSession(GraphSession):
    """A session of which a trainer gives a part.

    Attributes:
        gives: kinds of values that the trainer gives.
    """

    gives: tuple[type, ...] = GIVEN
    host: dict[type, Any]
    batch: tuple[Rollouts, Spans]

    def begin(self, host: dict[type, Any], batch: tuple[Rollouts, Spans] | None = None) -> None:
        """Forgets the last batch; `batch` are the trainer's rollouts and their spans, if the graph reads any."""
        self.host = host
        if batch is not None:
            self.batch = batch
        self._values.clear()
        for runner in self._all_runners:
            runner.context.metrics.clear()

    def supply(self, wire: Wire, iteration: int) -> Any:
        """What the trainer gives, or the output of a node."""
        kind = given(self.graph[wire.source], wire.output, self.gives)
        if kind is None:
            return super().supply(wire, iteration)
        if kind is SegmentValues:
            return self._values_of_critic(self.graph[wire.source], iteration)
        if self.host.get(kind) is None:
            raise ConfigError(needed(f"node '{wire.source}'", kind))
        return self.host[kind]

    def _values_of_critic(self, node: Node, iteration: int) -> SegmentValues:
        """The critic's value at the start of each segment or turn; the last one of a row, which none reads, is 0."""
        rows = self.value((node.wires.get("segments") or node.wires["turns"])[0], iteration)
        rollouts, spans = self.batch
        assert rollouts.values is not None  # checked before the first node ran
        tokens = spans.gather(rollouts.values.float())
        ends = rows.ends.to_lists() if "segments" in node.wires else [[n] for n in tokens.lengths.tolist()]
        starts = Jagged.from_rows([[0, *row] for row in ends], torch.int64)
        padded = torch.cat([tokens.values, torch.zeros(1)])
        at = starts.values + tokens.offsets[:-1][starts.row_ids]
        last = starts.values == tokens.lengths[starts.row_ids]
        return SegmentValues(uid=rows.uid, values=starts.with_values(padded[at].where(~last, 0.0)))

    @property
    def logged(self) -> dict[str, float]:
        """ "node/metric" → number, of the nodes that ran."""
        runners = self._runners.items()
        return {f"{name}/{metric}": x for name, r in runners for metric, x in r.context.metrics.items()}


def given(node: Node, output: str, gives: tuple[type, ...]) -> type | None:
    """The kind of value that a trainer gives in place of this output; None where the node runs."""
    socket = node.sockets.outputs[output]
    if Trajectories not in gives and any(other.carries(Prompts) for other in node.sockets.inputs.values()):
        # Prompts that a node has from another one are a choice of its own.
        gives = tuple(kind for kind in gives if kind is not Prompts)
    if node.use == CRITIC and socket.carries(SegmentValues):
        return SegmentValues
    kinds = (kind for kind in gives if kind is not Trajectories or samples_rollouts(node))
    return next((kind for kind in kinds if socket.carries(kind)), None)


def given_kinds(graph: Graph, node: Node, gives: tuple[type, ...]) -> set[type | None]:
    """Kinds of values that a node reads and a trainer gives."""
    return {given(graph[w.source], w.output, gives) for wires in node.wires.values() for w in wires}


def running(graph: Graph, learner: Node, gives: tuple[type, ...]) -> tuple[str, ...]:
    """Names of the nodes that the learner's credit, and rows of the graph's own, need and that no trainer replaces."""
    wanted: set[str] = set()
    queue = [*learner.wires["credit"], *(() if Trajectories in gives else learner.wires["trajectories"])]
    while queue:
        wire = queue.pop()
        node = graph[wire.source]
        kind = given(node, wire.output, gives)
        if kind is SegmentValues:
            queue += node.wires.get("segments", [])
        if kind is None and node.name not in wanted:
            wanted.add(node.name)
            queue += [w for wires in node.wires.values() for w in wires]
    return tuple(node.name for node in graph.nodes if node.name in wanted)


def needed(place: str, kind: type) -> str:
    """The sentence on a kind of value that is not there, and where there is one."""
    if kind is Policy:
        return (
            f"{place} asks the policy; name a server that has its weights by --endpoint=URL, or train with "
            " CreditGRPOTrainer of creditgraph.adapters.trl, whose own model does that."
        )
    return f"{place} needs a {kind.__name__}, which no other trainer gives. Train it with `creditgraph train`."
