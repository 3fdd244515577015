"""LoRA on megatron-core's column and row parallel layers: the adapters that peft adds to the Hugging Face layers.

A fused matrix (queries, keys and values; gate and up projection) has an adapter for each of its parts, since each is a
layer of its own in Hugging Face. Of a column parallel matrix every rank has A, and its rows of B; of a row parallel one
its columns of A, and B. Only rank-wide activations are exchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from creditgraph.components.learner.lora import Lora, initial_a
from creditgraph.components.learner.megatron.settings import ParallelLayout
from creditgraph.pipeline.core.errors import ConfigError

# Part of a layer → whether it is column parallel.
LINEARS = {
    "self_attention.linear_qkv": True,
    "self_attention.linear_proj": False,
    "mlp.linear_fc1": True,
    "mlp.linear_fc2": False,
}
Pair = tuple[Tensor, Tensor]


def check_lora(lora: Lora, layout: ParallelLayout, bridge: Any) -> None:
    """Raises ConfigError for a target that names no linear layer here, and for key-value heads cut by the layout."""
    config = bridge.config
    modules = [n.removesuffix(".weight") for n, s in bridge.shapes.items() if ".layers." in n and len(s) == 2]
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    wrong = [name for name in lora.names if not any(m.endswith(f".{name}") for m in modules)]
    if wrong or config.num_moe_experts:
        found = f"'{wrong[0]}'" if wrong else "a mixture of experts"
        raise ConfigError(
            f"learner.lora.target: expected names of a dense model's linear layers ({', '.join(leaves)}), got {found}. "
            "learner.hf adapts others."
        )
    cut = config.num_query_groups % layout.tensor_parallel
    if cut and any(lora.adapts(m) for m in modules if m.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")):
        raise ConfigError(
            f"learner.lora: tensor_parallel {layout.tensor_parallel} cuts {config.num_query_groups} key-value heads; "
            "expected a divisor of their number for adapters of queries, keys and values. Lower tensor_parallel."
        )


class LinearAdapter(nn.Module):
    """What adapters add to the result of one linear layer.

    Attributes:
        modules: part → its Hugging Face name, of the parts with an adapter.
    """

    def __init__(self, column: bool, widths: dict[str, int], fan_in: int, groups: int, lora: Lora, config: Any) -> None:
        """
        Args:
            column: whether the layer is column parallel, else row parallel.
            widths: Hugging Face name → this rank's outputs, of all parts in the order of the fused matrix.
            fan_in: this rank's inputs.
            groups: heads that the outputs of the parts alternate by.
            lora: settings.
            config: the TransformerConfig.
        """
        super().__init__()
        self.column = column
        self.groups = groups
        self.scale = lora.alpha / lora.rank
        self.sequence_parallel = config.sequence_parallel
        self.enabled = True
        self.widths = {name.rpartition(".")[2]: width for name, width in widths.items()}
        self.modules_of = {name.rpartition(".")[2]: name for name in widths if lora.adapts(name)}
        # Float32 beside narrower weights, as peft has them.
        self.a = nn.ParameterDict({part: torch.empty(lora.rank, fan_in) for part in self.modules_of})
        self.b = nn.ParameterDict({part: torch.zeros(self.widths[part], lora.rank) for part in self.modules_of})
        for part in self.modules_of:
            whole, sharded = (self.a[part], self.b[part]) if column else (self.b[part], self.a[part])
            set_tensor_model_parallel_attributes(sharded, True, 0 if column else 1, 1)
            # Each rank sees its part of the tokens; megatron-core sums the gradients of marked weights over the ranks.
            whole.sequence_parallel = config.sequence_parallel

    @torch.no_grad()
    def fill(self, seed: int, rank: int, ranks: int) -> None:
        """Draws this rank's part of the initial A."""
        for part, module in self.modules_of.items():
            a = self.a[part]
            whole = initial_a(seed, module, len(a), a.shape[1] * (1 if self.column else ranks))
            a.copy_(whole if self.column else whole.chunk(ranks, 1)[rank])

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """The layer's result with that of its adapters.

        Args:
            x: [s, b, in] of the layer.
            out: [s, b, out] of the layer.
        """
        if not self.enabled:
            return out
        a = torch.cat(list(self.a.values()))
        inner = F.linear(x.to(a.dtype), a)
        if self.column:
            delta = self._rows(self._whole_tokens(inner))
        else:
            reduce: Any = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            (b,) = self.b.values()
            delta = F.linear(reduce(inner), b)
        return (out + delta * self.scale).to(out.dtype)

    def _whole_tokens(self, inner: Tensor) -> Tensor:
        # Backward, the sum over the ranks' rows of B.
        if self.sequence_parallel:
            whole: Tensor = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True)
            return whole
        copied: Tensor = copy_to_tensor_model_parallel_region(inner)
        return copied

    def _rows(self, inner: Tensor) -> Tensor:
        """[s, b, parts · rank] → [s, b, out / TP], parts alternating as the matrix's rows do; 0 without an adapter."""
        by_part = dict(zip(self.b, inner.chunk(len(self.b), -1), strict=True))
        outs = []
        for part, width in self.widths.items():
            if part in by_part:
                out = F.linear(by_part[part], self.b[part])
            else:
                out = inner.new_zeros(*inner.shape[:-1], width)
            outs.append(out.view(*out.shape[:-1], self.groups, -1))
        return torch.cat(outs, -1).flatten(-2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Describes A and B for distributed checkpoints."""
        axes = {f"{'b' if self.column else 'a'}.{part}": 0 if self.column else 1 for part in self.modules_of}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)


class LayerAdapters(nn.Module):
    """The adapters of one transformer layer; its child of this name."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Those of the adapters."""
        out: dict[str, Any] = {}
        for name, adapter in self.named_children():
            out |= adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)  # type: ignore[operator]
        return out


