"""Server processes: started with their log, found by their address, ended without a trace."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from components.engine.served.dialect import Launch
from pipeline.core.errors import ConfigError, RunError

GUARD = Path(__file__).with_name("guard.py")
STOP_SECONDS = 12.0
LOG_LINES = 8
ATTEMPT = "CREDITGRAPH_ATTEMPT"  # variable of job scripts: job and start
BY_HAND = "by-hand"  # outside of jobs


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server is.

    Attributes:
        url: "http://host:port".
        identity: served model name that it must tell, "" to take any.
        name: in messages, for example "server 1".
        log: its log file, "" when it is not known.
        pid: of the process that keeps it, 0 when it is not known.
        found: rendezvous file that lists it, "" for none.
        gpus: CUDA_VISIBLE_DEVICES of a server that is started here, "" to leave the variable alone.
    """

    url: str
    identity: str = ""
    name: str = ""
    log: str = ""
    pid: int = 0
    found: str = ""
    gpus: str = ""


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now. Another process may take it before a server does; who starts one tries again then."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def check_port(port: int, setting: str) -> None:
    """Raises ConfigError when a port that the user chose is taken."""
    if not port_is_free(port):
        raise ConfigError(
            f"{setting}: port {port} is in use on this host; wanted a free one for a server. "
            f"Choose another, or set {setting}=0 to take free ports."
        )


class ServerProcess:
    """One server that this process started, under a guard that ends it when this process is gone.

    Args:
        launch: what to start.
        log: file that takes its output; appended to.
        remove: folders of the run that the guard removes should the run end without stopping the server.
        host: address to listen on, in place of "{host}" in the command.
    """

    def __init__(self, launch: Launch, log: Path, remove: Sequence[Path] = (), host: str = "127.0.0.1") -> None:
        self.log = log
        # Servers put sockets here, whose paths must be short.
        self.scratch = Path(tempfile.mkdtemp(prefix="creditgraph-"))
        given = {
            key: value and value.replace("{scratch}", str(self.scratch)) for key, value in launch.environment.items()
        }
        environment = {**os.environ, **given}
        guard = [sys.executable, "-E", "-S", str(GUARD), "--parent", str(os.getpid())]
        guard += ["--remove", str(self.scratch)]
        for path in remove:
            guard += ["--orphaned", str(path)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [*guard, "--", *(host if part == "{host}" else part for part in launch.command)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in environment.items() if value is not None},
                start_new_session=True,  # Ctrl-C is for this process, which then ends its servers in order
            )

    @property
    def pid(self) -> int:
        """Of the guard."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def ended(self) -> str:
        """How it ended, for messages."""
        code = self._process.poll()
        if code is None:
            return "runs"
        number = code - 128 if code > 128 else -code
        if number > 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(number).name}"
        return f"ended with code {code}"

    def output(self) -> str:
        """What this process wrote to its log (the last 64 KiB)."""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, end - 65536))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """Ends the server and everything it started; returns when they are gone."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask_to_stop(self) -> None:
        """As `stop`, without waiting."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(b"stop")
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def last_lines(text: str, count: int = LOG_LINES) -> str:
    """The last non-empty lines, indented for a message; "" without any."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "".join(f"\n    {line[:240]}" for line in lines[-count:])


