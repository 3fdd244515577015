"""A cluster description: `configs/cluster/NAME.yaml`, with overrides such as cluster.nodes=4."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from creditgraph.components.models.gpus import DEVICES
from creditgraph.pipeline.core.errors import ConfigError, GraphError, did_you_mean
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.run.compose.choices import list_choices, read_yaml, search_dirs

_AT_LEAST_ONE = ("nodes", "chain", "gpus_per_server", "nodes_per_server", "cpus_per_task")
_AT_LEAST_ZERO = (
    "engine_nodes",
    "gpus_per_node",
    "ranks_per_node",
    "servers_per_node",
    "warn_seconds",
    "engine_restarts",
    "learner_restarts",
    "spare_nodes",
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Resources and options of a job."""

    placement: Literal["here", "colocated", "disaggregated"] = "colocated"
    """here: no SLURM, this machine; colocated: engines run in the learner's ranks and share their GPUs; disaggregated:
    engine servers on separate nodes (or on a part of one node)"""
    nodes: int = 1
    """nodes of the learner"""
    engine_nodes: int = 0
    """further nodes that hold engine servers; 0 with disaggregated puts the servers on the learner's nodes"""
    spare_nodes: int = 0
    """further nodes that wait to take the place of lost ones; without one a job that lost a node is requeued"""
    gpus_per_node: int = 8
    """GPUs requested on every node; 0 is a CPU job"""
    gpu: str = ""
    """kind of the GPUs, such as h100: `submit` then refuses a run that needs more of their memory by the layout plan"""
    ranks_per_node: int = 0
    """learner processes per node; 0 is one per GPU"""
    servers_per_node: int = 0
    """engine servers per engine node; 0 is gpus_per_node / gpus_per_server"""
    gpus_per_server: int = 1
    """tensor-parallel GPUs of one engine server"""
    nodes_per_server: int = 1
    """engine nodes of one server, for a model that one node does not hold: it then has all GPUs of these nodes"""
    cpus_per_task: int = 8
    """cores for each learner process and each server"""
    memory: str = ""
    """memory per node as sbatch writes it (400G); empty leaves it to the partition"""
    partition: str = ""
    """SLURM partition; empty is the default one"""
    account: str = ""
    """account to charge"""
    qos: str = ""
    """quality of service"""
    time: str = "24:00:00"
    """time limit of one start; the run continues in the next one"""
    warn_seconds: int = 300
    """seconds before the time limit at which the learner is signalled to checkpoint; longer than one iteration"""
    chain: int = 1
    """jobs submitted one after the other (--dependency=singleton), for runs longer than a time limit"""
    ready_seconds: int = 900
    """deadline for the engine servers of one start to be ready"""
    engine_restarts: int = 3
    """how often an engine server that ended is restarted in one start of the job; after that, the others continue"""
    learner_restarts: int = 3
    """how often in a row, without a new checkpoint, a learner that lost a process or a node is restarted inside the
    allocation; 0 ends the job"""
    interface: str = ""
    """network interface for NCCL and gloo, such as ib0; empty: NCCL chooses one, gloo takes the one through which the
    first node is reached"""
    ib_hca: str = ""
    """InfiniBand adapters for NCCL as NCCL_IB_HCA writes them, such as mlx5_0,mlx5_1; empty: NCCL takes all"""
    cpu_bind: str = "cores"
    """binding of the tasks of a step to CPUs as srun's --cpu-bind writes it; neighbouring tasks share a socket, and so
    its memory (--distribution=block:block)"""
    root: str = ""
    """shared folder of run directories; empty keeps run.root"""
    python: str = ""
    """Python of every step; empty: the one that submits. With a container, the image's own, which has creditgraph"""
    container: str = ""
    """container image for every step, or empty"""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """what starts the container: srun's plugin pyxis, or apptainer in each task"""
    mounts: str = ""
    """further mounts of the container, SOURCE:TARGET[,…]; the working directory and the run directory are mounted where
    they are"""
    scratch: str = ""
    """node-local folder, such as /local or $TMPDIR, to which each node copies `scratch_copies` before anything else and
    from which it removes them when the job ends; empty: all is read from the shared folders"""
    scratch_copies: list[Literal["environment", "model"]] = field(default_factory=lambda: ["environment", "model"])
    """environment: the virtual environment that submits; model: the folder of model.path, or its files in the hub's
    cache"""
    setup: list[str] = field(default_factory=list)
    """shell lines before anything runs: module load, source"""
    environment: dict[str, str] = field(default_factory=dict)
    """variables exported to every step"""
    sbatch: list[str] = field(default_factory=list)
    """further sbatch options, each a whole one such as --exclusive"""

    def __post_init__(self) -> None:
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            for name in names:
                if getattr(self, name) < least:
                    raise ValueError(f"{name}: expected {least} or more, got {getattr(self, name)}.")
        if self.gpus_per_node == 0 and self.ranks_per_node == 0:
            raise ValueError(
                "gpus_per_node 0 is a CPU job; expected ranks_per_node, the number of learner processes on each node."
            )
        self._check_nodes_per_server()
        if self.placement == "disaggregated" and self.servers == 0:
            raise ValueError(
                f"disaggregated, but no engine server: gpus_per_node {self.gpus_per_node}, gpus_per_server "
                f"{self.gpus_per_server}, servers_per_node {self.servers_per_node}; expected at least one. Set "
                "servers_per_node."
            )
        ranks = self.ranks_per_node or self.gpus_per_node
        server_gpus = self.servers * self.gpus_per_server // self.nodes if not self.engine_nodes else 0
        if self.gpus_per_node and ranks + server_gpus > self.gpus_per_node:
            raise ValueError(
                f"a node's {ranks} ranks take {ranks} GPUs and its engine servers {server_gpus}, but gpus_per_node is "
                f"{self.gpus_per_node}. Lower ranks_per_node or servers_per_node, or give the servers engine_nodes of "
                "their own."
            )
        if self.gpu and self.gpu not in DEVICES:
            raise ValueError(f"gpu: expected one of {', '.join(DEVICES)}, or empty, got '{self.gpu}'.")
        if self.container and not self.python:
            raise ValueError(
                "container, but no python: the environment of this machine does not run inside an image; expected "
                "python, the path in the image of a Python that has creditgraph."
            )
        if self.scratch and self.python and "environment" in self.scratch_copies:
            raise ValueError(
                f"scratch copies the environment that submits, but the steps run {self.python}; set scratch_copies: "
                "[model], or no python."
            )
        if not re.fullmatch(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){0,2}", self.time):
            raise ValueError(f"time: expected hours:minutes:seconds or days-hours:minutes:seconds, got '{self.time}'.")

    def _check_nodes_per_server(self) -> None:
        nodes, gpus, node = self.nodes_per_server, self.gpus_per_server, self.gpus_per_node
        if nodes == 1:
            if self.placement == "disaggregated" and 0 < node < gpus:
                raise ValueError(
                    f"gpus_per_server: expected at most {node}, the GPUs of a node, got {gpus}. For servers over "
                    f"several nodes set nodes_per_server={-(-gpus // node)} too."
                )
        elif self.placement != "disaggregated" or not self.engine_nodes or self.engine_nodes % nodes:
            raise ValueError(
                f"nodes_per_server {nodes}: expected disaggregated servers, and engine_nodes a multiple of it, got "
                f"{self.placement} with engine_nodes {self.engine_nodes}."
            )
        elif self.servers_per_node or gpus % nodes or (node and gpus != nodes * node):
            raise ValueError(
                f"nodes_per_server {nodes}: expected servers that have their nodes for themselves, so gpus_per_server "
                f"{nodes * (node or 1)} and servers_per_node 0, got {gpus} and {self.servers_per_node}."
            )

    @property
    def ranks(self) -> int:
        """Learner processes."""
        return self.nodes * (self.ranks_per_node or self.gpus_per_node)

    @property
    def servers(self) -> int:
        """Engine servers; 0 unless disaggregated."""
        if self.placement != "disaggregated":
            return 0
        if self.nodes_per_server > 1:
            return self.engine_nodes // self.nodes_per_server
        per_node = self.servers_per_node or self.gpus_per_node // self.gpus_per_server
        return per_node * (self.engine_nodes or self.nodes)

    @property
    def all_nodes(self) -> int:
        """Nodes of the job."""
        return self.nodes + self.spare_nodes + (self.engine_nodes if self.placement == "disaggregated" else 0)


