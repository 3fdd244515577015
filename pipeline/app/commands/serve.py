"""`creditgraph serve`: one engine server of a configuration, for job scripts; it ends with its signal.

Each server leaves its address in RUN/servers/START/, and when all have, they write RUN/servers/START.json.
`engine.rendezvous` names the folder: every start of a job has addresses of its own. A server that was started again
leaves its new address. TERM lets the learner finish an iteration first; USR2 ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.core.errors import ConfigError, RunError
from pipeline.run.compose import Experiment, build_experiment, compose
from pipeline.run.distributed.team import host
from pipeline.run.run_directory import write_aside, writing

GRACE_SECONDS = 25.0
ATTEMPT = "CREDITGRAPH_ATTEMPT"  # variable of job scripts: job and start, which tells the addresses of one from those of another
BY_HAND = "by-hand"  # outside of jobs
LOG = "CREDITGRAPH_LOG"  # variable of job scripts: start of the name of a file for everything that a server says
_SIOCGIFADDR = 0x8915


def main(options: argparse.Namespace) -> int:
    """Starts the server, publishes its address and waits."""
    ended = threading.Event()
    told: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        told.append(time.monotonic())
        if number == signal.SIGUSR2:
            ended.set()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handle)
    log = speak_into(os.environ.get(LOG, ""))
    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    attempt = os.environ.get(ATTEMPT, "")
    engine = start(experiment, options.index, attempt, log)
    published: list[Any] = []
    complete = False
    try:
        while not ended.is_set() and not (told and time.monotonic() > told[0] + GRACE_SECONDS):
            addresses = engine.backend.addresses()
            if addresses != published:
                leave_address(experiment.run_path, options.index, [dataclasses.asdict(a) for a in addresses], attempt)
                published, complete = addresses, False
                print(f"server {options.index} of {options.count} is ready: {addresses[0].url}", flush=True)
            # Asked again and again: on a shared folder a file of another node may show late.
            complete = complete or list_servers(experiment.run_path, options.index, options.count, attempt)
            (server,) = engine.backend.pool.servers
            if not server.process.running:
                raise RunError(
                    f"engine server {options.index} on {host()} {server.process.status()}.{server.log_lines()}"
                )
            ended.wait(0.2)
    finally:
        engine.close()
    return 0


def speak_into(prefix: str) -> Path | None:
    """Sends all output to PREFIX-NODE.log, in which the server's own output joins it; no prefix leaves it where it goes."""
    if not prefix:
        return None
    log = Path(f"{prefix}-{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}.log")
    with writing(log), log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return log


def start(experiment: Experiment, index: int, attempt: str = "", log: Path | None = None) -> Any:
    """The engine component with one server on this node's address."""
    from pipeline.core.component import Context
    from pipeline.run.run_settings import resolve_device

    nodes = [n for n in experiment.graph.nodes if hasattr(n.config, "rendezvous")]
    if not nodes:
        used = ", ".join(n.use for n in experiment.graph.nodes if n.use.startswith("engine.")) or "none"
        raise ConfigError(f"serve: the graph's engine ({used}) has no servers; wanted engine=vllm or engine=sglang.")
    (node, *_) = nodes
    folder = place(experiment.run_path, attempt) / str(index)
    with writing(folder):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if log is not None:
            own = folder / "logs" / "engine-0.log"
            own.unlink(missing_ok=True)
            own.symlink_to(log.resolve())
    pool = dataclasses.replace(node.config.pool, host=own_address())
    config = dataclasses.replace(node.config, servers=1, rendezvous="", addresses=(), pool=pool)
    component = node.cls(config)
    device = resolve_device(experiment.run.device)
    component.setup(
        Context(node=node.name, seed=experiment.run.seed, device=device, model=experiment.model, run_dir=folder)
    )
    return component


def own_address() -> str:
    """The address under which the learner reaches this node: of the interface that is set, else of the way to the learner's first node."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            if interface:
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
            if first := os.environ.get("MASTER_ADDR"):
                probe.connect((first, 9))  # sends nothing, but chooses the interface
                return str(probe.getsockname()[0])
            return socket.gethostbyname(socket.gethostname())
        except OSError:
            return "127.0.0.1"


def place(run: Path, attempt: str) -> Path:
    """Folder for the servers of one start of a job; what they list is in the file of its name with .json."""
    return run / "servers" / (attempt or BY_HAND)


def leave_address(run: Path, index: int, servers: list[dict[str, Any]], attempt: str = "") -> None:
    """Writes this server's address where the others find it."""
    write_aside(place(run, attempt) / f"{index}.json", json.dumps(servers))


def list_servers(run: Path, index: int, count: int, attempt: str = "") -> bool:
    """Writes START.json once all servers of this start have left their address; whether they have."""
    folder = place(run, attempt)
    try:
        parts = [json.loads((folder / f"{i}.json").read_text()) for i in range(count)]
    except OSError:
        return False
    listed = [{**s, "name": f"server {i}"} for i, part in enumerate(parts) for s in part]
    aside = folder / f"all-{index}.json"  # several servers may be the last one
    write_aside(aside, json.dumps({"format": 1, "servers": listed}, indent=1))
    target = folder.with_name(f"{folder.name}.json")
    with writing(target):
        os.replace(aside, target)
    return True
