"""Whether the code that a run directory names may be loaded.

A configuration names functions and classes of files, and programs, so a directory that somebody else made can run
anything. Those that this user's runs made here are listed outside of them, in the user's state folder; any other is
read without loading what does not belong to creditgraph or an installed plug-in.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.registry import EXTERNAL, known_components

logger = logging.getLogger("creditgraph")
TRUST: ContextVar[bool] = ContextVar("trust", default=False)
"""whether the user has said --trust"""
PROGRAMS = ("python", "command", "program", "executable")  # settings that name a program, in any section
_CODE = re.compile(r"\.py($|:)")


def outside_code(config: Mapping[str, Any]) -> list[str]:
    """ "place: value" of each setting of a configuration that names code outside of creditgraph and of plug-ins."""
    named = [(place, value) for place, key, value in _settings(config, "") if _names_code(place, key, value)]
    return [f"{place}: {value}" for place, value in named]


def _settings(value: Any, place: str, key: str = "") -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _settings(part, f"{place}.{name}".lstrip("."), str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _settings(part, place, key)
    else:
        yield place, key, value


def _names_code(place: str, key: str, value: Any) -> bool:
    # The environment and the arguments of a server's process can load anything.
    if key == "trust_remote_code" or ".process." in place:
        return bool(value)
    if not isinstance(value, str) or not value or value in known_components():
        return False
    if key in PROGRAMS or _CODE.search(value) or "${" in value:  # a variable of the reader's could go to a server
        return True
    return EXTERNAL.match(value) is not None and not value.startswith("creditgraph.")


def check_trusted(path: Path, config: Mapping[str, Any]) -> None:
    """Raises RunError for a run whose configuration names outside code, unless it was made here or --trust was said."""
    if TRUST.get() or not (found := outside_code(config)) or _made_here(path):
        return
    raise RunError(
        f"{path}: its config.yaml names code outside of creditgraph ({'; '.join(found[:4])}), and this run "
        "was not made here by you. Read that code first; to load it, add --trust."
    )


def remember(path: Path) -> None:
    """Lists a run as made here by this user."""
    file = _listed()
    line = f"{_identity(path)}\n"
    try:
        if file.exists() and line in file.read_text():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as handle:
            handle.write(line)
    except OSError as error:
        logger.debug("%s: cannot be written (%s), so this run's own code will need --trust", file, error)


def _made_here(path: Path) -> bool:
    try:
        return f"{_identity(path)}\n" in _listed().read_text()
    except OSError:
        return False


def _listed() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "creditgraph" / "runs"


def _identity(path: Path) -> str:
    """Of a folder and its configuration: a copy of either is another run."""
    content = (path / "config.yaml").read_bytes()
    return hashlib.sha256(f"{path.stat().st_ino}\n".encode() + content).hexdigest()
