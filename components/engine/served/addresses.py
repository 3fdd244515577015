"""Addresses of servers, the file that lists them, free ports, and the GPUs of servers to be started."""

import json
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from creditgraph.components.engine.served.settings import PoolSettings, ServerSettings
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.run_directory import replacing

ATTEMPT = "CREDITGRAPH_ATTEMPT"  # variable of job scripts: job and start
UNIX = "unix:"  # begins the address of a server on a Unix socket
LOOPBACK = "127.0.0.1"
BY_HAND = "by-hand"  # outside of jobs
SHORTEST_KEY = 16  # characters
SAY_SECONDS = 10.0  # between two lines about the same wait
_POLL_SECONDS = 0.2

logger = logging.getLogger("creditgraph")


class Waiting:
    """A wait with an end, which says every ten seconds what it is for.

    Args:
        what: what the lines name.
        setting: the setting that sets its length.
        seconds: its length.
    """

    def __init__(self, what: str, setting: str, seconds: float) -> None:
        self.setting = setting
        self.seconds = seconds
        self._what = what
        self._begin = time.monotonic()
        self._next = SAY_SECONDS

    def is_over(self, state: str) -> bool:
        """Whether the time is up; logs a line where one is due. `state` says how it looks now."""
        waited = time.monotonic() - self._begin
        if waited >= self._next:
            self._next = waited + SAY_SECONDS
            limit = f"{waited:.0f} of at most {self.seconds:.0f} s"
            logger.warning("waiting for %s: %s; %s (%s)", self._what, state, limit, self.setting)
        return waited >= self.seconds


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a server.

    Attributes:
        url: "http://host:port" or "unix:PATH" of a socket; "" for a server that is to be started.
        identity: served model name that it must report, "" to accept any.
        name: name in messages, for example "server 1".
        log: its log file, "" if not known.
        pid: id of the process that guards it, 0 if not known.
        listed_in: rendezvous file that lists it, "" for none.
        gpus: CUDA_VISIBLE_DEVICES of a server that is to be started, "" to leave the variable unchanged.
        key: the key without which it refuses requests, "" for one without; no message shows it.
    """

    url: str
    identity: str = ""
    name: str = ""
    log: str = ""
    pid: int = 0
    listed_in: str = ""
    gpus: str = ""
    key: str = field(default="", repr=False)


def wait_for_server(name: str, settings: PoolSettings, started: bool) -> Waiting:
    """The wait for a server's first response; one that was `started` for the run may still load its model."""
    limit = "start_seconds" if started else "connect_seconds"
    return Waiting(f"{name} to respond", f"engine.pool.{limit}", getattr(settings, limit))


def find_servers(
    settings: ServerSettings, place: str = "engine", replica: int = 0, gpus: Sequence[Sequence[str]] = ()
) -> list[Address]:
    """Returns the servers of the settings; raises ConfigError if they have both addresses and a rendezvous.

    Args:
        settings: settings of the servers.
        place: node name, for messages.
        replica: data-parallel replica that starts its own servers; part of their names from the second on.
        gpus: GPUs of each server to be started, from `share_gpus`; empty on a CPU.
    """
    if settings.addresses and settings.rendezvous:
        raise ConfigError(
            f"node '{place}': expected one way to find servers, got addresses and rendezvous. Unset one of them."
        )
    if settings.rendezvous:
        return read_rendezvous(Path(settings.rendezvous), settings.pool.start_seconds)
    if settings.addresses:
        key = read_key(Path(settings.key_file)) if settings.key_file else ""
        return [_parse(text, n, key) for n, text in enumerate(settings.addresses)]
    prefix = f"{replica}." if replica else ""
    return [
        Address(url="", name=f"server {prefix}{n}", gpus=",".join(gpus[n]) if gpus else "")
        for n in range(settings.servers)
    ]


def _parse(text: str, index: int, key: str) -> Address:
    if text.startswith(f"{UNIX}/"):
        return Address(url=text, name=f"server {index}", key=key)
    url = text if "://" in text else f"http://{text}"
    host, colon, port = url.rstrip("/").partition("://")[2].rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ConfigError(
            f"engine.addresses: expected host:port, for example 127.0.0.1:8000, or unix:/PATH, got '{text}'."
        )
    return Address(url=url.rstrip("/"), name=f"server {index}", key=key)


