"""What nodes that train a transformers model share: loading it whole or sharded, and their part of a checkpoint."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from creditgraph.components.learner.hf.settings import HFSettings, choose_fsdp_size
from creditgraph.components.learner.hf.sharding import Sharding, check_size
from creditgraph.components.learner.optimizer import Optimizer
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import RunError


class HFNode:
    """Mixed into components that train a transformers model with an `optimizer`.

    Attributes:
        context: of the node, set by its component.
        optimizer: of the trained parameters.
        version: iterations that led to the present weights.
        trained_tokens: tokens trained on since the run began.
        sharded: whether several ranks hold the model together, set by `load`.
    """

    context: Context
    optimizer: Optimizer
    version: int
    trained_tokens: int
    sharded: bool

    def load(self, context: Context, spec: ModelSpec, settings: HFSettings) -> tuple[Any, tuple[Sharding, str] | None]:
        """The model on this rank's device; or without weights, with the ranks that share it and their folder."""
        from creditgraph.components.models.load import empty_causal_lm, load_causal_lm, resolve_model_path
        from creditgraph.components.models.weights import local_folder

        self.sharded = False
        ranks = context.ranks
        size = settings.fsdp_size
        check_size(size or 1, ranks.world)
        if size == 1 or (not size and (ranks.world == 1 or not context.device.startswith("cuda"))):
            return load_causal_lm(spec, context.device), None
        model = empty_causal_lm(spec)
        if not size:
            size = chosen_size(context, model, settings)
            if size == 1:
                return load_causal_lm(spec, context.device), None
        self.sharded = True
        sharding = Sharding(ranks, context.device, size)
        return model, (sharding, str(local_folder(resolve_model_path(spec.path))))

    def state_dict(self) -> dict[str, Any]:
        """Version and counters, and what is not in shards: optimiser state with the trained parameters."""
        counters = {"version": self.version, "trained_tokens": self.trained_tokens}
        if self.sharded:
            return counters | {"step_count": self.optimizer.schedule.step_count}
        return {"optimizer": self.optimizer.state_dict()} | counters

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, bit for bit; RunError for the state of another learner."""
        if "optimizer" not in state and "step_count" not in state:
            raise RunError(
                f"node '{self.context.node}': expected the optimiser state of a transformers model in the checkpoint, "
                f"got {', '.join(sorted(state))}. Resume with the component that wrote the run, or start a new run."
            )
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.schedule.step_count = int(state["step_count"])
        self.version = int(state["version"])
        self.trained_tokens = int(state["trained_tokens"])

    def save_shards(self, folder: Path) -> None:
        """Writes the parameters and optimiser state that this rank holds, if the model is sharded."""
        if self.sharded:
            save_shards(folder, self.optimizer)

    def load_shards(self, folder: Path) -> None:
        """Continues from `save_shards` of this or another number of ranks; does nothing if there are no shards."""
        if any(folder.iterdir()):
            load_shards(folder, self.optimizer)


def chosen_size(context: Context, model: Any, settings: HFSettings) -> int:
    """The ranks that hold a model together on GPUs, when the settings leave the choice; see `choose_fsdp_size`."""
    lora = settings.lora.rank > 0
    weights = sum(p.numel() for p in model.parameters())
    return choose_fsdp_size(
        weights,
        trained=0 if lora else weights,
        element_bytes=model.dtype.itemsize,
        copies=1 if lora or settings.keeps_reference else 0,
        world=context.ranks.world,
        gpu_bytes=torch.cuda.get_device_properties(context.device).total_memory,
    )


# A sharded checkpoint is one of torch.distributed.checkpoint: every rank writes what it holds, and tensors have their
# names and whole shapes, so one that eight ranks wrote is read by two, or by one process.


def save_shards(folder: Path, optimizer: Optimizer) -> None:
    """Writes this rank's part of weights and optimiser state; all ranks call it."""
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second, as those below

    with _quiet():
        save(optimizer.tensors(), checkpoint_id=str(folder))


def load_shards(folder: Path, optimizer: Optimizer) -> None:
    """Reads a checkpoint of `save_shards` of this or another number of ranks; all ranks call it.

    Raises RunError for one of another model, of another learner, or cut short.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

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
