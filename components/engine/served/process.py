"""A server process started by this process: its log, its exit status, and the guard that ends it with the run."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from creditgraph.components.engine.folders import abandoned, own_folder
from creditgraph.components.engine.guard import clean

GUARD = Path(__file__).parents[1] / "guard.py"
STOP_SECONDS = 12.0
LOG_LINES = 8
KEY_VARIABLE = "CREDITGRAPH_SERVER_KEY"  # environment variable from which a server takes its key
SOCKET = "http"  # name of the Unix socket in the scratch folder
_SCRATCH = "creditgraph-"
_LONGEST_TEMPORARY = 20  # characters; paths of sockets have 107 at most, of which a server takes 85
_LOG_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Command and environment of a server process.

    Attributes:
        command: argument list; a part "{host}" becomes the address to listen on. A key has no place in it, because
            every user of the host sees command lines.
        environment: variables added to this process's own; None removes one. A value "{key}" becomes the server's key.

    "{scratch}" in either becomes a folder of this user alone, with a short path, that is removed with the server.
    """

    command: list[str]
    environment: Mapping[str, str | None] = field(default_factory=dict)


class ServerProcess:
    """One server that this process started, under a guard that ends it when this process is gone.

    Args:
        launch: what to start.
        log: file to which its output is appended.
        remove: folders of the run that the guard removes should the run end without stopping the server.
        host: address to listen on, which replaces "{host}" in the command.
        key: the server's key.

    Attributes:
        scratch: folder of the server's sockets and temporary files.
    """

    def __init__(
        self, launch: Launch, log: Path, remove: Sequence[Path] = (), host: str = "127.0.0.1", key: str = ""
    ) -> None:
        self.log = log
        self.scratch = make_scratch()
        environment = dict(os.environ)
        for name, value in launch.environment.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = key if value == "{key}" else value.replace("{scratch}", str(self.scratch))
        # Isolated, so that neither the user's folders nor ours hide a module of the standard library.
        guard = [sys.executable, "-I", "-S", str(GUARD), "--run", str(os.getpid()), "--scratch", str(self.scratch)]
        for path in remove:
            guard += ["--orphaned", str(path)]
        command = [
            host if part == "{host}" else part.replace("{scratch}", str(self.scratch)) for part in launch.command
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [*guard, "--", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which then ends its servers in order
            )

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def status(self) -> str:
        """Exit status of the server, for messages."""
        code = self._process.poll()
        if code is None:
            return "is running"
        number = code - 128 if code > 128 else -code
        if number > 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {code}"

    def output(self) -> str:
        """The last 64 KiB that this server wrote to its log."""
        return read_log(self.log, self._start)

    def stop(self) -> None:
        """Ends the server and everything it started; returns when they are gone."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def make_scratch() -> Path:
    """A folder for one server, after those of dead runs of this user are removed with what their servers have left."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _LONGEST_TEMPORARY:
        parent = Path("/tmp")
    for folder in abandoned(parent, _SCRATCH):
        clean(folder)
    scratch = own_folder(parent, _SCRATCH)
    scratch.mkdir(mode=0o700)
    return scratch


def read_log(log: Path, start: int = 0) -> str:
    """The last 64 KiB of a log from the byte `start` on; "" when it cannot be read."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = LOG_LINES) -> str:
    """The last non-empty lines, indented for a message; "" without any."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line[:240]}" for line in lines[-count:])
