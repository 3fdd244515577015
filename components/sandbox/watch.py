"""What a sandbox uses: memory, processor time and the time it waits for a processor, of all its processes."""

import os
from dataclasses import dataclass

_TICK = os.sysconf("SC_CLK_TCK")
_WALKS = 3  # over processes that end meanwhile, maybe after they have handed their memory to a child


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process and all its descendants use.

    Attributes:
        memory: resident bytes without file-backed pages.
        cpu: processor seconds, with those of children that have ended and been waited for.
        waited: seconds that their threads were ready to run and had no processor, at most the time that has passed.
    """

    memory: int = 0
    cpu: float = 0.0
    waited: float = 0.0


class Watch:
    """Samples the usage of a process and its descendants from /proc; on a system without it, all is 0."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._waits: dict[int, float] = {}
        self._cpu = 0.0
        self._waited = 0.0
        self._last = 0.0

    def sample(self, now: float) -> Usage:
        """Usage at the time `now`, in seconds of a monotonic clock."""
        memory = 0
        for _ in range(_WALKS):
            walk = _Walk(self._pid)
            memory = max(memory, walk.memory)
            if not walk.ended:
                break
        waited = sum(max(wait - self._waits.get(thread, 0.0), 0.0) for thread, wait in walk.waits.items())
        # Several threads may wait at once: together no more than the time that has passed.
        self._waited += min(waited, now - self._last) if self._last else 0.0
        self._waits = walk.waits
        self._last = now
        self._cpu = max(self._cpu, walk.cpu)  # it falls where nobody waits for a child
        return Usage(memory=memory, cpu=self._cpu, waited=self._waited)


class _Walk:
    """One walk over a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self.memory = 0
        self.cpu = 0.0
        self.waits: dict[int, float] = {}  # seconds per thread
        self.ended = 0  # processes that ended meanwhile
        open_pids = {pid}
        seen: set[int] = set()
        while open_pids:
            one = open_pids.pop()
            seen.add(one)
            try:
                open_pids |= self._visit(one) - seen
            except (OSError, ValueError):
                self.ended += 1

    def _visit(self, pid: int) -> set[int]:
        """Adds a process; returns its children."""
        children: set[int] = set()
        # Any thread may fork, and a child is in the list of the thread that did.
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as text:
                children.update(map(int, text.read().split()))
            self.waits[thread] = _waited_seconds(pid, thread)
        self.memory += _resident_bytes(pid)
        self.cpu += _cpu_seconds(pid)
        return children


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat", "rb") as text:
        # After the name in parentheses: state, parent, … utime, stime, cutime and cstime are numbers 11 to 14.
        return sum(map(int, text.read().rpartition(b")")[2].split()[11:15])) / _TICK


def _waited_seconds(pid: int, thread: int) -> float:
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as text:
            return int(text.read().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel that does not count
        return 0.0
