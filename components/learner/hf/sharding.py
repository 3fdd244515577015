"""FSDP2 for `learner.hf`: every rank holds a part of each parameter, its gradient and its optimiser state.

A model arrives without weights; each rank then reads its own rows of each tensor from the safetensors files. Before a
layer computes, its ranks gather it; afterwards they free it. So all ranks must make the same passes, however many rows
each of them has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from creditgraph.components.learner.dtensors import is_sharded, is_unit, rows, shard_of
from creditgraph.components.learner.hf.files import sources
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

ADAPTED = ".base_layer."  # in the names of weights that peft has wrapped


class Entry(nn.Module):
    """Calls functions of a model. The hooks of FSDP act on calls of a module, and ours are of several functions.

    Args:
        model: a transformers causal LM.
        dtype: what it computes in; None: its own dtype. A sharded model's own is that of its master weights.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.dtype: torch.dtype = dtype or model.dtype

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(model, *args)`."""
        return function(self.model, *args)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(model, *args)` on whole parameters; all ranks of a sharded model call it."""
        result = self(function, *args)
        # Without a backward pass, which would do it, the last parameters stay gathered, and the next step leaves them
        # behind.
        if is_unit(self) and not torch.is_grad_enabled():
            self.reshard()
        return result


class Sharding:
    """The ranks that hold one model together: those of the run, or of each part of it that holds a copy.

    Args:
        ranks: this process among all of the run.
        device: device of this rank.
        size: ranks that each parameter is sharded over; neighbours, so that they share a node where they can.
    """

    def __init__(self, ranks: Ranks, device: str, size: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        check_size(size, ranks.world)
        self.size = size
        self.device = torch.device(device)
        shape = (size,) if size == ranks.world else (ranks.world // size, size)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])

    def shard(self, model: Any, path: str, dtype: torch.dtype | None) -> Entry:
        """Shards a model without weights and reads this rank's shards of them; all ranks call it.

        Args:
            model: a transformers causal LM on the meta device, perhaps with adapters, which have their values.
            path: folder of the weights.
            dtype: what trained float32 parameters are rounded to before they compute; None: they compute as they are.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        for module in [m for m in model.modules() if type(m).__name__ in blocks]:
            fully_shard(module, **options)
        entry = Entry(model, dtype)
        embedding = model.get_input_embeddings()
        if embedding.weight is not model.get_output_embeddings().weight:
            fully_shard(embedding, **options)
        # The head is the last to compute and the first in the backward pass, so it stays gathered between them.
        fully_shard(entry, reshard_after_forward=False, **options)
        for unit in entry.modules():
            if is_unit(unit):
                # Denominators are global, so gradients are summed, not averaged.
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self._read(model, path)
        return entry

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        held = torch.tensor([number])
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return int(held)

    @torch.no_grad()
    def _read(self, model: Any, path: str) -> None:
        empty = {n: t for n, t in model.named_parameters() if t.is_meta}
        buffers = {n: t for n, t in model.state_dict().items() if not is_sharded(t)}
        names = {n.replace(ADAPTED, "."): n for n in (*empty, *buffers)}
        state = {}
        for name, read in sources(model, path, names).items():
            target = empty.get(names[name])
            if target is None:
                state[names[name]] = read(None).to(buffers[names[name]])
            else:
                state[names[name]] = shard_of(read(rows(target)).to(self.device, target.dtype, copy=True), target)
        missing = sorted(set(empty) - set(state))
        if missing:
            raise DataError(
                f"model folder {path}: expected all {len(empty)} weights of the model, but {len(missing)} are missing, "
                f"first '{missing[0].replace(ADAPTED, '.')}'. Copy the folder again, or correct model.path."
            )
        model.load_state_dict(state, strict=False, assign=True)


def check_size(size: int, world: int) -> None:
    """Raises ConfigError for a number of ranks that the run cannot be divided into."""
    if world % size:
        fits = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ConfigError(
            f"learner.fsdp_size: {size} ranks hold one model, but the run has {world}; expected a number that divides "
            f"them ({fits}). Start another number of processes, or set learner.fsdp_size=0, which chooses one."
        )


@contextmanager
def without_memory(model: Any) -> Iterator[None]:
    """The parameters of a model on the meta device are on the CPU meanwhile, where they take no memory either.

    peft moves adapters to the device of what they adapt, and on the meta device they would lose their initial values.
    """
    empty = list(model.parameters())
    flat = [nn.Parameter(torch.empty((), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad) for p in empty]
    _exchange(model, empty, flat)
    try:
        yield
    finally:
        for old, new in zip(empty, flat, strict=True):
            old.requires_grad_(new.requires_grad)
        _exchange(model, flat, empty)


def _exchange(model: Any, before: list[nn.Parameter], after: list[nn.Parameter]) -> None:
    new = {id(old): new for old, new in zip(before, after, strict=True)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = new.get(id(parameter), parameter)


@contextmanager
def gathered(unit: FSDPModule | None) -> Iterator[None]:
    """The parameters of one unit of a sharded model are whole meanwhile; all ranks enter. Nothing for None."""
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def unit_of(entry: Entry, name: str) -> FSDPModule | None:
    """The innermost sharded unit that holds the tensor of that name in the model; None when nothing is sharded."""
    module: Any = entry.model
    found: FSDPModule | None = entry if is_unit(entry) else None
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        found = module if is_unit(module) else found
    return found