class Adapters:
    """All adapters of this rank's chunks; the other weights are frozen.

    Args:
        bridge: the model's bridge.
        chunks: GPTModels with their weights, not wrapped.
        lora: settings, of rank above 0.
        seed: random seed of the initial values.
    """

    def __init__(self, bridge: Any, chunks: list[Any], lora: Lora, seed: int) -> None:
        self.lora = lora
        self.all: list[LinearAdapter] = []
        self._states = bridge.mpu
        for chunk in chunks:
            chunk.requires_grad_(False)
            for layer in chunk.decoder.layers:
                layer.adapters = LayerAdapters()
                for place, column in LINEARS.items():
                    self._attach(bridge, layer, place, column, seed)

    def _attach(self, bridge: Any, layer: Any, place: str, column: bool, seed: int) -> None:
        config = bridge.config
        ranks = bridge.mpu.tp_size
        name = f"decoder.layers.{layer.layer_number - 1}.{place}.weight"
        sources = bridge._weight_name_mapping_mcore_to_hf(name)
        if not any(self.lora.adapts(source.removesuffix(".weight")) for source in sources):
            return
        shapes = {source.removesuffix(".weight"): bridge.shapes[source] for source in sources}
        widths = {module: shape[0] // (ranks if column else 1) for module, shape in shapes.items()}
        fan_in = next(iter(shapes.values()))[1] // (1 if column else ranks)
        groups = config.num_query_groups // ranks if place.endswith("qkv") else 1
        adapter = LinearAdapter(column, widths, fan_in, groups, self.lora, config)
        linear = layer.get_submodule(place)
        adapter.to(linear.weight.device)
        adapter.fill(seed, bridge.mpu.tp_rank, ranks)
        layer.adapters.add_module(place.rpartition(".")[2], adapter)
        # Before other hooks: OLMo's norm of the result is one.
        linear.register_forward_hook(lambda _, args, out: (adapter(args[0], out[0]), out[1]), prepend=True)
        self.all.append(adapter)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the initial one."""
        for adapter in self.all:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.all:
                adapter.enabled = True

    @torch.no_grad()
    def whole(self) -> dict[str, Pair]:
        """Hugging Face name of each adapted layer → A [rank, in] and B [out, rank], in host memory on every rank.

        Collective: all ranks of the replica call it.
        """
        own = {}
        for adapter in self.all:
            for part, module in adapter.modules_of.items():
                own[module] = (
                    self._gathered(adapter.a[part], None if adapter.column else 1),
                    self._gathered(adapter.b[part], 0 if adapter.column else None),
                )
        stages: list[Any] = [None] * self._states.pp_size
        dist.all_gather_object(stages, own, group=self._states.pp_group)
        return {module: pair for stage in stages for module, pair in stage.items()}

    def _gathered(self, parameter: Tensor, dim: int | None) -> Tensor:
        shard = parameter.detach().contiguous()
        shards = [shard]
        if dim is not None and self._states.tp_size > 1:
            shards = [torch.empty_like(shard) for _ in range(self._states.tp_size)]
            dist.all_gather(shards, shard, group=self._states.tp_group)
        return torch.cat(shards, dim or 0).cpu().clone()

    def merged(self, tensors: Iterator[tuple[str, Tensor]], whole: dict[str, Pair]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names with what the adapters add, rounded as peft's merge rounds it."""
        for name, tensor in tensors:
            pair = whole.get(name.removesuffix(".weight"))
            if pair is None:
                yield name, tensor
                continue
            a, b = (x.to(tensor.device) for x in pair)
            yield name, tensor + (b @ a * (self.lora.alpha / self.lora.rank)).to(tensor.dtype)
