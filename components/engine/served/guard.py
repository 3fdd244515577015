"""Runs one server process and ends it, with all its children, as soon as the process that started it is gone.

    python guard.py --parent PID [--remove PATH]… [--orphaned PATH]… -- COMMAND…

A server is a tree of processes that share memory files in /dev/shm. This script is their common ancestor (a subreaper,
so that orphans come to it): it ends the tree when its standard input closes, when its parent is no longer PID, on
SIGTERM, or when the server itself ends; then it removes the tree's shared memory and the paths of `--remove`, and those
of `--orphaned` unless "stop" was written before, which is how a run that continues ends a server. Nothing remains even
if the run is killed with SIGKILL. Linux only (prctl, /proc). It is run by path, so it imports only the standard
library.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.3
_LOOK_SECONDS = 2.0  # between two scans of /proc for shared memory, which are too slow for every poll
GRACE_SECONDS = 5.0
# Only names of memory that belongs to one server; weight files, which servers share, have other names.
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.|sglang_|torch_|nccl-)[^\s/]+")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


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


def _wait(server: int, parent: int, stopping: list[bool], memory: set[str]) -> tuple[int | None, bool]:
    """Waits until the server has ended (returns its exit code) or must end (None); also whether the run is gone."""
    looked = 0.0
    received = b""
    while not stopping and os.getppid() == parent:
        code = _reap().get(server)
        if code is not None:
            return code, False
        if time.monotonic() - looked > _LOOK_SECONDS:
            memory |= shared_memory(descendants(os.getpid()))
            looked = time.monotonic()
        readable, _, _ = select.select([0], [], [], _POLL_SECONDS)
        if readable:
            text = os.read(0, 4096)
            received += text
            if not text:
                return None, not received
    return None, os.getppid() != parent


def _end(server: int, code: int | None, memory: set[str]) -> int | None:
    """Ends the whole tree, first with SIGTERM; returns the server's exit code, if known."""
    own = os.getpid()
    deadline = time.monotonic() + GRACE_SECONDS
    memory |= shared_memory(descendants(own))
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
            deadline = min(deadline, time.monotonic() + 1.0)  # processes that outlive the server received no signal
        time.sleep(0.05)
    while left := descendants(own):
        memory |= shared_memory(left)
        _signal(left, signal.SIGKILL)
        time.sleep(0.02)
        code = _reap().get(server, code)
    return code


def main(arguments: list[str]) -> int:
    """Runs the command; its exit code."""
    split = arguments.index("--")
    options = arguments[:split]
    command = arguments[split + 1 :]
    parent = int(options[options.index("--parent") + 1])
    remove = [options[i + 1] for i, option in enumerate(options) if option == "--remove"]
    orphaned = [options[i + 1] for i, option in enumerate(options) if option == "--orphaned"]
    stopping: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    memory: set[str] = set()
    code: int | None = None
    gone = False
    try:
        # The server dies with this script too, should somebody kill it.
        die_too = partial(_prctl, _SET_PDEATHSIG, signal.SIGKILL)
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_too)
        code, gone = _wait(server.pid, parent, stopping, memory)
        code = _end(server.pid, code, memory)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: cannot be started: {error}\n")
        code = 127
    for path in memory:
        Path(path).unlink(missing_ok=True)
    for path in [*remove, *(orphaned if gone or os.getppid() != parent else [])]:
        shutil.rmtree(path, ignore_errors=True)
    return 0 if code is None else code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
