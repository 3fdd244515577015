"""Which nodes run on this rank, and how values, metrics and states of several replicas become one.

Batches stay with the replica that made them. Only where they are written, in records and in checkpoints that another
number of replicas continues, are those of all replicas concatenated in their order.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from creditgraph.pipeline.core.component import Context, ModelSpec, identity_exchange, identity_sum
from creditgraph.pipeline.core.encoding import Encoded, decode, encode
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.payloads import Batch, Payload, Weights
from creditgraph.pipeline.core.ranks import DeviceSlots
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.core.trace import Trace
from creditgraph.pipeline.run.distributed.team import Collectives, Team
from creditgraph.pipeline.run.distributed.wire_format import join
from creditgraph.pipeline.run.metrics import plain
from creditgraph.pipeline.run.node_runner import NodeReport, NodeRunner, set_origin
from creditgraph.pipeline.run.run_settings import RunSettings, resolve_device
from creditgraph.pipeline.run.values import Values, as_inputs

InFlight = dict[tuple[str, str, int], Any]


class RankView:
    """A graph as one rank of a team sees it.

    Attributes:
        nodes: those that run on this rank: all on a leader, collective ones elsewhere.
        first: whether this is rank 0, which alone writes the run directory.
        slots: which of learner and engines has the devices.
    """

    def __init__(self, graph: Graph, team: Team) -> None:
        self.graph = graph
        self.team = team
        self.ranks = team.ranks
        self.first = self.ranks.rank == 0
        self.nodes = tuple(n for n in graph.nodes if self.ranks.leader or n.placement == "collective")
        self.many = self.ranks.num_replicas > 1
        self._collectives = {name: team.collectives(name) for name in ("generation", "learning")}
        self._lane_of = graph.lanes
        self.slots = DeviceSlots()
        for node in graph.nodes:
            self._refuse_handles(node)

    def collectives(self, node: str) -> Collectives:
        """Communication of a node's lane."""
        return self._collectives[self._lane_of[node]]

    def runners(
        self, settings: RunSettings, model: ModelSpec, data: dict[str, dict[str, Any]], path: Path | None, trace: Trace
    ) -> dict[str, NodeRunner]:
        """Node → runner with its context, for the nodes of this rank."""
        ranks = self.ranks
        device = resolve_device(settings.device, ranks.local_rank if ranks.world > 1 else None)
        overlaps = settings.overlap and self.graph.overlaps
        late = {w.source for n in self.graph.nodes for _, w in n.all_wires if w.delay > 1}
        self.slots = self._slots(device, overlaps)
        runners = {}
        for index, node in enumerate(self.graph.nodes):
            if node not in self.nodes:
                continue
            context = Context(
                node=node.name,
                node_index=index,
                seed=settings.seed,
                iterations=settings.iterations,
                device=device,
                model=model,
                data=data,
                run_dir=path,
                ranks=ranks,
                all_sum=self.collectives(node.name).all_sum if self.many else identity_sum,
                exchange=self.collectives(node.name).exchange if self.many else identity_exchange,
                lockstep=not overlaps and node.name not in late,
                slots=self.slots,
                trace=trace,
            )
            runners[node.name] = NodeRunner(node, context)
        return runners

    def _slots(self, device: str, overlaps: bool) -> DeviceSlots:
        sharing = [n for n in self.graph.nodes if n.cls.shares_devices(n.config, device, self.ranks.world)]
        if sharing and overlaps:
            name = sharing[0].name
            raise ConfigError(
                f"{name}: expected a learner that waits while {name} samples, because they take turns on the same "
                "GPUs, got wires '@2' that let them work at the same time. Set run.overlap=false, give the servers "
                f"GPUs of their own, or set {name}.sleep=never."
            )
        return DeviceSlots(bool(sharing), self.team.barrier)

    def inputs(self, values: Values, node: Node, iteration: int) -> dict[str, Any]:
        """Returns the inputs of a node: its replica's values, on every rank of it that runs the node."""
        for wire in (wire for _, wire in node.all_wires if wire.newest):
            values.choose(wire, iteration, lambda tag: self._agreed(node, tag))
        if node.placement != "collective" or self.ranks.per_replica == 1:
            return values.gather(node, iteration)

        def remote(wire: Wire) -> bool:
            source = self.graph[wire.source]
            return source.placement == "replica" or source.sockets.outputs[wire.output].carries(Batch)

        # The leader alone has batches, and what replica nodes return; the rest is on every rank.
        local = values.read(node, iteration, lambda wire: not remote(wire))
        wires = [wire for _, wire in node.all_wires if remote(wire)]
        if wires:
            own = values.read(node, iteration, remote) if self.ranks.leader else {}
            received = self.collectives(node.name).from_leader([own[wire] for wire in wires] if own else [])
            for wire, value in zip(wires, received, strict=True):
                local[wire] = set_origin(value, f"{wire.source}.{wire.output}")
        return as_inputs(node, {socket: [local[w] for w in ws] for socket, ws in node.wires.items()})

    def _agreed(self, node: Node, tag: int) -> int:
        """The newest iteration whose value all replicas have; all their leaders run the node."""
        return min(self.collectives(node.name).among_leaders(tag)) if self.many else tag

    def recorded(self, node: Node, value: Any) -> Any:
        """Returns the value that rank 0 records: a batch of all replicas, else its own value. Every rank calls it."""
        alike = node.placement == "collective" and not _is_batch(value)
        if not self.many or not self.ranks.leader or alike or not _is_sendable(value):
            return value
        parts = self.collectives(node.name).to_first(value)
        return None if parts is None else set_origin(join(parts), value.origin)

    def merge(self, reports: dict[str, NodeReport]) -> dict[str, NodeReport]:
        """Returns, on rank 0, the reports merged with those of all replicas' `replica` nodes; elsewhere the argument.

        Every leader calls it.

        Counts are summed, seconds and memory are the largest of all replicas, and other numbers are averaged over the
        replicas that have them. A report that is no node's is merged too.
        """
        if not self.many or not self.ranks.leader:
            return reports
        mine = {n: r for n, r in reports.items() if n not in self.graph or self.graph[n].placement == "replica"}
        packed = {
            n: [{k: [v, 1] for k, v in r.metrics.items()}, plain(r.rejected), r.seconds, sorted(r.counts)]
            for n, r in mine.items()
        }
        folded = self._collectives["learning"].fold_to_first(packed, _fold)
        return reports if folded is None else reports | {name: _unpacked(*folded[name]) for name in mine}

    # Checkpoints

    def states(self, snapshots: Mapping[str, Encoded]) -> dict[str, Encoded]:
        """Returns, on rank 0, all replicas' states: "node.NAME", and "node.NAME@replica" where a replica's differs.

        Every leader calls it.
        """
        if not self.many or not self.ranks.leader:
            return dict(snapshots)
        mine = {g: s for g, s in snapshots.items() if self.graph[g.removeprefix("node.")].placement == "replica"}
        lane = self._collectives["learning"]
        # Most states are the same on all replicas; comparing digests is cheaper than sending the states.
        digests = lane.among_leaders({group: _digest(state) for group, state in mine.items()})
        odd = {group for group in mine for other in digests if other.get(group) != digests[0].get(group)}
        if not odd:
            return dict(snapshots)
        parts = lane.to_first({group: decode(state) for group, state in mine.items() if group in odd}) or []
        others = {f"{g}@{r}": encode(s, g) for r, part in enumerate(parts) if r for g, s in part.items()}
        return dict(snapshots) | others

    def in_flight(self, values: list[tuple[str, str, int, Any]], iteration: int) -> dict[str, Encoded]:
        """Returns, on rank 0, the values on `@k` wires: group "values", and "values@replica" for other replicas.

        Values that their node makes again are left out. Every leader calls it.
        """
        held = {
            (node, output, tag): value
            for node, output, tag, value in values
            if tag < iteration or output not in self.graph[node].cls.remakes
        }
        groups = {"values": encode(held, "values in flight", copy=False)}
        if not self.many or not self.ranks.leader:
            return groups
        own = {k: v for k, v in held.items() if self.graph[k[0]].placement == "replica" or _is_batch(v)}
        if not own:
            return groups
        parts = self._collectives["learning"].to_first(own) or []
        return groups | {
            f"values@{r}": encode(part, "values in flight", copy=False) for r, part in enumerate(parts) if r
        }

    def wants_group(self, group: str) -> bool:
        """Whether this rank reads a group of a checkpoint."""
        name, _, replica = group.partition("@")
        if name == "values":
            return self.ranks.leader or not replica
        node = name.removeprefix("node.")
        return node not in self.graph or self.ranks.leader or self.graph[node].placement == "collective"

    def states_of(self, groups: dict[str, Any]) -> dict[str, Any]:
        """Node → state for this replica."""
        own = {g.removeprefix("node."): s for g, s in groups.items() if g.startswith("node.") and "@" not in g}
        for name, state in own.items():
            if name in self.graph and self.graph[name].placement == "replica":
                others = [groups[f"node.{name}@{r}"] for r in range(1, len(groups)) if f"node.{name}@{r}" in groups]
                cls: Any = self.graph[name].cls
                own[name] = cls.state_for([state, *others], self.ranks.replica, self.ranks.num_replicas)
        return own

    def values_of(self, groups: dict[str, Any]) -> InFlight:
        """Values in flight for this replica.

        If the number of replicas has changed, the first one gets the batches of all, and the others get no rows.
        """
        held: InFlight = dict(groups.get("values", {}))
        others = [groups[f"values@{r}"] for r in range(1, len(groups)) if f"values@{r}" in groups]
        saved_replicas = 1 + len(others)
        for key, value in held.items():
            if key[0] not in self.graph or not (self.graph[key[0]].placement == "replica" or _is_batch(value)):
                continue
            parts = [value, *(o[key] for o in others)]
            if saved_replicas == self.ranks.num_replicas:
                held[key] = parts[self.ranks.replica]
            elif isinstance(value, Batch):
                whole = join(parts)
                held[key] = set_origin(whole if self.ranks.replica == 0 else whole.select(whole.uid[:0]), value.origin)
        return held

    def _refuse_handles(self, node: Node) -> None:
        if node.placement != "collective" or self.ranks.world == 1:
            return
        for socket, wire in node.all_wires:
            source = self.graph[wire.source]
            if source.placement == "replica" and source.sockets.outputs[wire.output].carries(Handle):
                raise ConfigError(
                    f"{node.name}.{socket}: wire '{wire}' brings a handle to a collective node, but handles cannot be "
                    "sent to "
                    f"{self.ranks.world} ranks; expected a batch. Run it as one process, or make the reader a replica "
                    "node."
                )


