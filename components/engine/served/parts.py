"""A server over several nodes: each node's part of it, and where the parts meet."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from creditgraph.components.engine.served.addresses import Waiting, free_port
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.run.run_directory import write_aside

_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Part:
    """One node's part of a server.

    Attributes:
        nodes: number of nodes.
        rank: number of this node; node 0 answers requests.
        host: address of this node.
        meeting: host:port at which node 0 waits for the others.
    """

    nodes: int
    rank: int
    host: str
    meeting: str


def meet(nodes: int, host: str, folder: Path, seconds: float) -> Part:
    """The part of this task of a SLURM step; the others learn of task 0's address by a file.

    Args:
        nodes: number of nodes, each with one task of the step.
        host: address of this node.
        folder: of the server, on a disk that its nodes share.
        seconds: limit for the wait for task 0.

    Raises:
        ConfigError: no task of a step of so many tasks.
        RunError: task 0 left no address in time.
    """
    tasks, task = os.environ.get("SLURM_STEP_NUM_TASKS", ""), os.environ.get("SLURM_PROCID", "")
    if tasks != str(nodes) or not task.isdigit():
        raise ConfigError(
            f"serve --nodes {nodes}: expected a task of a SLURM step of {nodes} tasks, one per node, got "
            f"SLURM_STEP_NUM_TASKS '{tasks}' and SLURM_PROCID '{task}'. Start it with srun, or leave --nodes out."
        )
    # A server that is started again is another step.
    file = folder / f"meeting-{os.environ.get('SLURM_STEP_ID', '')}"
    if task == "0":
        write_aside(file, f"{host}:{free_port(host)}")
    waiting = Waiting(f"the first node of this server, in {file}", "engine.pool.start_seconds", seconds)
    while not file.is_file():
        if waiting.is_over("no such file"):
            raise RunError(
                f"expected the address of the server's first node in {file}, got no such file within {seconds:g} s. "
                "Check that its nodes share this folder."
            )
        time.sleep(_POLL_SECONDS)
    return Part(nodes=nodes, rank=int(task), host=host, meeting=file.read_text(encoding="utf-8"))