def write_rendezvous(path: Path, servers: Sequence[Address]) -> None:
    """Writes `engines.json` in one step: what who looks for servers reads."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(
        json.dumps({"format": 1, "servers": [asdict(s) for s in servers]}, indent=2) + "\n", encoding="utf-8"
    )
    aside.replace(path)


def read_rendezvous(path: Path, seconds: float) -> list[Address]:
    """The servers in an `engines.json`, waiting up to `seconds` for it; raises RunError when there are none.

    A path that does not end in .json is a folder, in which each start of a job has a file of its own.
    """
    if path.suffix != ".json":
        path = path / f"{os.environ.get(ATTEMPT) or BY_HAND}.json"
    deadline = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() >= deadline:
            raise RunError(
                f"engine.rendezvous: no file {path} after {seconds:g} s; wanted the addresses of servers there. "
                "See that the job that starts the servers runs and writes to this path."
            )
        time.sleep(0.2)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["servers"]
        found = [Address(**{**entry, "found": str(path)}) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'engine.rendezvous: {path} cannot be read ({error}); wanted {{"servers": [{{"url": "http://host:port"}}, …]}}.'
        ) from error
    if not found:
        raise RunError(f"engine.rendezvous: {path} lists no servers; wanted at least one.")
    return found


def relocated(address: Address) -> Address | None:
    """Where a server is that was started anew elsewhere, as its rendezvous file tells; None without news."""
    if not address.found:
        return None
    try:
        servers = read_rendezvous(Path(address.found), 0.0)
    except RunError:
        return None
    return next((s for s in servers if s.name == address.name and s != address), None)


def address_of(text: str, index: int) -> Address:
    """An address as a user writes it: host:port or a URL; raises ConfigError for anything else."""
    url = text if "://" in text else f"http://{text}"
    host, colon, port = url.rstrip("/").partition("://")[2].rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(f"engine.addresses: found '{text}'; wanted host:port, for example 127.0.0.1:8000.")
    return Address(url=url.rstrip("/"), name=f"server {index}")


def share_gpus(
    servers: int, each: int, gpus: Sequence[str], local_rank: int = 0, world: int = 1, per_replica: int = 1
) -> list[list[str]]:
    """The GPUs of every server that the leader of a replica starts on its host; raises ConfigError when the host has too few.

    Ranks of a host own GPU 0, 1, … in the order of their numbers. Servers take the GPUs of their replica's ranks, from
    the leader's on; where they need more than those, the servers of one replica follow those of the replica before. A
    process that is alone leaves GPU 0 to its learner where there are enough others.

    Args:
        servers: of this rank.
        each: GPUs of one server (tensor parallel).
        gpus: all that this process sees, as CUDA_VISIBLE_DEVICES would name them.
        local_rank: of this process on its host.
        world: ranks of the run.
        per_replica: ranks of a replica.

    >>> share_gpus(2, 1, ["0", "1"]), share_gpus(2, 1, ["0", "1", "2", "3"])
    ([['0'], ['1']], [['1'], ['2']])
    >>> share_gpus(1, 2, ["4", "5", "6", "7"], local_rank=1, world=2)
    [['6', '7']]
    >>> share_gpus(2, 1, list("01234567"), local_rank=4, world=8, per_replica=4)
    [['4'], ['5']]
    """
    needed = servers * each
    first = local_rank if needed <= per_replica else local_rank // per_replica * needed
    if world == 1 and len(gpus) > needed:
        first = 1
    if first + needed > len(gpus):
        raise ConfigError(
            f"engine.servers: {servers} of {each} GPUs each, from GPU {first} on, but this process sees {len(gpus)} "
            f"({', '.join(gpus) or 'none'}); wanted {first + needed}. Lower engine.servers or engine.tensor_parallel, "
            "start fewer "
            "ranks per host, or name servers that run elsewhere."
        )
    return [[gpus[first + n * each + k] for k in range(each)] for n in range(servers)]


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES takes them."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(n) for n in range(torch.cuda.device_count())])[: torch.cuda.device_count()]


def find_servers(
    servers: int,
    addresses: Sequence[str],
    rendezvous: str,
    seconds: float,
    place: str = "engine",
    replica: int = 0,
    gpus: Sequence[Sequence[str]] = (),
) -> list[Address]:
    """The servers that a user asks for; those to be started have no URL. Raises ConfigError for both addresses and a rendezvous.

    Args:
        servers: number of processes to start on this host, where neither of the others is given.
        addresses: host:port of servers that run.
        rendezvous: an `engines.json` that lists them, waited for up to `seconds`; "" for none.
        seconds: see `rendezvous`.
        place: node name, for messages.
        replica: data-parallel replica that starts servers of its own; part of their names from the second on.
        gpus: of each server that is started, from `share_gpus`; empty on a CPU.
    """
    if addresses and rendezvous:
        raise ConfigError(
            f"node '{place}': addresses and rendezvous are both set; wanted one way to find servers. Unset one of them."
        )
    if rendezvous:
        return read_rendezvous(Path(rendezvous), seconds)
    if addresses:
        return [address_of(text, n) for n, text in enumerate(addresses)]
    prefix = f"{replica}." if replica else ""
    return [Address(url="", name=f"server {prefix}{n}", gpus=",".join(gpus[n]) if gpus else "") for n in range(servers)]
