"""The states of nodes between the end of an iteration and the checkpoint that holds them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from creditgraph.pipeline.core.component import ShardWrites
from creditgraph.pipeline.core.encoding import Encoded
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.checkpoint import (
    SHARDS,
    Checkpoint,
    Checkpoints,
    CheckpointSettings,
    DamagedError,
    check_shards,
    load,
    sum_shards,
)
from creditgraph.pipeline.run.node_runner import NodeRunner
from creditgraph.pipeline.run.placement import RankView
from creditgraph.pipeline.run.values import Values

logger = logging.getLogger("creditgraph")

States = dict[str, Encoded]  # "node.NAME" → state
Flush = Callable[[int], Mapping[str, Mapping[str, Any]]]  # iteration → marks by file, see `Checkpoint.logs`


class Snapshots:
    """Takes snapshots of a lane's states at the end of an iteration, and writes checkpoints of both lanes' states.

    All nodes of a lane have run the same iterations when they are taken, so each is one side of a consistent cut.

    Attributes:
        saved: iteration of the newest checkpoint, written or begun.
    """

    def __init__(
        self,
        graph: Graph,
        runners: Mapping[str, NodeRunner],
        view: RankView,
        values: Values,
        checkpoints: Checkpoints | None,
        settings: CheckpointSettings,
    ) -> None:
        self.saved = -1
        self._graph = graph
        self._runners = runners
        self._view = view
        self._values = values
        self._checkpoints = checkpoints
        self._every = settings.every
        self._background = settings.background
        # The checkpoint that is being written: its marks of logs, and the shards that are not on disk yet.
        self._open: Mapping[str, Mapping[str, Any]] | None = None
        self._writes: list[tuple[NodeRunner, ShardWrites]] = []
        self._due: dict[tuple[str, int], States] = {}
        # States of recent iterations, without the large collective nodes, for a run whose servers are lost.
        self._recent: dict[tuple[str, int], States] = {}

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest valid checkpoint, as rank 0 sees it; every rank reads the groups it needs."""
        if self._checkpoints is None:
            return None
        team = self._view.team
        if self._view.first:
            self._checkpoints.clean()
        while True:
            newest = self._checkpoints.latest(rename=True) if self._view.first else None
            name = team.from_first(newest.path.name if newest else "")
            if not name:
                return None
            path = self._checkpoints.path / name
            # Shards are large, so every rank compares its part of them.
            if not team.most(self._shards_differ(path)):
                return newest or load(path, self._view.wants_group, verify=False)
            if self._view.first:
                self._checkpoints.set_aside(path)

    def _shards_differ(self, path: Path) -> int:
        try:
            check_shards(path, self._view.ranks.rank, self._view.ranks.world)
        except DamagedError as error:
            logger.warning("%s It is set aside; the previous one is tried.", error)
            return 1
        return 0

    def is_due(self, iteration: int) -> bool:
        """Whether a checkpoint follows this iteration."""
        return self._checkpoints is not None and self._every > 0 and (iteration + 1) % self._every == 0

    def take(self, lane: str, nodes: list[Node], iteration: int) -> None:
        """Takes the states at the end of a lane's iteration.

        The generation lane copies them, because it continues while the checkpoint is saved.
        """
        due = self._states(nodes, copy=lane == "generation") if self.is_due(iteration) else None
        light = self._states([n for n in nodes if n.placement != "collective"], copy=True)
        with self._values.changed:
            self._recent[lane, iteration] = light
            # No lane is further ahead of the other.
            self._recent.pop((lane, iteration - self._graph.max_delay - 3), None)
            if due is not None:
                self._due[lane, iteration] = due
                self._values.changed.notify_all()

    def take_last(self, lane: str, nodes: list[Node], iteration: int) -> None:
        """Takes the states after a lane's last iteration, if no checkpoint was due."""
        if (lane, iteration) not in self._due:
            states = self._states(nodes, copy=False)
            with self._values.changed:
                self._due[lane, iteration] = states
                self._values.changed.notify_all()

    def save(self, iteration: int, lanes: Iterable[str], flush: Flush) -> float:
        """Writes the state after `iteration`: both lanes' states and the values in flight on `@k` wires.

        With `run.checkpoint.background` shards may still be written when it returns; see `poll`.

        Returns the seconds it took, without those of waiting for the other lane.

        Args:
            iteration: the iteration that has ended.
            lanes: the lanes that have run it, or are about to.
            flush: makes records and metrics durable first, so that a checkpoint is never newer than they are, and
                returns their marks.
        """
        if self._checkpoints is None:
            return 0.0
        self.finish()
        keys = [(lane, iteration) for lane in lanes]
        self._values.wait_until(lambda: all(key in self._due for key in keys))
        begin = perf_counter()
        groups = self._view.states({name: state for key in keys for name, state in self._due.pop(key).items()})
        groups |= self._view.in_flight(self._values.in_flight(iteration), iteration)
        self._open = {}
        if self._view.first:
            self._open = flush(iteration)
            self._checkpoints.begin(iteration, dict(sorted(groups.items())))
        self._begin_shards(iteration)
        self.saved = iteration
        if not (self._background and self._writes):
            self.finish()
        return perf_counter() - begin

    def poll(self) -> None:
        """Completes the checkpoint that is being written once every rank has written its shards; all ranks call it."""
        if self._writes and not self._view.team.most(sum(not writes.done() for _, writes in self._writes)):
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if there is one; only now does it count."""
        if self._checkpoints is None or self._open is None:
            return
        logs = self._open
        writes = self._writes
        self._open = None
        self._writes = []
        sharded = any(runner.has_shards for runner in self._runners.values())
        with self._attempt(self.saved) as aside:
            for runner, pending in writes:
                runner.finish_shards(pending)
            if sharded:
                self._view.team.barrier()
                sum_shards(aside / SHARDS, self._view.ranks.rank, self._view.ranks.world)
                self._view.team.barrier()
        if self._view.first:
            self._checkpoints.complete(self.saved, logs)

    def save_finished(self, flush: Flush) -> None:
        """Saves the last finished iteration of a run that cannot continue, unless the learner is already beyond it."""
        last = self._values.completed
        collective = [n for n in self._graph.nodes if n.placement == "collective"]
        beyond = any(self._runners[n.name].context.iteration != last for n in collective)
        if self._view.ranks.world == 1:
            self.finish()
        if self._view.ranks.world > 1 or last <= self.saved or beyond:
            return  # the newest checkpoint remains the latest state
        lanes = [lane for lane, iteration in self._recent if iteration == last]
        for lane in lanes:
            self._due[lane, last] = self._recent[lane, last]
        self._due[lanes[0], last] |= self._states(collective, copy=False)
        self._values.error = None  # both lanes have ended
        self.save(last, lanes, flush)
        logger.warning("iteration %d, the last finished one, is checkpointed.", last)

    def _states(self, nodes: Iterable[Node], copy: bool) -> States:
        if self._checkpoints is None:
            return {}
        states = {node.name: self._runners[node.name].snapshot(copy) for node in nodes}
        return {f"node.{name}": state for name, state in states.items() if state is not None}

    def _begin_shards(self, iteration: int) -> None:
        """Has every rank write its shards, or begin to, after the folder was created."""
        sharded = [runner for runner in self._runners.values() if runner.has_shards]
        if not sharded:
            return
        with self._attempt(iteration) as aside:
            if self._view.first:
                (aside / SHARDS).mkdir()
            self._view.team.barrier()
            writes = [(runner, runner.save_shards(aside / SHARDS)) for runner in sharded]
        self._writes = [(runner, pending) for runner, pending in writes if pending is not None]

    def _attempt(self, iteration: int) -> AbstractContextManager[Path]:
        """The folder of a checkpoint that is being written; rank 0 removes it after an error."""
        assert self._checkpoints is not None
        if self._view.first:
            return self._checkpoints.attempt(iteration)
        return nullcontext(self._checkpoints.aside(iteration))
