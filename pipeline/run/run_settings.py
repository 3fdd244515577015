"""The `run` section of a configuration, and the observer that receives a run's progress."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch

from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.settings import SettingsError
from creditgraph.pipeline.run.checkpoint import CheckpointSettings
from creditgraph.pipeline.run.metrics import TableSettings, TensorboardSettings, WandbSettings
from creditgraph.pipeline.run.recorder import RecordSettings
from creditgraph.pipeline.run.timeline.spans import TraceSettings

MAX_THREADS = 1024  # torch allocates for each and ends with a segmentation fault at some tens of thousands


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The `run` section of a configuration."""

    name: str = "run"
    """name of the run and of its directory below `root`"""
    root: str = "runs"
    """folder that holds run directories"""
    iterations: int = 100
    """total number of iterations; raising it later continues a finished run"""
    seed: int = 0
    """key of every random stream"""
    device: str = "auto"
    """device of models: cpu, cuda, cuda:1; auto means CUDA if torch sees it"""
    threads: int = 1
    """torch threads on a CPU; 0 keeps torch's own choice (two threads that compete for a core were measured to be 10 to
    20 times slower than one)"""
    overlap: bool = True
    """generate later iterations during learning where the wires allow it; the results are the same"""
    schedule: str = ""
    """schedule.jsonl of another run, which says what wires with `@<=k` read; empty: the newest value that is there"""
    check_memory: bool = True
    """on a GPU, refuse to start where learner and engine need more memory than it has by the layout plan, which counts
    rather too much"""
    allow_changes: bool = False
    """continue an earlier run although its graph, model, data or seed differ"""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """when the state is saved"""
    record: RecordSettings = field(default_factory=RecordSettings)
    """which outputs are written as Parquet"""
    trace: TraceSettings = field(default_factory=TraceSettings)
    """timeline of all ranks"""
    wandb: WandbSettings = field(default_factory=WandbSettings)
    """mirroring to Weights & Biases"""
    tensorboard: TensorboardSettings = field(default_factory=TensorboardSettings)
    """mirroring to TensorBoard"""
    tables: TableSettings = field(default_factory=TableSettings)
    """tables of rollouts in both"""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or len(self.name) > 200 or not self.name.isprintable():
            shown = repr(self.name[:60])
            raise ValueError(f"name: expected the name of a folder below root (at most 200 characters), got {shown}.")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads {self.threads}: expected 0 to {MAX_THREADS}.")
        if self.iterations < 0 or self.iterations >= 1 << 24:
            raise ValueError(f"iterations {self.iterations}: expected 0 to {(1 << 24) - 1}.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed {self.seed}: expected 0 to 2**63 - 1.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise SettingsError([f"device: expected auto, cpu, cuda or cuda:N, got '{self.device}'."])


def resolve_device(name: str, local_rank: int | None = None) -> str:
    """ "auto" becomes cuda when torch sees it, else cpu; raises ConfigError for a device that is not there.

    With `local_rank`, the rank of several on this host, "cuda" becomes the GPU of that number, or the only one that
    this process sees: some launchers show each process its own GPU alone.
    """
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"run.device: expected auto, cpu, cuda or cuda:N, got '{name}'.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"run.device: '{name}', but torch sees no CUDA device here; run on a GPU machine or set run.device=cpu."
        )
    device = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if kind == "cpu" or device == "cpu":
        return device
    count = torch.cuda.device_count()
    if number:
        if int(number) >= count:
            raise ConfigError(f"run.device: expected cuda:0 to cuda:{count - 1}, which torch sees here, got '{name}'.")
        return device
    if local_rank is None:
        return device
    if count > 1 and local_rank >= count:
        raise ConfigError(
            f"run.device: this is process {local_rank + 1} of its host, which has {count} GPUs; expected a GPU per "
            "process. Start fewer processes per host."
        )
    return f"cuda:{local_rank if count > 1 else 0}"


class Observer:
    """Receives progress, for a display; this one shows nothing. Either lane's thread may call `node_started`."""

    def node_started(self, node: str, iteration: int) -> None:
        """A node begins an iteration."""

    def iteration_done(self, iteration: int, metrics: dict[str, float]) -> None:
        """An iteration is over; `iteration` equals the number of iterations after the final pass."""
