"""Checks of an installation, a node and a cluster, each with the next step if it fails."""

import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

# A file server's clock may differ from ours by this much without a warning; nothing in a run depends on clocks.
CLOCK_SKEW_SECONDS = 5.0
SMALLEST_FREE_GB = 2.0
SINFO_SECONDS = 30.0
NOT_SHARED = "expected a folder shared by all nodes: set cluster.root=PATH to one"

State = Literal["ok", "absent", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: its place, its state, and the value or the next step. A warning ends no job."""

    name: str
    state: State
    text: str

    def __str__(self) -> str:
        """A line for people."""
        return f"{self.state:<6} {self.name}: {self.text}"


USES = {
    "train": "training and sampling",
    "vllm": "engine.vllm on a GPU",
    "vllm-cpu": "engine.vllm on a CPU",
    "sglang": "engine.sglang; in an environment of its own, see docs/engines.md",
    "megatron": "learner.megatron",
    "transformer-engine": "learner.layers of learner.megatron on a GPU",
    "lora": "learner.lora.rank",
    "plots": "reports, pictures of comparisons",
    "tensorboard": "run.tensorboard.enabled",
    "wandb": "run.wandb.mode",
    "tasks": "tools/task_rows, which writes the rows of two task families",
    "openenv": "environment.openenv",
    "verifiers": "environment.verifiers",
}  # extra → what needs it; those for developers are left out


def installation() -> Iterator[Finding]:
    """Python, and every package that pyproject.toml names: those of creditgraph itself, then those of its extras."""
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if good else "FAIL", version if good else f"expected 3.11 or newer, got {version}")
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("creditgraph") or ()]
    except importlib.metadata.PackageNotFoundError:
        step = "run tools/quickstart, or pip install -e ."
        yield Finding("creditgraph", "FAIL", f"not installed, so its dependencies are not known; {step}")
        return
    core = {"creditgraph"}  # an extra names it with the extra that it includes
    for requirement in requirements:
        if not _extra_of(requirement):
            core.add(requirement.name)
            yield _package(requirement)
    named = set()
    for name, use in USES.items():
        for requirement in requirements:
            # Several extras may share a package.
            if _extra_of(requirement) == name and requirement.name not in named:
                finding = _package(requirement, f"only for {use}; pip install 'creditgraph[{name}]'")
                # An extra may ask for a newer version than the core.
                if requirement.name not in core or finding.state != "ok":
                    named.add(requirement.name)
                    yield finding


def _extra_of(requirement: Requirement) -> str:
    """The extra that a requirement belongs to, "" for one of creditgraph itself."""
    found = re.search(r"""extra == ["']([\w-]+)["']""", str(requirement.marker or ""))
    return found[1] if found else ""


def _package(requirement: Requirement, why: str = "") -> Finding:
    """Whether a package is there in a version that fits; `why` is what needs one that may be absent."""
    name = requirement.name
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if why:
            return Finding(name, "absent", f"not installed; {why}")
        return Finding(
            name, "FAIL", f"not installed; run tools/quickstart, or pip install '{_without_marker(requirement)}'"
        )
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(name, "ok", version)
    text = f"expected {requirement.specifier}, got {version}; pip install '{_without_marker(requirement)}'"
    return Finding(name, "warn" if why else "FAIL", text)


def _without_marker(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def devices() -> Iterator[Finding]:
    """CUDA, NCCL and memory."""
    assigned = os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # torch is imported only if there may be a GPU, so that the check of a CPU job takes a fraction of a second.
    if not assigned and shutil.which("nvidia-smi") is None:
        yield Finding("cuda", "absent", "no GPU here; models run on the CPU")
        return
    import torch

    from creditgraph.components.learner.megatron.settings import missing_fusions

    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} sees none, though {'the job has GPUs' if assigned else 'nvidia-smi is here'}"
        step = "install a CUDA build of torch that fits the driver (`nvidia-smi` shows it)"
        yield Finding("cuda", "FAIL", f"{why}; {step}")
        return
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        text = f"{torch.cuda.get_device_name(i)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        if free / total > 0.8:
            yield Finding(f"cuda:{i}", "ok", text)
        else:
            yield Finding(f"cuda:{i}", "FAIL", f"{text}; another process holds memory (`nvidia-smi` shows it)")
        yield _attention(i)
    for name, step in missing_fusions().items():
        yield Finding(f"learner.megatron, {name}", "absent", f"off, which only costs time; {step}")
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if connections != "1":
        text = f"{connections}; learner.megatron's tensor parallel layers expect 1 up to Hopper, or unset it"
        yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", "warn", text)
    nccl = torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""  # type: ignore[no-untyped-call]
    yield Finding("nccl", "ok" if nccl else "FAIL", version or "not in this build of torch; install a CUDA build")


def _attention(gpu: int) -> Finding:
    """Whether a GPU and this build of torch have flash attention, without which learners are several times slower."""
    import torch

    major, minor = torch.cuda.get_device_capability(gpu)
    name = f"cuda:{gpu} attention"
    if (major, minor) < (8, 0):
        text = f"none of the fast kernels: compute capability {major}.{minor}; expected a GPU of 8.0 (A100) or newer"
        return Finding(name, "warn", text)
    if not torch.backends.cuda.is_flash_attention_available():
        text = f"torch {torch.__version__} was built without flash attention; install a CUDA build from pytorch.org"
        return Finding(name, "warn", text)
    return Finding(name, "ok", "flash attention, in bfloat16")


def node() -> Iterator[Finding]:
    """Host name, memory for tensors, files."""
    name = socket.gethostname()
    try:
        yield Finding("host", "ok", f"{name} is {socket.gethostbyname(name)}")
    except OSError:
        text = f"{name} has no address; add it to DNS or /etc/hosts, ranks find each other by it"
        yield Finding("host", "FAIL", text)
    for folder, use in (
        (Path("/dev/shm"), "weights travel to engines through it"),
        (Path(tempfile.gettempdir()), "temporary files"),
    ):
        if not folder.exists():  # /dev/shm, on macOS
            yield Finding(str(folder), "absent", f"{use}; only for servers")
            continue
        free = shutil.disk_usage(folder).free / 1e9
        if free >= SMALLEST_FREE_GB:
            yield Finding(str(folder), "ok", f"{free:.1f} GB free")
        else:
            text = f"expected {SMALLEST_FREE_GB:.0f} GB free, got {free:.1f}; {use}"
            yield Finding(str(folder), "FAIL", text)


def rendezvous() -> Iterator[Finding]:
    """Inside a job: whether this node can resolve the first one, and whether all nodes can exchange tensors."""
    address = os.environ.get("MASTER_ADDR", "")
    rank = os.environ.get("SLURM_PROCID", "")
    if not address or not rank:
        return
    try:
        yield Finding("first node", "ok", f"{address} is {socket.gethostbyname(address)}")
    except OSError as error:
        step = "set MASTER_ADDR in cluster.environment to an address of the first node"
        yield Finding("first node", "FAIL", f"{address} cannot be resolved ({error}); {step}")
        return
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1:
        yield interconnect(int(rank), tasks, address, int(os.environ.get("MASTER_PORT", "0")))


def interconnect(rank: int, tasks: int, address: str, port: int, seconds: float = 120.0) -> Finding:
    """Sums a tensor over all nodes through the network that ranks use: NCCL with GPUs, else gloo.

    NCCL has not been run.
    """
    import torch
    import torch.distributed as dist

    from creditgraph.pipeline.core.ranks import Ranks
    from creditgraph.pipeline.run.distributed.network import choose_interface, not_connected, within

    cuda = torch.cuda.is_available()
    megabytes = 64 if cuda else 4  # enough to use the bulk path of the network, and still fast
    backend = "nccl" if cuda else "gloo"
    results: list[float] = []

    def exchange() -> None:
        limit = timedelta(seconds=seconds)
        place = f"tcp://{address}:{port}"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=tasks, timeout=limit)
        held = torch.ones(megabytes * 2**18, device="cuda:0" if cuda else "cpu")
        dist.all_reduce(held)  # the first one makes the connections
        warm = time.monotonic()
        dist.all_reduce(held)
        results.append(float(held[0]) == tasks**2 == float(held[-1]))
        results.append(time.monotonic() - warm)
        dist.destroy_process_group()

    choose_interface(address)
    try:
        within(seconds + 10, exchange)
    except (RuntimeError, ValueError, TimeoutError) as error:  # torch's own are RuntimeErrors
        text = f"{tasks} nodes did not exchange numbers through {address}:{port}; see that no firewall is between them"
        said = not_connected(backend, Ranks(rank=rank, world=tasks), error)
        return Finding("interconnect", "FAIL", f"{text}. {said}")
    is_right, taken = results
    if not is_right:
        text = f"a sum over {tasks} nodes is wrong; check the network between them"
        return Finding("interconnect", "FAIL", text)
    return Finding("interconnect", "ok", f"{tasks} nodes sum {megabytes} MB in {1000 * taken:.0f} ms")


def shared(folder: Path) -> Iterator[Finding]:
    """A folder that all nodes must see: writable, its clock near ours, and, in a job, the same one everywhere."""
    if "SLURM_STEP_ID" in os.environ and not folder.is_dir():
        yield Finding(str(folder), "FAIL", f"not there on this node; {NOT_SHARED}")
        return
    mark = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = mark.with_suffix(".tmp")
        aside.write_text(socket.gethostname())
        os.replace(aside, mark)  # as all files of a run are written
        skew = mark.stat().st_mtime - time.time()
    except OSError as error:
        text = f"cannot be written ({error.strerror}); choose another place with cluster.root=PATH"
        yield Finding(str(folder), "FAIL", text)
        return
    try:
        if abs(skew) > CLOCK_SKEW_SECONDS:
            text = f"writable; its clock is {skew:+.1f} s off this node's, so times in logs mislead (nothing else does)"
            yield Finding(str(folder), "warn", f"{text}: run chrony on both")
        else:
            yield Finding(str(folder), "ok", f"writable, clock {skew:+.2f} s")
        yield from _seen_by_all(folder)
    finally:
        mark.unlink(missing_ok=True)


def _seen_by_all(folder: Path, deadline: float = 60.0) -> Iterator[Finding]:
    """Every task of the step writes a file and waits until it sees those of all others.

    The job script removes the files, because another node may still be waiting for them.
    """
    rank = os.environ.get("SLURM_PROCID")
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if rank is None or tasks < 2:
        return
    # One folder per attempt, or files of an earlier start would count as nodes that are there.
    step = [os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    place = folder / f".canary-{'-'.join(step)}"
    place.mkdir(exist_ok=True)
    (place / rank).touch()
    end = time.monotonic() + deadline
    missing = tasks
    while missing and time.monotonic() < end:
        missing = tasks - sum(1 for _ in place.iterdir())
        if missing:
            time.sleep(0.2)
    if missing:
        yield Finding("shared folder", "FAIL", f"{missing} of {tasks} nodes do not write here; {NOT_SHARED}")
    else:
        yield Finding("shared folder", "ok", f"seen by all {tasks} nodes")


def slurm(asked: bool = False) -> Iterator[Finding]:
    """Whether SLURM responds, and its partitions; a failure only if it was asked for: most machines have none."""
    bad: State = "FAIL" if asked else "absent"
    if shutil.which("sinfo") is None:
        yield Finding("slurm", bad, "no sinfo in PATH; `creditgraph submit` then needs cluster=laptop")
        return
    try:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%P %a %D nodes %G %l"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SINFO_SECONDS,
        )
        failed = done.returncode != 0
        said = " ".join(done.stderr.split())
    except subprocess.TimeoutExpired:
        failed = True
        said = f"no answer in {SINFO_SECONDS:.0f} s"
    if failed:
        text = f"sinfo: {said}; is slurmctld running, and SLURM_CONF or /etc/slurm/slurm.conf right?"
        yield Finding("slurm", bad, text if asked else f"{text} Without a cluster this does not matter")
        return
    for line in done.stdout.splitlines():
        yield Finding("partition", "ok", line.strip())


def examine(folder: Path | None, node_only: bool, cluster: bool = False) -> list[Finding]:
    """All checks that fit; with `cluster`, SLURM must respond."""
    checks: list[Callable[[], Iterator[Finding]]] = (
        [node, devices, rendezvous] if node_only else [installation, devices, node, partial(slurm, cluster)]
    )
    findings = [finding for check in checks for finding in check()]
    return findings + (list(shared(folder)) if folder else [])
