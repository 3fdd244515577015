"""Distributed checkpoints of megatron-core: every rank writes its shards, and any other layout can read them.

Weights and optimizer state are stored under their global names and shapes, so a checkpoint of one TP × PP × DP is read
at another; `shards.py` has the ranges of the distributed optimizer. torch's AdamW, which megatron-core falls back to
without TransformerEngine and Apex, needs two repairs: state that exists before loading, and one step counter per
parameter.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from creditgraph.components.learner.megatron.cpu import megatron_on_cpu
from creditgraph.components.learner.megatron.optimizer import MegatronOptimizer
from creditgraph.components.learner.megatron.results_queue import ResultsQueue
from creditgraph.components.learner.megatron.shards import write_own_ranges
from creditgraph.pipeline.core.errors import RunError

PATIENCE = 60.0  # seconds for which the process of a checkpoint may be without writers before and after them
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",  # TP and PP may change too; its two methods are replaced
    "chained_optim_avoid_prefix": True,
}


class ShardWriter:
    """The shards of one rank, written by a process of megatron-core's from a copy in host memory.

    On a CPU the copy is the forked process's view of the memory, which later steps do not change.
    """

    def __init__(self, folder: Path, request: AsyncRequest) -> None:
        self._folder = folder
        self._request = request
        self._caller = TemporalAsyncCaller()
        self._caller.schedule_async_call(request._replace(finalize_fns=[]).freeze())

    def done(self) -> bool:
        """Whether this rank's process has ended."""
        return bool(self._caller.is_current_async_call_done(blocking=False, no_dist=True))

    def finish(self) -> None:
        """Waits for the processes of all ranks and writes the metadata, without which no checkpoint is read."""
        try:
            with megatron_on_cpu():
                self._wait()
                self._caller.is_current_async_call_done(blocking=True, no_dist=True)
                for finalize in self._request.finalize_fns:
                    finalize()
        except CheckpointException as error:  # no Exception
            reason = " ".join(str(error).split())[-300:]
            raise RunError(
                f"{self._folder}: a rank could not write its part of the checkpoint (…{reason}); expected room in host "
                "memory and on the disk. Make room; the run continues from the checkpoint before."
            ) from error

    def _wait(self) -> None:
        """Waits for this rank's process; one that waits for writers that were killed, which it never notices, fails."""
        process, seen = self._caller.process, time.monotonic()
        while process is not None and process.is_alive():
            process.join(1.0)
            if _has_writers(process.pid):
                seen = time.monotonic()
            elif process.is_alive() and time.monotonic() > seen + PATIENCE:
                self._caller.close(abort=True)  # megatron-core then misses its results, and has all ranks hear of it


def _has_writers(pid: int | None) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    return False


def save_shards(
    folder: Path, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, state: dict[str, Any]
) -> ShardWriter:
    """Begins to write this rank's shards, as they are now; all ranks must call it, and later `finish`.

    Args:
        folder: empty or missing; the caller renames its parent when all ranks are done.
        chunks: GPTModels of this rank, not wrapped.
        optimizer: optimizer of the chunks.
        state: numbers and strings that are equal on all ranks.
    """
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    _fill_state(optimizer)
    steps = {"updates": _updates(optimizer), "step_count": optimizer.schedule.step_count}
    sharded = _sharded(chunks, optimizer, loading=False) | {"state": state | steps}
    filesystem_async._results_queue = ResultsQueue()
    return ShardWriter(folder, dist_checkpointing.save(sharded, str(folder), async_sharded_save=True))


def load_shards(folder: Path, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Loads a checkpoint of `save_shards`, at this or another layout; all ranks must call it. Returns `state`.

    Raises RunError for a folder that is missing, cut short, or of another architecture.
    """
    if not (folder / "metadata.json").is_file():
        raise RunError(
            f"{folder}: no Megatron checkpoint (metadata.json is missing); expected one that learner.megatron wrote. "
            "Resume with the learner that wrote the run, or start a new run."
        )
    _fill_state(optimizer)
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(_sharded(chunks, optimizer, loading=True), str(folder))
        for name, chunk in zip(_names(chunks), chunks, strict=True):
            chunk.load_state_dict(loaded[name], strict=not any(".adapters." in key for key in loaded[name]))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        reason = " ".join(str(error).split())[-300:]
        raise RunError(
            f"{folder}: the checkpoint does not fit this model or is damaged ({type(error).__name__}: …{reason}); "
            "expected a complete one of the same architecture. Resume with the model that wrote it, or from an earlier "
            "checkpoint."
        ) from error
    state: dict[str, Any] = loaded["state"]
    if _torch_adams(optimizer):
        add_first_step(loaded["optimizer"])
    optimizer.inner.load_state_dict(loaded["optimizer"])
    _set_updates(optimizer, int(state.pop("updates")))
    optimizer.schedule.step_count = int(state.pop("step_count"))
    optimizer.set_weight_decay()
    return state


def _names(chunks: Sequence[nn.Module]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]


def _sharded(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, loading: bool) -> dict[str, Any]:
    metadata = METADATA | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # Extra state holds the scales of 8-bit products with fp8.recipe: delayed.
    model: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for name, chunk in zip(_names(chunks), chunks, strict=True)
    }
    if any(".adapters." in name for name, _ in chunks[0].named_parameters()):
        # The other weights are those of the model's folder.
        model = {name: {k: v for k, v in part.items() if ".adapters." in k} for name, part in model.items()}
    of_optimizer = model["model"] if len(chunks) == 1 else model
    return model | {
        "optimizer": optimizer.inner.sharded_state_dict(of_optimizer, is_loading=loading, metadata=metadata)
    }


def _torch_adams(optimizer: MegatronOptimizer) -> list[Any]:
    """The parts whose state is that of torch.optim.AdamW; TransformerEngine's and Apex's keep steps elsewhere."""
    parts = [p for p in optimizer.inner.chained_optimizers if not p.is_stub_optimizer]
    return [p for p in parts if isinstance(p.optimizer, torch.optim.AdamW)]


def _fill_state(optimizer: MegatronOptimizer) -> None:
    # A run whose steps were all skipped has moments too, zero ones; and a fresh optimizer must have the tensors that
    # are loaded.
    adams = _torch_adams(optimizer)
    for part in (p for p in optimizer.inner.chained_optimizers if not p.is_stub_optimizer):
        for group in part.optimizer.param_groups:
            if part not in adams:
                group.setdefault("step", 0)  # TransformerEngine's counts steps by group
            for p in group["params"]:
                if not part.optimizer.state[p]:
                    part.optimizer.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                    if part in adams:
                        part.optimizer.state[p]["step"] = torch.tensor(0.0)
        write_own_ranges(part)


def add_first_step(state: Any) -> None:
    """Adds the step counter of 0 that megatron-core leaves out of an optimizer's state, and torch requires."""
    if isinstance(state, dict) and {"state", "param_groups"} <= state.keys():
        if state["state"]:
            state["state"].setdefault("common_step", torch.tensor(0.0))
    elif isinstance(state, dict):
        for part in state.values():
            add_first_step(part)


def _updates(optimizer: MegatronOptimizer) -> int:
    return max((int(s["step"]) for part in _torch_adams(optimizer) for s in part.optimizer.state.values()), default=0)


def _set_updates(optimizer: MegatronOptimizer, updates: int) -> None:
    for part in _torch_adams(optimizer):
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(updates))
