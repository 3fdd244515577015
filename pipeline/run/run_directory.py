"""One run's directory: resolved config, metrics, records, checkpoints, and a lock so that two processes never share it.

runs/<name>/
    config.yaml      the resolved configuration
    metrics.jsonl    one line per iteration
    rejected.jsonl   rows that were skipped, with the reason
    record/          recorded outputs as Parquet
    checkpoints/     states to continue from
    logs/            free text
    lock             who is running
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import yaml

from pipeline.core.errors import RunError

logger = logging.getLogger("creditgraph")

# A run may be continued although these sections differ: they do not change what is computed.
FREE_TO_CHANGE = ("run", "recipe", "hydra")
FIXED = ("run.seed",)

_FREE_SPACE = "free some space or choose another place with run.root=PATH, then start the run again"
_NEXT_STEP = {
    errno.EACCES: "it may not be written; choose another place with run.root=PATH or correct its permissions",
    errno.EPERM: "it may not be written; choose another place with run.root=PATH or correct its permissions",
    errno.EROFS: "the file system is read-only; choose another place with run.root=PATH",
    errno.ENOSPC: f"the disk is full; {_FREE_SPACE}",
    errno.EDQUOT: f"the disk quota is used up; {_FREE_SPACE}",
    errno.ENOTDIR: "a file is in the place of a folder; remove it or choose another run.name",
    errno.EEXIST: "a file is in the place of a folder; remove it or choose another run.name",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError while writing `path` into a RunError that names it and the next step."""
    try:
        yield
    except OSError as error:
        what = os.strerror(error.errno) if error.errno else str(error)
        step = _NEXT_STEP.get(error.errno or 0, "correct this or choose another place with run.root=PATH")
        raise RunError(f"{path}: cannot be written ({what}): {step}.") from error


def sync_directory(path: Path) -> None:
    """Makes renames and new files in `path` durable."""
    # A rename is durable only when the folder that holds the name is.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_aside(path: Path, text: str) -> None:
    """Writes a small text file so that a reader sees the old or the new content, never half of it."""
    aside = path.with_name(f".tmp-{path.name}")
    with writing(path):
        with aside.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)


def take_lock(path: Path, instead: str) -> int:
    """Locks a file for this process and writes its name into it; the lock ends with the process, however that ends.

    Args:
        path: the file, in the directory that it is the lock of; made where there is none.
        instead: what a user who cannot wait does, for the sentence.

    Returns:
        A file descriptor; closing it gives the lock back.

    Raises:
        RunError: another process has it, or the file cannot be written.
    """
    with writing(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note = os.pread(handle, 4096, 0).decode(errors="replace")
        os.close(handle)
        raise RunError(
            f"{path.parent}: in use by {_holder(note)}. Two processes must not share it: wait for it, stop it, or "
            f"{instead}."
        ) from None
    except OSError as error:
        logger.warning(
            "%s: this file system has no locks (%s); make sure that no second process is here.", path, error.strerror
        )
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        with writing(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(who).encode(), 0)
    except RunError:
        os.close(handle)
        raise
    return handle


@contextmanager
def locked(path: Path, instead: str) -> Iterator[None]:
    """`take_lock`, given back at the end."""
    handle = take_lock(path, instead)
    try:
        yield
    finally:
        os.close(handle)


def lock_holder(path: Path) -> str:
    """Who has locked a file, as "process 12 on host since …"; "" without a lock, or on a file system without locks."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(os.pread(handle, 4096, 0).decode(errors="replace"))
    except OSError:
        return ""
    finally:
        os.close(handle)
    return ""


class RunDirectory:
    """A locked run directory. Use `open`; close it (or leave the `with`) to release the lock.

    Attributes:
        path: the directory.
        resumed: True when the directory already held a run.
        changed: settings that differ from the earlier start, as sentences (empty for a new run).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.resumed = False
        self.changed: list[str] = []
        self._lock = -1

    @classmethod
    def open(
        cls, path: Path | str, config: dict[str, Any], *, places: Collection[str] = (), allow_changes: bool = False
    ) -> Self:
        """Creates or reopens a run directory.

        Args:
            path: usually runs/<name>.
            config: resolved configuration, plain dicts and lists.
            places: dotted names of further settings that may differ from the earlier start, see `Experiment.places`.
            allow_changes: continue an earlier run although its graph, model, data or seed differ.

        Raises:
            RunError: the directory cannot be written, another process uses it, or its run had another configuration.
        """
        run = cls(Path(path))
        run._make()
        try:
            run._lock = take_lock(run.path / "lock", "choose another run.name")
            run._compare(config, places, allow_changes)
            write_aside(run.config_path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        except BaseException:
            run.close()
            raise
        return run

    @cached_property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @cached_property
    def metrics_path(self) -> Path:
        """One line per iteration."""
        return self.path / "metrics.jsonl"

    @cached_property
    def rejected_path(self) -> Path:
        """Rows that were skipped."""
        return self.path / "rejected.jsonl"

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make(self) -> None:
        with writing(self.path):
            for folder in ("record", "checkpoints", "logs"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)

    def _compare(self, config: dict[str, Any], places: Collection[str], allow_changes: bool) -> None:
        if not self.config_path.exists():
            return
        try:
            earlier = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"{self.config_path}: cannot be read ({reason}); choose another run.name or remove the run."
            ) from error
        self.resumed = True
        # Through YAML once, so that tuples and lists compare equal.
        changes = []
        for name, old, new in differences(earlier or {}, yaml.safe_load(yaml.safe_dump(config))):
            # Of a section that only one side has, each setting is named where some of them are free to change.
            if any(p.startswith(f"{name}.") for p in places) and "absent" in (old, new):
                changes += differences({} if old == "absent" else old, {} if new == "absent" else new, name)
            else:
                changes.append((name, old, new))
        self.changed = [f"{name}: was {_shown(old)}, now {_shown(new)}" for name, old, new in changes]
        serious = [text for text, (name, _, _) in zip(self.changed, changes, strict=True) if _is_serious(name, places)]
        if serious and not allow_changes:
            raise RunError(
                f"{self.path}: holds a run with another configuration:\n"
                + "\n".join(f"  {line}" for line in serious[:20])
                + (f"\n  … and {len(serious) - 20} more" if len(serious) > 20 else "")
                + "\nChoose another run.name, restore these settings, or continue anyway with run.allow_changes=true."
            )


def differences(old: Any, new: Any, place: str = "") -> list[tuple[str, Any, Any]]:
    """Every setting that differs between two configurations: (dotted name, old, new); "absent" where there is none.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    [('a.b', 1, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in [*old, *(k for k in new if k not in old)]:
            name = f"{place}.{key}" if place else str(key)
            changes += differences(old.get(key, "absent"), new.get(key, "absent"), name)
        return changes
    return [] if old == new and type(old) is type(new) else [(place, old, new)]


def _is_serious(name: str, places: Collection[str]) -> bool:
    """Whether a setting changes what is computed."""
    section = name.partition(".")[0]
    moved = any(name == place or name.startswith(f"{place}.") for place in places)
    return name in FIXED or (section not in FREE_TO_CHANGE and not moved)


def _shown(value: Any) -> str:
    text = value if value == "absent" else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _holder(note: str) -> str:
    try:
        who = json.loads(note)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
