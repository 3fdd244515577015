"""The engine servers of a job: their settings, their start, and the addresses that the learner reads.

Only this module of the cluster code depends on engines. Servers are steps of the job and the learner is another, so the
learner's engine starts no servers but reads a folder, `engine.rendezvous`. Each server writes its address to
RUN/servers/START/, and once all have, they write RUN/servers/START.json, for which the learner waits. START identifies
one start of one job, so that addresses of an earlier one are never used. A restarted server writes its new address.
"""

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditgraph.components.engine.served.addresses import (
    ATTEMPT,
    BY_HAND,
    Address,
    own_address,
    read_rendezvous,
    write_rendezvous,
)
from creditgraph.components.engine.served.parts import meet
from creditgraph.components.engine.served.process import ServerProcess, last_lines
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.pipeline.app.cluster.settings import Cluster
from creditgraph.pipeline.core.component import Context, set_up
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.distributed.network import address_of
from creditgraph.pipeline.run.run_directory import make_folder, writing
from creditgraph.pipeline.run.run_settings import resolve_device

SERVERS = "servers"  # folder of a run directory


def served_engine(graph: Graph, place: str) -> Node:
    """The engine of a graph that can run in servers; raises ConfigError unless there is exactly one."""
    engines = [node for node in graph.nodes if isinstance(node.config, ServerSettings)]
    if len(engines) == 1:
        return engines[0]
    if engines:
        names = ", ".join(node.name for node in engines)
        raise ConfigError(f"{place}: the engines {names} all have servers; expected one engine in the graph.")
    used = ", ".join(node.use for node in graph.nodes if node.use.startswith("engine.")) or "none"
    raise ConfigError(
        f"{place}: the graph's engine ({used}) has no servers; expected engine=vllm or engine=sglang, or a cluster "
        "without engine servers such as cluster=colocated."
    )


def learner_overrides(experiment: Experiment, cluster: Cluster, run: Path, overrides: Sequence[str]) -> list[str]:
    """Settings with which the learner of a job uses the servers; the user's settings for weights and GPUs are kept."""
    engine = served_engine(experiment.graph, f"cluster.placement={cluster.placement}").name
    settings: dict[str, Any] = {
        "rendezvous": run / SERVERS,
        "servers": 0,  # the job starts them, not the learner
        "pool.start_seconds": cluster.ready_seconds,
    }
    chosen = {text.lstrip("+").partition("=")[0] for text in overrides}
    if cluster.all_nodes > 1 and f"{engine}.channel.path" not in chosen:
        settings["channel.path"] = run / "weights"  # /dev/shm is another one on every node
    if cluster.gpus_per_node and f"{engine}.channel.kind" not in chosen:
        settings["channel.kind"] = "broadcast"  # as files, every server reads all weights from the shared folder
    if cluster.gpus_per_server > 1 and f"{engine}.tensor_parallel" not in chosen:
        settings["tensor_parallel"] = cluster.gpus_per_server
    return [f"{engine}.{name}={value}" for name, value in settings.items()]


class EngineServer:
    """One server of an experiment's engine, on this node's address.

    Args:
        experiment: the learner's, as `learner_overrides` has it.
        index: number of this server.
        count: number of servers in all.
        log: file that the server's own output goes to, None for one below its folder.
        nodes: nodes over which the server runs, each of which has this class; the first publishes the address.

    Raises:
        ConfigError: several nodes, but no task of a SLURM step with one per node.
        RunError: the first node left no address in time.
    """

    def __init__(self, experiment: Experiment, index: int, count: int, log: Path | None = None, nodes: int = 1) -> None:
        self.index = index
        self.count = count
        self._run = experiment.run_path
        self._attempt = os.environ.get(ATTEMPT, "")
        self._left: list[Address] = []
        self._listed = False
        node = served_engine(experiment.graph, "serve")
        folder = folder_of(self._run, self._attempt) / str(index)
        make_folder(folder / "logs")
        settings: Any = node.config
        host = server_address()
        part = meet(nodes, host, folder, settings.pool.start_seconds) if nodes > 1 else None
        pool = dataclasses.replace(settings.pool, host=host)
        if part is not None:
            pool = dataclasses.replace(pool, restarts=0)  # the job starts all nodes of it again
        helps = part is not None and part.rank > 0
        # The engine quotes the end of its server's log when that ends, so it must find it where it expects it.
        own = folder / "logs" / (f"node-{part.rank}.log" if part and helps else "engine-0.log")
        if log is not None:
            with writing(folder):
                own.unlink(missing_ok=True)
                own.symlink_to(log.resolve())
        # One server on this host without a rendezvous, as if this process had the engine for itself.
        alone = dataclasses.replace(settings, servers=1, rendezvous="", addresses=(), pool=pool)
        context = Context(
            node=node.name,
            seed=experiment.run.seed,
            device=resolve_device(experiment.run.device),
            model=experiment.model,
            run_dir=folder,
        )
        engine: Any = node.cls(alone)
        engine.part = part
        self._engine = engine
        self._process: ServerProcess | None = engine.join(context, own) if helps else None
        if not helps:
            set_up(engine, context)

    def publish(self) -> str:
        """Writes the server's address for the learner; returns its URL if it is new, else "".

        Called repeatedly, because on a shared folder a file of another node may appear late.

        Raises:
            RunError: the server has ended.
        """
        if self._process is not None:
            self._check(self._process, last_lines(self._process.output()))
            return ""
        addresses: list[Address] = list(self._engine.backend.addresses())
        is_new = addresses != self._left
        if is_new:
            leave_address(self._run, self.index, addresses, self._attempt)
            self._left = addresses
            self._listed = False
        self._listed = self._listed or list_servers(self._run, self.index, self.count, self._attempt)
        (server,) = self._engine.backend.pool.servers
        self._check(server.process, server.log_lines())
        return addresses[0].url if is_new else ""

    def _check(self, process: ServerProcess | None, lines: str) -> None:
        if process is None or not process.running:
            node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
            ended = process.status() if process else "did not respond and was ended"
            raise RunError(f"engine server {self.index} on {node} {ended}.{lines}")

    def close(self) -> None:
        """Ends the server."""
        if self._process is not None:
            self._process.stop()
        self._engine.close()


def server_address() -> str:
    """The address under which the learner reaches this node.

    That of the interface that is set, else of the one that leads to the learner's first node.
    """
    try:
        if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
            return address_of(interface)
        if first := os.environ.get("MASTER_ADDR"):
            return own_address(first)
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def folder_of(run: Path, attempt: str) -> Path:
    """Folder for the servers of one start of a job; the file with all of them has its name and .json."""
    return run / SERVERS / (attempt or BY_HAND)


def leave_address(run: Path, index: int, servers: Sequence[Address], attempt: str = "") -> None:
    """Writes a server's address for the other servers."""
    write_rendezvous(folder_of(run, attempt) / f"{index}.json", servers)


def list_servers(run: Path, index: int, count: int, attempt: str = "") -> bool:
    """Writes START.json once all servers of this start have written their address; returns whether they have."""
    folder = folder_of(run, attempt)
    try:
        parts = [read_rendezvous(folder / f"{i}.json", 0.0) for i in range(count)]
    except RunError:
        return False
    servers = [
        dataclasses.replace(server, name=f"server {i}", listed_in="") for i, part in enumerate(parts) for server in part
    ]
    aside = folder / f"all-{index}.json"  # unique, because several servers may write it at the same time
    write_rendezvous(aside, servers)
    target = folder.with_name(f"{folder.name}.json")
    with writing(target):
        os.replace(aside, target)
    return True