def read_key(path: Path) -> str:
    """The key in a file that only its owner may read; raises ConfigError for another one."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"engine.key_file: expected a file with the servers' key at {path}, which cannot be read ({error})."
        ) from error
    if mode & 0o077:
        raise ConfigError(
            f"engine.key_file: expected {path} to be readable for its owner only, got mode {mode:o}. "
            f"Run: chmod 600 {path}"
        )
    if len(key) < SHORTEST_KEY or not key.isascii() or any(map(str.isspace, key)):
        raise ConfigError(
            f"engine.key_file: expected one line of at least {SHORTEST_KEY} ASCII characters without spaces in {path}. "
            f"Make one with: (umask 077; openssl rand -hex 32 > {path})"
        )
    return key


def with_keys(addresses: Sequence[Address]) -> list[Address]:
    """The addresses with names, and with one new key for all servers that are to be started."""
    key = secrets.token_hex(32)
    return [
        replace(address, name=address.name or f"server {n}", key=address.key if address.url else key)
        for n, address in enumerate(addresses)
    ]


def write_rendezvous(path: Path, servers: Sequence[Address]) -> None:
    """Writes `engines.json` in one step, for other processes of this user to read: it holds the servers' keys."""
    text = json.dumps({"format": 1, "servers": [asdict(s) for s in servers]}, indent=1)
    with replacing(path) as aside:
        aside.unlink(missing_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text + "\n")


def read_rendezvous(path: Path, seconds: float) -> list[Address]:
    """The servers in an `engines.json`, waiting up to `seconds` for it; raises RunError when there are none.

    A path that does not end in .json is a folder with one file per start of a job.
    """
    if path.suffix != ".json":
        path = path / f"{os.environ.get(ATTEMPT) or BY_HAND}.json"
    waiting = Waiting(f"the addresses of servers in {path}", "engine.pool.start_seconds", seconds)
    while not path.is_file():
        if waiting.is_over("no such file"):
            raise RunError(
                f"engine.rendezvous: expected the addresses of servers in {path}, got no such file within "
                f"{seconds:g} s. Check that the job that starts the servers is running and writes to this path."
            )
        time.sleep(_POLL_SECONDS)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["servers"]
        servers = [Address(**{**entry, "listed_in": str(path)}) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f'engine.rendezvous: expected {{"servers": [{{"url": "http://host:port"}}, …]}} in {path}, '
            f"which cannot be read ({error})."
        ) from error
    if not servers:
        raise RunError(f"engine.rendezvous: expected at least one server in {path}, got none.")
    return servers


def relocated(address: Address) -> Address | None:
    """The new address of a server that was restarted elsewhere, from its rendezvous file; None if it is unchanged."""
    if not address.listed_in:
        return None
    try:
        servers = read_rendezvous(Path(address.listed_in), 0.0)
    except RunError:
        return None
    return next((s for s in servers if s.name == address.name and s != address), None)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before a server does; the caller then tries again."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, host: str, setting: str) -> None:
    """Raises ConfigError, naming the setting, when a port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            raise ConfigError(
                f"{setting}: expected a free port for a server, got {port}, which is in use on this host. "
                f"Choose another, or set {setting}=0 to take free ports."
            ) from None


def own_address(host: str, port: int = 9) -> str:
    """The address of this host by which `host` can reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # UDP: sends nothing, but chooses the interface
        return str(probe.getsockname()[0])


def share_gpus(servers: int, each: int, gpus: Sequence[str], ranks: Ranks | None = None) -> list[list[str]]:
    """The GPUs of every server that the leader of a replica starts on its host; raises ConfigError for too few.

    Ranks of a host own GPU 0, 1, … in the order of their numbers. Servers take the GPUs of their replica's ranks, from
    the leader's on; where they need more than those, the servers of one replica follow those of the replica before. A
    process that is alone leaves GPU 0 to its learner where there are enough others.

    Args:
        servers: number of servers of this rank.
        each: GPUs of one server (tensor parallel).
        gpus: all that this process sees, as CUDA_VISIBLE_DEVICES would name them.
        ranks: this process among all of the run.

    >>> share_gpus(2, 1, ["0", "1"]), share_gpus(2, 1, ["0", "1", "2", "3"])
    ([['0'], ['1']], [['1'], ['2']])
    >>> share_gpus(1, 2, ["4", "5", "6", "7"], Ranks(world=2, num_replicas=2, local_rank=1))
    [['6', '7']]
    >>> share_gpus(2, 1, list("01234567"), Ranks(world=8, num_replicas=2, local_rank=4))
    [['4'], ['5']]
    """
    ranks = ranks or Ranks()
    needed = servers * each
    first = ranks.local_rank
    if needed > ranks.per_replica:
        first = ranks.local_rank // ranks.per_replica * needed
    if ranks.world == 1 and len(gpus) > needed:
        first = 1
    if first + needed > len(gpus):
        raise ConfigError(
            f"engine.servers: expected {first + needed} GPUs for {servers} servers of {each} each, from GPU {first} "
            f"on, but this process sees {len(gpus)} ({', '.join(gpus) or 'none'}). Lower engine.servers or "
            "engine.tensor_parallel, start fewer ranks per host, or name servers that run elsewhere."
        )
    return [[gpus[first + n * each + k] for k in range(each)] for n in range(servers)]


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process sees, in the format of CUDA_VISIBLE_DEVICES."""
    import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (names or [str(n) for n in range(torch.cuda.device_count())])[: torch.cuda.device_count()]
