"""Which server gets the requests of a group, so that all processes that share servers load them evenly.

Consistent hashing with bounded loads (1608.01350) on a ring of the servers, but without a hash: groups have a number,
and consecutive ones begin at consecutive servers. No process sees what the others send. So each begins at its own place
on the ring, as far from the others as the ring allows, and together they load the servers evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

SLACK = 1.25  # largest load of a server over the mean before a group goes on to the next one
WHOLE = 16  # requests at a server up to which it takes all of a group, since that shares its prefix there


class Loaded(Protocol):
    """A server as the ring sees it."""

    @property
    def outstanding(self) -> int:
        """Number of requests at it from this process."""
        ...


S = TypeVar("S", bound=Loaded)


class Ring:
    """The servers of a pool in a fixed order, the same in every process.

    Args:
        servers: all servers.
        replica, replicas: number of this process, and how many share the servers.
    """

    def __init__(self, servers: Sequence[S], replica: int = 0, replicas: int = 1) -> None:
        self._servers = servers
        self._start = replica * len(servers) // replicas
        self._numbers: dict[int, int] = {}  # by group, until the weights change

    def clear(self) -> None:
        """Forgets the groups: caches of the old weights are of no use."""
        self._numbers.clear()

    def choose(self, group: int, usable: Sequence[S], most: int) -> S | None:
        """The server for a group's next request; None if all have as many as they may.

        Args:
            group: key of the requests that share a prefix.
            usable: servers that may get it, in the order of the ring, at least one.
            most: requests that a server may have from this process.
        """
        number = self._start + self._numbers.setdefault(group, len(self._numbers))
        home = self._servers[number % len(self._servers)]
        # The groups of a lost server go to all of the others, not to its neighbour.
        at = usable.index(home) if home in usable else number % len(usable)
        loads = sum(server.outstanding for server in usable)
        limit = min(most, max(WHOLE, math.ceil(SLACK * (loads + 1) / len(usable))))
        around = [*usable[at:], *usable[:at]]
        return next((s for s in around if s.outstanding < limit), None)
