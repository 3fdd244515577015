"""Runs one server process and ends it, with all its children, as soon as the process that started it is gone.

    python guard.py --run PID --scratch PATH [--orphaned PATH]… -- COMMAND…

A server is a tree of processes that share memory files in /dev/shm. This script is their common ancestor (a subreaper,
so that orphans come to it): it ends the tree when its standard input closes, when the run PID is gone, on SIGTERM, or
when the server itself ends; then it removes the tree's shared memory and `--scratch`, and the paths of `--orphaned` if
the run is gone.

The script is two processes, each the other's successor: the keeper, whose child the guard is, ends the tree and cleans
up when the guard is killed, and the guard does so when the keeper is. So nothing remains if the run and either of them
are killed with SIGKILL. What remains when all three are killed is listed in the scratch folder, and the next server
that starts on the host has it removed (`clean`). Linux only (prctl, /proc). It is run by path, so it imports only the
standard library.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.3
_LOOK_SECONDS = 2.0  # between two scans of /proc for shared memory, which are too slow for every poll
GRACE_SECONDS = 5.0
LEFT = "left.json"  # file of the scratch folder: processes and shared memory that a clean-up must end and remove
# Only names of memory that belongs to one server; weight files, which servers share, have other names.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.|sglang_|torch_|nccl-)[^\s/]+")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def started(pid: int) -> str:
    """Start time of a process in clock ticks; "0" for one that is gone or only waits to be reaped."""
    try:
        parts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "0"
    return "0" if parts[0] in "ZX" else parts[19]


def descendants(root: int) -> list[int]:
    """Process ids of the tree below `root`, without it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            # The name in brackets may hold spaces and brackets.
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    below: list[int] = []
    queue = [root]
    while queue:
        queue = [child for pid in queue for child in children.get(pid, [])]
        below += queue
    return below


def shared_memory(pids: list[int]) -> set[str]:
    """Shared memory files that these processes map."""
    files: set[str] = set()
    for pid in pids:
        try:
            files.update(_SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text(errors="replace")))
        except OSError:
            continue
    return files


def clean(scratch: Path) -> None:
    """Ends the processes and removes the shared memory that the scratch folder lists, then the folder."""
    try:
        left = json.loads((scratch / LEFT).read_text())
        processes = [(int(pid), str(begun)) for pid, begun in left["processes"]]
        memory = [path for path in left["memory"] if _SHARED_MEMORY.fullmatch(path)]
    except (OSError, ValueError, KeyError, TypeError):
        processes, memory = [], []
    _signal([pid for pid, begun in processes if begun != "0" and started(pid) == begun], signal.SIGKILL)
    for path in memory:
        with contextlib.suppress(OSError):
            Path(path).unlink()
    shutil.rmtree(scratch, ignore_errors=True)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap() -> dict[int, int]:
    """Exit codes of children that have ended."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


@dataclass
class _Tree:
    """A server's processes and what must be removed after them.

    Attributes:
        run: process id and start time of the run.
        scratch: folder of the server.
        orphaned: folders of the run.
        memory: shared memory that its processes mapped.
    """

    run: tuple[int, str]
    scratch: Path
    orphaned: list[str]
    memory: set[str] = field(default_factory=set)
    stopping: list[bool] = field(default_factory=list)

    def run_is_gone(self) -> bool:
        now = started(self.run[0])
        return now == "0" or now != self.run[1]

    def look(self) -> None:
        """Lists the tree in the scratch folder."""
        below = descendants(os.getpid())
        self.memory |= shared_memory(below)
        left = {"processes": [(pid, started(pid)) for pid in below], "memory": sorted(self.memory)}
        with contextlib.suppress(OSError):
            aside = self.scratch / f".{LEFT}"
            aside.write_text(json.dumps(left))
            aside.replace(self.scratch / LEFT)

    def wait(self, server: int, keeper: int) -> int | None:
        """Waits until the server has ended (returns its exit code) or must end (None)."""
        looked = 0.0
        while not self.stopping and os.getppid() == keeper and not self.run_is_gone():
            code = _reap().get(server)
            if code is not None:
                return code
            if time.monotonic() - looked > _LOOK_SECONDS:
                self.look()
                looked = time.monotonic()
            readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
            if readable and not os.read(0, 4096):
                return None
        return None

    def end(self, server: int, code: int | None) -> int | None:
        """Ends the whole tree, first with SIGTERM; returns the server's exit code, if known."""
        own = os.getpid()
        deadline = time.monotonic() + GRACE_SECONDS
        self.memory |= shared_memory(descendants(own))
        if code is None:
            _signal([server], signal.SIGTERM)
            _signal([server], signal.SIGCONT)  # a stopped process would not see it
        while time.monotonic() < deadline:
            ended = _reap()
            code = ended.get(server, code)
            left = descendants(own)
            if not left:
                return code
            if code is not None:
                deadline = min(deadline, time.monotonic() + 1.0)  # processes that outlive the server got no signal
            time.sleep(0.05)
        while left := descendants(own):
            self.memory |= shared_memory(left)
            _signal(left, signal.SIGKILL)
            time.sleep(0.02)
            code = _reap().get(server, code)
        return code

    def remove(self) -> None:
        """Removes what the tree has left."""
        for path in self.memory:
            Path(path).unlink(missing_ok=True)
        clean(self.scratch)
        for path in self.orphaned if self.run_is_gone() else []:
            shutil.rmtree(path, ignore_errors=True)


def _guard(command: list[str], tree: _Tree, keeper: int) -> int:
    signal.signal(signal.SIGTERM, lambda *_: tree.stopping.append(True))
    code: int | None = None
    try:
        # The server dies with this process too, should somebody kill it.
        die_too = partial(_prctl, _SET_PDEATHSIG, signal.SIGKILL)
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_too)
        code = tree.end(server.pid, tree.wait(server.pid, keeper))
    except OSError as error:
        sys.stderr.write(f"{command[0]}: cannot be started: {error}\n")
        code = 127
    tree.remove()
    return 0 if code is None else code if code >= 0 else 128 - code


def _keep(guard: int, tree: _Tree) -> int:
    """Waits for the guard; takes its place when it is killed. Returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: _signal([guard], signal.SIGTERM))
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == guard:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        tree.end(guard, code)
        tree.remove()
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Runs the command; its exit code."""
    split = arguments.index("--")
    options = arguments[:split]
    run = int(options[options.index("--run") + 1])
    tree = _Tree(
        run=(run, started(run)),
        scratch=Path(options[options.index("--scratch") + 1]),
        orphaned=[options[i + 1] for i, option in enumerate(options) if option == "--orphaned"],
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    guard = os.fork()
    if guard:
        return _keep(guard, tree)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    return _guard(arguments[split + 1 :], tree, keeper)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
