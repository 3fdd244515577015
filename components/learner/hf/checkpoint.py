"""Sharded checkpoints of `learner.hf`: every rank writes what it holds, and any number of ranks reads it.

They are those of torch.distributed.checkpoint: tensors have their names and whole shapes, so one that eight ranks wrote
is read by two, or by one process.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from creditgraph.components.learner.optimizer import Optimizer
from creditgraph.pipeline.core.errors import RunError


def save_shards(folder: Path, optimizer: Optimizer) -> None:
    """Writes this rank's part of weights and optimiser state; all ranks call it."""
    with _quiet():
        save(optimizer.tensors(), checkpoint_id=str(folder))


def load_shards(folder: Path, optimizer: Optimizer) -> None:
    """Reads a checkpoint of `save_shards` of this or another number of ranks; all ranks call it.

    Raises RunError for one of another model, of another learner, or cut short.
    """
    tensors = optimizer.tensors()
    try:
        saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # a missing file, or whatever unpickling another one raises
        raise RunError(
            f"{folder}: expected the shards of learner.hf, got a folder without them ({type(error).__name__}). Resume "
            "with the learner that wrote the run, or start a new run."
        ) from error
    sizes = {name: tuple(getattr(entry, "size", ())) for name, entry in saved.items()}
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    differing = sorted(n for n in own.keys() | sizes.keys() if own.get(n) != sizes.get(n))
    if differing:
        first = differing[0]
        raise RunError(
            f"{folder}: the checkpoint and the model differ in {len(differing)} tensors, first '{first}' (saved "
            f"{sizes.get(first, 'without it')}, expected {own.get(first, 'none')}). Resume with the model and LoRA "
            "settings that wrote it, or start a new run."
        )
    try:
        with _quiet():
            load(tensors, checkpoint_id=str(folder))
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        reason = " ".join(str(error).split())[-300:]
        raise RunError(
            f"{folder}: the shards cannot be read ({type(error).__name__}: …{reason}); expected a complete checkpoint. "
            "Resume from an earlier one."
        ) from error
    optimizer.masters_changed()


class _quiet(warnings.catch_warnings):
    """Without what torch says of a checkpoint of one process."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")
        logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
        return result