def load_cluster(name: str, overrides: dict[str, str], config_dirs: Sequence[str | Path] = ()) -> Cluster:
    """Reads a cluster file and applies overrides (setting → YAML text); all mistakes in one ConfigError."""
    known = list_choices("cluster", search_dirs(config_dirs))
    if name not in known:
        raise ConfigError(f"cluster={name}: no such file in configs/cluster.{did_you_mean(name, known)}")
    values: dict[str, Any] = read_yaml(known[name])
    for key, text in overrides.items():
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"cluster.{key}={text}: not a YAML value ({error}).") from error
    if isinstance(values.get("time"), int):
        # YAML 1.1 reads 1:30:00 as a number of seconds.
        seconds = values["time"]
        values["time"] = f"{seconds // 3600:02d}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}"
    cluster: Cluster
    cluster, problems = build_config(Cluster, values, f"cluster {name}")
    if problems:
        raise GraphError(problems, f"cluster={name}")
    return cluster


def split_overrides(overrides: Sequence[str]) -> tuple[str, dict[str, str], list[str]]:
    """Cluster name, its overrides, and the overrides that belong to the training command."""
    name = ""
    own: dict[str, str] = {}
    rest: list[str] = []
    for text in overrides:
        key, equals, value = text.lstrip("+").partition("=")
        if key == "cluster" and equals:
            name = value
        elif key.startswith("cluster.") and equals:
            own[key.removeprefix("cluster.")] = value
        else:
            rest.append(text)
    return name, own, rest
