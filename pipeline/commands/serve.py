"""`creditgraph serve`: one engine server of a configuration, for job scripts; it ends with its signal.

Each server leaves its address in RUN/servers/, and the last one ready writes RUN/servers.json, which `engine.rendezvous` names.
TERM lets the learner finish an iteration first; USR2 ends at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.compose import Experiment, build_experiment, compose
from pipeline.errors import ConfigError
from pipeline.run_directory import write_aside, writing

GRACE_SECONDS = 25.0


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
    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    engine = start(experiment, options.index)
    try:
        publish(experiment.run_path, options.index, options.count, [dataclasses.asdict(a) for a in engine.servers.addresses()])
        print(f"server {options.index} of {options.count} is ready: {engine.servers.addresses()[0].url}", flush=True)
        while not ended.wait(0.5):
            if told and time.monotonic() > told[0] + GRACE_SECONDS:
                break
    finally:
        engine.close()
    return 0


def start(experiment: Experiment, index: int) -> Any:
    """The engine component with one server on this node's address."""
    from pipeline.component import Context
    from pipeline.run_settings import resolve_device

    nodes = [n for n in experiment.graph.nodes if hasattr(n.config, "rendezvous")]
    if not nodes:
        used = ", ".join(n.use for n in experiment.graph.nodes if n.use.startswith("engine.")) or "none"
        raise ConfigError(f"serve: the graph's engine ({used}) has no servers; wanted engine=vllm or engine=sglang.")
    (node, *_) = nodes
    folder = experiment.run_path / "servers" / str(index)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    pool = dataclasses.replace(node.config.pool, host=own_address())
    config = dataclasses.replace(node.config, servers=1, rendezvous="", addresses=(), pool=pool)
    component = node.cls(config)
    device = resolve_device(experiment.run.device)
    component.setup(Context(node=node.name, seed=experiment.run.seed, device=device, model=experiment.model, run_dir=folder))
    return component


def own_address() -> str:
    """The address under which other nodes reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def publish(run: Path, index: int, count: int, servers: list[dict[str, Any]]) -> None:
    """Leaves this server's address, and writes the list when all are there."""
    folder = run / "servers"
    write_aside(folder / f"{index}.json", json.dumps(servers))
    found = [folder / f"{i}.json" for i in range(count)]
    if all(f.exists() for f in found):
        listed = [{**s, "name": f"server {i}"} for i, f in enumerate(found) for s in json.loads(f.read_text())]
        write_aside(run / "servers.json", json.dumps({"format": 1, "servers": listed}, indent=1))