def _is_batch(value: Any) -> bool:
    return all(isinstance(v, Batch) for v in (value if isinstance(value, list) else [value]))


def _is_sendable(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(isinstance(v, Payload) and not isinstance(v, Handle | Weights) for v in items)


LARGEST = ("seconds/", "memory/")  # metrics of which the largest of several replicas counts


def _fold(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Reports of two groups of replicas as one.

    A report is [metric → [sum, or maximum of seconds and memory; number of replicas], rejected, seconds, counts].
    """
    merged = {}
    for node, (metrics, rejected, seconds, counts) in first.items():
        others, more, longer, further = second[node]
        both = dict(metrics)
        for name, (value, number) in others.items():
            mine = both.get(name)
            if mine is None:
                both[name] = [value, number]
            else:
                both[name] = [max(mine[0], value) if name.startswith(LARGEST) else mine[0] + value, mine[1] + number]
        merged[node] = [both, rejected + more, max(seconds, longer), sorted({*counts, *further})]
    return merged


def _unpacked(
    metrics: dict[str, list[float]], rejected: list[dict[str, Any]], seconds: float, counts: list[str]
) -> NodeReport:
    # A mean over the replicas that have the metric, not over all.
    known = set(counts)
    means = {
        k: value if k in known or k.startswith(LARGEST) else value / number for k, (value, number) in metrics.items()
    }
    return NodeReport(means, rejected, seconds, known)


def _digest(state: Encoded) -> str:
    digest = hashlib.sha256(json.dumps(state.tree).encode())
    for tensor in state.tensors.values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
