"""Temporary folders of this user alone, named by the process that owns them, so that a later run removes those left."""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from creditgraph.components.engine.guard import started


def own_folder(parent: Path, prefix: str) -> Path:
    """A path below `parent` that no other process uses; the caller makes the folder, with mode 0700.

    Its name has the host, this process and its start time, and 32 random bits. Of the host it has a hash, because paths
    of sockets must be short.
    """
    pid = os.getpid()
    return parent / f"{prefix}{_host()}-{pid}-{started(pid)}-{os.urandom(4).hex()}"


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Folders of this user's processes on this host that are gone, whatever ended them."""
    own = f"{prefix}{_host()}-"
    for folder in parent.glob(f"{own}*"):
        pid, _, rest = folder.name.removeprefix(own).partition("-")
        try:
            mine = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        except OSError:
            continue
        if mine and pid.isdigit() and started(int(pid)) != rest.partition("-")[0]:
            yield folder


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes what `abandoned` finds."""
    for folder in abandoned(parent, prefix):
        shutil.rmtree(folder, ignore_errors=True)


def _host() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:6]
