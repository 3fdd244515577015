"""The ranks of a distributed run: every rank runs the same graph (SPMD), started by torchrun or srun.

`replica` nodes run on the first rank of each replica, `collective` nodes on all ranks, each with its replica's batches.
There is no separate control plane: ranks agree through collectives at the same points of the same graph.

    torchrun --nproc-per-node 2 --no-python creditgraph train recipe=toy_grpo
    srun --ntasks 2 creditgraph train recipe=toy_grpo
"""

import os
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from creditgraph.pipeline.core.component import MAX_REPLICAS
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.ranks import Ranks

__all__ = ["Collectives", "DistributedError", "Ranks", "Rendezvous", "Team", "plan_ranks", "rendezvous"]

FILES = 1024  # open files of a rank beside those that are counted
SOCKETS_PER_RANK = 4  # to each other rank, one in each group of gloo

# Jobs on one host must not share a port, so it is derived from the job's number.
_FIRST_PORT = 20000
_PORTS = 20000


class DistributedError(CreditgraphError):
    """Processes that cannot form a run, or a rank that was lost."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """The rank of this process, and the store through which ranks find each other.

    Attributes:
        ranks: rank, world and local rank; replicas are planned later.
        address, port: host and port of the store.
        hosts_store: whether this process serves the store (under torchrun the agent does).
        attempt: number of restarts before this one; keeps late messages of an earlier attempt apart.
    """

    ranks: Ranks
    address: str = "localhost"
    port: int = 0
    hosts_store: bool = False
    attempt: int = 0


def rendezvous(environ: Mapping[str, str] | None = None) -> Rendezvous:
    """Reads torchrun's variables, else those of an srun step, else it is the only process.

    Raises:
        DistributedError: variables that are missing or contradict each other.

    >>> rendezvous({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1",
    ...     "SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[007-008]"}).address
    'node007'
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in env]
        if missing:
            present = ", ".join(name for name in (*names, "LOCAL_RANK") if name in env)
            raise DistributedError(
                f"environment: expected all variables that torchrun sets, got {present} without {', '.join(missing)}. "
                "Start with torchrun, or unset RANK and WORLD_SIZE for one process."
            )
        rank = _number(env, "RANK")
        world = _number(env, "WORLD_SIZE")
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Rendezvous(
            ranks=_ranks(rank, world, _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0),
            address=env["MASTER_ADDR"],
            port=_number(env, "MASTER_PORT"),
            hosts_store=rank == 0 and not agent,
            attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0,
        )
    # A batch script has SLURM_PROCID too, but only a task of srun belongs to a step.
    if "SLURM_STEP_ID" in env and "SLURM_PROCID" in env:
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        rank = _number(env, "SLURM_PROCID")
        world = _number(env, tasks)
        if world > 1:
            nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
            job = _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else 0
            return Rendezvous(
                ranks=_ranks(rank, world, _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else 0),
                address=env.get("MASTER_ADDR") or first_host(nodes),
                port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else _FIRST_PORT + job % _PORTS,
                hosts_store=rank == 0,
                attempt=_number(env, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in env else 0,
            )
    return Rendezvous(ranks=Ranks())


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu[003-010,12],login"), first_host("a,b"), first_host("r[1-2]n[05,07]")
    ('gpu003', 'a', 'r1n05')
    """
    depth = 0
    end = len(nodes)
    for i, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = i
            break
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes[:end])
    if not host or "[" in host:
        raise DistributedError(
            f"SLURM_STEP_NODELIST: expected a node list such as node[01-04], got '{nodes}'. Set MASTER_ADDR to rank "
            "0's host."
        )
    return host


def plan_ranks(graph: Graph, ranks: Ranks) -> Ranks:
    """Divides the ranks into replicas of the size that the graph's collective nodes require.

    Raises:
        DistributedError: the number of processes does not fit.
    """
    sizes = [(n, n.cls.ranks_per_replica(n.config)) for n in graph.nodes if n.placement == "collective"]
    size = max((s for _, s in sizes), default=1)
    owner = next((f"'{n.name}' ({n.use})" for n, s in sizes if s == size), "the graph")
    odd = [f"'{n.name}' takes {s}" for n, s in sizes if s not in (1, size)]
    if odd:
        raise DistributedError(
            f"processes per replica: {owner} takes {size}, {odd[0]}; expected one number. Give both the same parallel "
            "sizes."
        )
    # A remainder would be ranks without work.
    if ranks.world % size:
        below = ranks.world // size * size
        fits = f"{below} or {below + size}" if below else f"{size}, or a multiple of it"
        raise DistributedError(
            f"{owner}: one replica takes {size} processes, but the run has {ranks.world}; expected a multiple. Start "
            f"{fits}, for example "
            f"torchrun --nproc-per-node {size} --no-python creditgraph train …, or change the parallel sizes."
        )
    replicas = ranks.world // size
    if replicas > MAX_REPLICAS:
        raise DistributedError(
            f"{replicas} replicas; expected at most {MAX_REPLICAS}. Use more processes per replica or fewer processes."
        )
    return Ranks(rank=ranks.rank, world=ranks.world, local_rank=ranks.local_rank, num_replicas=replicas)


def allow_files(graph: Graph, world: int) -> None:
    """Raises the soft limit of open files to what a run on `world` ranks needs; the usual one is 1,024.

    gloo connects a rank to every other one in each of its groups, and nodes open more, see `Component.files`.

    Raises:
        DistributedError: the hard limit is lower.
    """
    wants = {f"{n.name} ({n.use})": n.cls.files(n.config, world) for n in graph.nodes}
    needed = FILES + SOCKETS_PER_RANK * (world - 1) + sum(wants.values())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = [f"{count:,} of {name}" for name, count in wants.items() if count]
        raise DistributedError(
            f"open files: expected a limit of at least {needed:,} for {world:,} ranks"
            f"{' (' + ', '.join(most) + ')' if most else ''}, got a hard limit of {hard:,} (ulimit -Hn). Have it "
            "raised on these hosts (LimitNOFILE of slurmd, or limits.conf), or start fewer ranks."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Collectives:
    """Communication between the ranks of one lane; this one is for a single rank.

    Values are what a checkpoint can hold.
    """

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks with this position in every replica."""
        return x

    def exchange(self, parts: list[Any]) -> list[Any]:
        """Sends parts[r] to the rank of this position in replica r; returns what each of them sent, in order."""
        return parts

    def to_first(self, value: Any) -> list[Any] | None:
        """Leaders only: on rank 0 the values of all replicas in order, on other leaders None."""
        return [value]

    def fold_to_first(self, value: Any, fold: Callable[[Any, Any], Any]) -> Any:
        """Leaders only: on rank 0 the values of all replicas, folded pair by pair in order; on other leaders None.

        A rank sends one value and receives at most log2(replicas).
        """
        return value

    def among_leaders(self, value: Any) -> list[Any]:
        """Leaders only: the values of all replicas in order, on every leader."""
        return [value]

    def from_leader(self, value: Any) -> Any:
        """All ranks of a replica: the value of its leader."""
        return value


class Team:
    """All processes of a run, as one of them sees them; this one is a run of one process, see also `Processes`."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self.folder: Path | None = None  # run directory, where the ranks' heartbeats are

    def collectives(self, lane: str) -> Collectives:
        """Communication for one lane, so that lanes that overlap never interleave."""
        return Collectives()

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers. Main thread only, like the next two."""
        return number

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def barrier(self) -> None:
        """Waits for all ranks."""

    def report(self, error: BaseException) -> None:
        """Reports to the other ranks that this one has failed; for a thread whose error does not end the process."""


def _ranks(rank: int, world: int, local_rank: int) -> Ranks:
    if not 0 <= rank < world:
        raise DistributedError(
            f"environment: rank {rank} of {world} processes; expected 0 to {world - 1}. Check RANK and WORLD_SIZE."
        )
    return Ranks(rank=rank, world=world, local_rank=local_rank)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise DistributedError(
            f"environment: {name} is '{env[name]}'; expected a number. Start with torchrun or srun."
        ) from None
