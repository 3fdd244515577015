"""Reports the first error of a distributed run to all ranks, so that no rank waits for one that is gone.

A rank that fails writes its error into the store that all ranks share. Ranks that wait in a collective see the
connection break; ranks that compute, or wait for a waiting rank, get the error from a thread that watches the store.
Every rank also increments a counter there, its pulse, which shows which rank died without reporting an error. No wait
for a rank that has a pulse ends: one iteration may sample for hours.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.distributed.team import DistributedError

logger = logging.getLogger("creditgraph")

PULSE = 1.0  # seconds between signs of life
SILENCE = 4 * PULSE  # a rank without a sign of life for this long is dead, once a collective has failed
DEAD = 45.0  # seconds without a sign of life after which any rank is dead; a busy one may be late by seconds
LOOKS = 4  # looks at all pulses within `DEAD`
PATIENCE = 600.0  # seconds after which rank 0 logs whom it waits for; then after twice as many, and so on
WAITS: dict[int, float] = {}  # thread of this process → when the collective began that it is in
GRACE = 5.0  # seconds a rank has to end by itself once another has failed
ERROR = "first_error"
EXIT_CODE = 1
_SILENT = "gave no sign of life for {:g} s (is that host down or stopped?); see the log of that host"
_STORE_GONE = "rank 0: the store is gone, and with it the process that served it; look into its log"


class PeerLost(DistributedError):
    """A collective failed, because another rank is gone."""


class Watchdog:
    """Watches the other ranks in a separate thread.

    Args:
        store: connection to the run's store, used by nobody else.
        ranks: this rank.
        places: describes where the ranks are.
    """

    def __init__(self, store: Any, ranks: Ranks, places: Callable[[], str]) -> None:
        self._store = store
        self._ranks = ranks
        self._places = places
        self._patience = PATIENCE
        # The store's client may not be used by two threads at once.
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: str | None = None  # kept, because the store may end before this rank does
        self._heard = time.monotonic()  # of the store
        self._moved: dict[int, tuple[int, float]] = {}  # rank → its pulse, and when that last changed
        threading.Thread(target=self._guard, name="store guard", daemon=True).start()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops watching."""
        self._done.set()
        self._thread.join()

    def report(self, text: str) -> str:
        """Makes `text` the run's first error, unless there already is one; returns the first one, with its rank."""
        mine = f"rank {self._ranks.rank} ({socket.gethostname()}): {text}"
        try:
            with self._lock:
                # With an empty expected value, compare_set writes only if the key is absent.
                return str(self._store.compare_set(ERROR, "", mine).decode())
        except Exception:
            return mine  # the store is gone, so this rank knows only its own error

    def first(self) -> str | None:
        """The first error of the run, when there is one."""
        with self._lock:
            if self._error is None and self._store.check([ERROR]):
                self._error = self._store.get(ERROR).decode()
            return self._error

    def blame(self) -> str:
        """After a broken collective: returns the first error or, without one, the silent ranks. Raises nothing."""
        if self._error is not None:
            return self._error
        try:
            # The counters are read twice: a rank whose counter has not changed is dead.
            before = self._pulses()
            end = time.monotonic() + SILENCE
            while time.monotonic() < end:
                if (error := self.first()) is not None:
                    return error
                time.sleep(PULSE / 4)
            silent = [rank for rank, (old, new) in enumerate(zip(before, self._pulses(), strict=True)) if old == new]
        except Exception as error:
            return f"{_STORE_GONE} ({type(error).__name__})"
        if silent:
            names = ", ".join(f"rank {rank}" for rank in silent)
            return self.report(
                f"{names} died without reporting an error (killed, or out of memory?); see the log of that host"
            )
        return ""

    def _pulses(self) -> list[int]:
        with self._lock:
            return [self._store.add(f"pulse/{rank}", 0) for rank in range(self._ranks.world)]

    def _watch(self) -> None:
        look = time.monotonic()
        try:
            while not self._done.wait(PULSE):
                with self._lock:
                    self._store.add(f"pulse/{self._ranks.rank}", 1)
                self._heard = time.monotonic()
                if (first := self.first()) is not None:
                    break
                if self._ranks.rank == 0:
                    self._notice()
                    # Rank 0 is beside the store, so its look at all pulses costs little.
                    if self._heard - look > DEAD / LOOKS:
                        look = self._heard
                        self._look()
            else:
                return
        except Exception:
            first = _STORE_GONE
        self._heard = math.inf
        if not self._done.wait(GRACE):
            leave(stopped(self._ranks.rank, first))

    def _look(self) -> None:
        """Reports ranks whose host is gone: their connections need not break."""
        now = time.monotonic()
        for rank, pulse in enumerate(self._pulses()):
            if pulse != self._moved.get(rank, (-1, now))[0]:
                self._moved[rank] = (pulse, now)
        silent = [rank for rank, (_, moved) in self._moved.items() if now - moved > DEAD]
        if silent:
            self.report(f"{', '.join(f'rank {rank}' for rank in silent)} {_SILENT.format(DEAD)}")

    def _notice(self) -> None:
        """Logs for whom rank 0 waits, if it has waited long."""
        waited = time.monotonic() - min(list(WAITS.values()), default=time.monotonic())
        if not waited:
            self._patience = PATIENCE
        elif waited > self._patience:
            self._patience *= 2
            logger.warning("rank 0 has waited %.0f s for other ranks, which are alive%s", waited, self._places())

    def _guard(self) -> None:
        """Ends the process when the store is silent: its client would wait as long as TCP does, for 15 minutes."""
        while not self._done.wait(PULSE):
            if time.monotonic() - self._heard > DEAD:
                reason = f"rank 0: its store {_SILENT.format(DEAD)}"
                leave(stopped(self._ranks.rank, reason))


def stopped(rank: int, first: str) -> str:
    """The message of a rank that ends because another has failed."""
    return first if first.startswith(f"rank {rank} ") else f"{first}\n(rank {rank} stops because of it)"


def leave(text: str, code: int = EXIT_CODE) -> NoReturn:
    """Prints the reason and ends the process at once, because threads may be inside collectives that never return."""
    sys.stdout.flush()
    sys.stderr.write(f"creditgraph: {text}\n")
    sys.stderr.flush()
    os._exit(code)
