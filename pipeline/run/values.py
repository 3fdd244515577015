"""The values on the wires of a running graph, tagged with their iteration and shared by the two lanes."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.core.trace import NO_TRACE, Trace
from creditgraph.pipeline.run.schedule import Schedule

Output = tuple[str, str]  # (node, output)


class Stopped(Exception):
    """The other lane has failed; this one ends quietly."""


def as_inputs(node: Node, by_socket: dict[str, list[Any]]) -> dict[str, Any]:
    """The keyword arguments of `run`: list sockets get lists, others their one value."""
    sockets = node.sockets.inputs
    return {
        name: values if sockets[name].is_list else values[0]
        for name, values in by_socket.items()
        if values or sockets[name].is_list
    }


class Values:
    """Values by (node, output, iteration). Reading waits until the value exists or a lane has failed.

    `nodes` are those that run on this rank; values that they read from other ranks are not kept here. `schedule` says
    what wires with `@<=k` read.

    A value read only within its iteration is dropped after its last reader. One read with `@k` is kept until `complete`
    reports the end of iteration + k, checkpoint included, so that every checkpoint can save the values in flight.
    """

    def __init__(self, nodes: Sequence[Node], trace: Trace = NO_TRACE, schedule: Schedule | None = None) -> None:
        self._trace = trace
        self._schedule = schedule or Schedule(None, writes=False)
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.completed = -1
        self._values: dict[tuple[str, str, int], Any] = {}
        self._readers: Counter[Output] = Counter()
        self.delays: dict[Output, int] = {}
        present = {node.name for node in nodes}
        for node in nodes:
            for _, wire in node.all_wires:
                if wire.source not in present:
                    continue
                output = (wire.source, wire.output)
                self._readers[output] += 1
                if wire.delay:
                    self.delays[output] = max(self.delays.get(output, 0), wire.delay)
        self._left: dict[tuple[str, str, int], int] = {}
        self._waited: defaultdict[int, float] = defaultdict(float)

    def put(self, node: str, output: str, iteration: int, value: Any) -> None:
        """Stores a value and wakes the threads that wait for it; a value that no node reads is not kept."""
        readers = self._readers[node, output]
        if readers:
            with self.changed:
                self._values[node, output, iteration] = value
                self._left[node, output, iteration] = readers
                self.changed.notify_all()

    def gather(self, node: Node, iteration: int) -> dict[str, Any]:
        """The inputs of `node` for `iteration`, waiting where needed; list sockets get lists."""
        with self.changed:
            by_socket = {
                socket: [self._wait(wire, iteration) for wire in wires] for socket, wires in node.wires.items()
            }
        return as_inputs(node, by_socket)

    def choose(self, wire: Wire, iteration: int, agree: Callable[[int], int]) -> None:
        """Chooses which value a wire with `@<=k` reads: the newest one that is there, waiting where all are too old.

        Args:
            wire: the wire.
            iteration: the iteration that reads it.
            agree: newest iteration whose value is here → the one that all replicas have.
        """
        if self._schedule.known(wire, iteration) is None:
            with self.changed:
                self._wait(replace(wire, newest=False), iteration)
                newest = max(t for *o, t in self._values if o == [wire.source, wire.output] and t < iteration)
            self._schedule.choose(wire, iteration, agree(newest))

    def read(self, node: Node, iteration: int, chosen: Callable[[Wire], bool]) -> dict[Wire, Any]:
        """The values of some of a node's wires for `iteration`, waiting where needed."""
        with self.changed:
            return {wire: self._wait(wire, iteration) for _, wire in node.all_wires if chosen(wire)}

    def release(self, node: Node, iteration: int) -> None:
        """`node` has run `iteration`: drops inputs that no node needs any more."""
        with self.changed:
            for _, wire in node.all_wires:
                key = self._key(wire, iteration)
                if key in self._left:
                    self._left[key] -= 1
                    if self._left[key] <= 0 and (wire.source, wire.output) not in self.delays:
                        del self._left[key], self._values[key]

    def complete(self, iteration: int) -> None:
        """Marks `iteration` as done and, if due, checkpointed."""
        with self.changed:
            self.completed = iteration
            for key in [k for k in self._values if k[2] + self.delays.get(k[:2], 0) <= iteration]:
                del self._values[key], self._left[key]
            self.changed.notify_all()

    def in_flight(self, iteration: int) -> list[tuple[str, str, int, Any]]:
        """(node, output, iteration, value) of all that later iterations will read with `@k`."""
        with self.changed:
            return [
                (node, output, tag, self._values[node, output, tag])
                for (node, output), delay in sorted(self.delays.items())
                for tag in range(iteration + 1 - delay, iteration + 1)
            ]

    def latest(self, wire: Wire) -> Any:
        """The newest value of a wire that is read with `@k`."""
        with self.changed:
            return self._values[max(k for k in self._values if k[:2] == (wire.source, wire.output))]

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Waits until `ready()`, which is evaluated under the lock; raises `Stopped` when a lane has failed."""
        with self.changed:
            if not ready():
                with self._trace.waiting("the other lane"):
                    while not ready():
                        self.pause()
            self.check()

    def check(self) -> None:
        """Raises `Stopped` when a lane has failed."""
        if self.error is not None:
            raise Stopped

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and wakes everyone."""
        with self.changed:
            # The first error is the cause; later ones follow from it.
            self.error = self.error or error
            self.changed.notify_all()

    def _key(self, wire: Wire, iteration: int) -> tuple[str, str, int]:
        chosen = self._schedule.known(wire, iteration) if wire.newest else None
        return wire.source, wire.output, iteration - wire.delay if chosen is None else chosen

    def _wait(self, wire: Wire, iteration: int) -> Any:
        key = self._key(wire, iteration)
        if key not in self._values:
            with self._trace.waiting(f"{wire.source}.{wire.output}"):
                while key not in self._values:
                    self.pause()
        return self._values[key]

    def waited(self) -> float:
        """Seconds this thread has spent waiting for the other."""
        return self._waited[threading.get_ident()]

    def pause(self) -> None:
        """Waits, under the lock, until something changes; raises `Stopped` when a lane has failed."""
        self.check()
        begin = perf_counter()
        self.changed.wait()
        self._waited[threading.get_ident()] += perf_counter() - begin
