"""One run's directory: resolved config, metrics, records, checkpoints, and a lock so that two processes never share it.

runs/<name>/
    config.yaml      the resolved configuration
    metrics.jsonl    one line per iteration
    rejected.jsonl   rows that were skipped, with the reason
    record/          recorded outputs as Parquet
    checkpoints/     states to continue from; damaged-… are set aside
    logs/            free text
    lock             who is running
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import yaml

from creditgraph.pipeline.core.errors import CreditgraphError, RunError, did_you_mean
from creditgraph.pipeline.run.trust import remember

logger = logging.getLogger("creditgraph")

METRICS = "metrics.jsonl"
REJECTED = "rejected.jsonl"
CHECKSUMS = "checksums.jsonl"  # in record/

# A run may be continued although these sections differ: they do not change what is computed.
FREE_TO_CHANGE = ("run", "recipe")
FIXED = ("run.seed",)

_FREE_SPACE = "free some space or choose another place with run.root=PATH, then start the run again"
_NEXT_STEP = {
    errno.EACCES: "it may not be written; choose another place with run.root=PATH or correct its permissions",
    errno.EPERM: "it may not be written; choose another place with run.root=PATH or correct its permissions",
    errno.EFBIG: "the file is larger than the system allows; raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another place with run.root=PATH",
    errno.ENOSPC: f"the disk is full; {_FREE_SPACE}",
    errno.EDQUOT: f"the disk quota is used up; {_FREE_SPACE}",
    errno.ENOTDIR: "a file is in the place of a folder; remove it or choose another run.name",
    errno.EEXIST: "a file is in the place of a folder; remove it or choose another run.name",
}


@contextmanager
def writing(path: Path, option: str = "run.root=PATH") -> Iterator[None]:
    """Turns an OSError while writing `path` into a RunError that names it and the next step.

    Args:
        path: what is written.
        option: the setting or option that chooses another place.
    """
    try:
        yield
    except OSError as error:
        what = os.strerror(error.errno) if error.errno else str(error)
        step = _NEXT_STEP.get(error.errno or 0, "correct this or choose another place with run.root=PATH")
        step = step.replace("run.root=PATH", option)
        raise RunError(f"{path}: cannot be written ({what}): {step}.") from error


def make_folder(path: Path, option: str = "run.root=PATH") -> None:
    """Makes a folder and those above it; `option` as in `writing`."""
    with writing(path, option):
        path.mkdir(parents=True, exist_ok=True)


def sync_directory(path: Path) -> None:
    """Makes renames and new files in `path` durable."""
    # A rename is durable only when the folder that holds the name is.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replacing(path: Path, durable: bool = True, option: str = "run.root=PATH") -> Iterator[Path]:
    """Yields a temporary name to write to, which is renamed to `path`: a reader sees the old or the new file, whole.

    After an error the old file is unchanged. `durable` files survive a power failure.
    """
    aside = path.with_name(f".tmp-{path.name}")
    with writing(path, option):
        try:
            yield aside
            if durable:
                with aside.open("rb") as handle:
                    os.fsync(handle.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def write_aside(path: Path, text: str, option: str = "run.root=PATH") -> None:
    """Writes a small text file whole or not at all; `option` as in `writing`."""
    with replacing(path, option=option) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, option: str = "run.root=PATH") -> None:
    """Writes a JSON file whole or not at all; `option` as in `writing`."""
    write_aside(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", option)


def check_run(path: Path) -> None:
    """Raises RunError, with the nearest name there is, unless `path` is the directory of a run."""
    if not (path / "config.yaml").is_file():
        try:
            near = [p.name for p in path.parent.iterdir() if (p / "config.yaml").exists()]
        except OSError:  # no such folder, or one that may not be read
            near = []
        hint = did_you_mean(path.name, near) if near else ""
        raise RunError(f"{path}: no run there (no config.yaml); expected a run directory.{hint}")


def take_lock(path: Path, instead: str) -> int:
    """Locks a file for this process and writes the process into it; the lock ends with the process, however that ends.

    Args:
        path: the lock file, in the directory that it protects; created if missing.
        instead: alternative to waiting, for the error sentence.

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
    """Holds `take_lock` within the context."""
    handle = take_lock(path, instead)
    try:
        yield
    finally:
        os.close(handle)


def lock_holder(path: Path) -> str:
    """The holder of a lock, as "process 12 on host since …"; "" without one, or on a file system without locks."""
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
        config_path: the resolved configuration.
        metrics_path: one line per iteration.
        rejected_path: rows that were skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.metrics_path = path / METRICS
        self.rejected_path = path / REJECTED
        self._lock = -1
        self._made: list[Path] = []

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
            remember(run.path)
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CreditgraphError):
            self._leave_nothing()
        self.close()

    @property
    def has_results(self) -> bool:
        """Whether an iteration was finished here: then another configuration must not continue it."""
        rows = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return rows or any((self.path / "checkpoints").glob("*"))

    def _leave_nothing(self) -> None:
        """Removes a directory that this start made, if a user's mistake ended it before anything was worth keeping."""
        told = [self.rejected_path, *(self.path / "logs").glob("*")]  # what an error sentence may refer to
        if self.path not in self._made or self.has_results or any(f.exists() and f.stat().st_size for f in told):
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._made:
            with suppress(OSError):  # not empty: another run is there by now
                folder.rmdir()

    def _make(self) -> None:
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        with writing(self.path):
            for folder in ("record", "checkpoints", "logs"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
        for name in (METRICS, REJECTED, f"record/{CHECKSUMS}"):
            if (self.path / name).is_dir():
                raise RunError(f"{self.path / name}: expected a file, got a folder. Move it away, then start again.")

    def _compare(self, config: dict[str, Any], places: Collection[str], allow_changes: bool) -> None:
        if not self.config_path.exists() or not self.has_results:
            return
        try:
            earlier = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise RunError(
                f"{self.config_path}: cannot be read ({reason}); choose another run.name or remove the run."
            ) from error
        # Through YAML once, so that tuples and lists compare equal.
        changes = []
        for name, old, new in differences(earlier or {}, yaml.safe_load(yaml.safe_dump(config))):
            # If only one side has a section, its settings are listed one by one when some of them are free to change.
            if any(p.startswith(f"{name}.") for p in places) and "absent" in (old, new):
                changes += differences({} if old == "absent" else old, {} if new == "absent" else new, name)
            else:
                changes.append((name, old, new))
        serious = [change for change in changes if _is_serious(change[0], places)]
        if serious and not allow_changes:
            raise RunError(
                f"{self.path}: holds a run with another configuration:\n"
                + listed_changes(serious)
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


def listed_changes(changes: Sequence[tuple[str, Any, Any]]) -> str:
    """The first 20 of some `differences`, one per line, for an error."""

    def shown(value: Any) -> str:
        text = value if value == "absent" else repr(value)
        return text if len(text) <= 80 else text[:77] + "…"

    lines = [f"  {name}: was {shown(old)}, now {shown(new)}" for name, old, new in changes[:20]]
    return "\n".join([*lines, f"  … and {len(changes) - 20} more"] if len(changes) > 20 else lines)


def _holder(note: str) -> str:
    try:
        who = json.loads(note)
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
