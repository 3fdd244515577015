"""Attention over packed sequences: rows of different length laid end to end in one [1, total] input.

Every other layer of a transformer works on tokens one by one, so a packed input wastes nothing there; only attention
must know where sequences begin, and which prefix, computed by other rows, they continue. The function here is
registered with transformers as an attention implementation and receives the `PackedLayout` through the model's keyword
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from creditgraph.components.learner.packing.flash import obstacle, varlen
from creditgraph.components.learner.packing.prefix import bags
from creditgraph.pipeline.core.jagged import Jagged

IMPLEMENTATION = "creditgraph_packed"
Kernel = Callable[[Tensor, Tensor, Tensor, "PackedLayout", float | None, int | None], Tensor]
"""(queries [total, H, D], keys and values, layout, scaling, window) → [total, H, D] or [total, H · D]"""
# With shared prefixes attention runs on copies of the keys and values of every row's path. Copies of a layer up to this
# many bytes are kept for the backward pass; larger ones are made again there, for the time of one more forward
# attention: at a budget of 16k tokens the 32 layers of an 8B model would keep 17 GB of them.
KEPT_COPIES = 64 << 20


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedLayout:
    """Positions of the sequences in a packed input.

    Attributes:
        lengths: int64 [rows], tokens that each row computes, at least 1.
        starts: int64 [rows], tokens of its path that come before them, computed by other rows.
        keys: int64 [Σ starts + lengths], places of all tokens of each row's path; None when no row shares any.
        rows, total: number of rows, and of tokens that they compute.
        longest, longest_path: largest number of tokens of a row, and of its path.
        sources: tokens that keys are taken from when they are more than the `total` that rows compute (a slice of a
            batch); else 0.
    """

    lengths: Tensor
    starts: Tensor
    keys: Tensor | None
    rows: int
    total: int
    longest: int
    longest_path: int
    sources: int = 0

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [rows + 1], cumulative lengths."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def key_offsets(self) -> Tensor:
        """int32 [rows + 1], cumulative path lengths."""
        if self.keys is None:
            return self.offsets
        return F.pad((self.starts + self.lengths).cumsum(0), (1, 0)).to(torch.int32)

    @cached_property
    def key_bags(self) -> tuple[Tensor, Tensor]:
        """The places of `keys` that hold each token."""
        assert self.keys is not None
        return bags(self.keys, self.sources or self.total)

    @cached_property
    def grids(self) -> Grids:
        """The rows as a few padded grids, for attention functions without support for packed rows."""
        return Grids.of(self)


def make_layout(lengths: Tensor, keys: Jagged | None = None) -> PackedLayout:
    """The layout of rows that compute `lengths` tokens each, at least 1, at the end of the paths `keys`."""
    paths = lengths if keys is None else keys.lengths
    longest, longest_path, total = torch.stack([lengths.max(), paths.max(), lengths.sum()]).tolist()
    return PackedLayout(
        lengths=lengths,
        starts=paths - lengths,
        keys=None if keys is None else keys.values,
        rows=len(lengths),
        total=total,
        longest=longest,
        longest_path=longest_path,
    )


class Gather(torch.autograd.Function):
    """x[index] with a precomputed inverse of `index`: the backward pass sums each bag of places (see `bags`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor, starts: Tensor) -> Tensor:
        """[total, …] → [index, …]."""
        ctx.save_for_backward(places, starts)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """[index, …] → [total, …]."""
        places, starts = ctx.saved_tensors
        grad = grads[0]
        out = F.embedding_bag(places, grad.reshape(len(grad), -1), starts, mode="sum")
        return out.view(-1, *grad.shape[1:]), None, None, None


class _FromGrid(torch.autograd.Function):
    """Slots → tokens; unused slots get no gradient."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, tokens: Tensor, slots: Tensor, unused: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, unused)
        return grid.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tokens, unused = ctx.saved_tensors
        return grads[0].index_select(0, tokens).index_fill_(0, unused, 0.0), None, None, None


@dataclass(frozen=True, eq=False)
class Grid:
    """Rows of like size: `rows` × `queries` tokens that attend to `rows` × `keys` path tokens, both left-aligned.

    `starts` int64 [rows] as in the layout; `causal` when all are 0.
    """

    rows: int
    queries: int
    keys: int
    starts: Tensor
    causal: bool
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """bool [rows or 1, 1, queries, keys], or None for plain causal attention."""
        limit = window if window is not None and self.keys > window else 0
        if self.causal and not limit:
            return None
        if limit not in self.masks:
            device = self.starts.device
            gap = torch.arange(self.queries, device=device)[:, None] - torch.arange(self.keys, device=device)[None]
            gap = gap[None, None] + (self.starts[:1] if self.causal else self.starts)[:, None, None, None]
            self.masks[limit] = (gap >= 0) & (gap < limit) if limit else gap >= 0
        return self.masks[limit]


@dataclass(frozen=True, eq=False, kw_only=True)
class Grids:
    """Index tensors between packed tokens and the slots of all grids together.

    Attributes:
        grids: their shapes.
        tokens: int64 [query slots], the token in each slot; 0 in unused ones.
        slots: int64 [total], the slot of each token.
        unused: int64, the unused query slots.
        key_tokens: int64 [key slots].
        key_bags: for each token, the key slots that hold it.
    """

    grids: list[Grid]
    tokens: Tensor
    slots: Tensor
    unused: Tensor
    key_tokens: Tensor
    key_bags: tuple[Tensor, Tensor]

    @staticmethod
    def of(layout: PackedLayout) -> Grids:
        """Groups rows by whether they have a prefix and by the powers of two above their queries and keys."""
        device = layout.lengths.device
        path = layout.starts + layout.lengths
        members: dict[tuple[bool, int, int], list[int]] = {}
        for row, (start, queries, keys) in enumerate(torch.stack([layout.starts, layout.lengths, path], 1).tolist()):
            size = (start > 0, (queries - 1).bit_length(), (keys - 1).bit_length())
            members.setdefault(size, []).append(row)
        grids = []
        # The first slot of each row, among those of queries and of keys.
        base = torch.zeros_like(path)
        key_base = torch.zeros_like(path)
        used = 0
        key_used = 0
        for (has_prefix, _, _), rows in sorted(members.items()):
            which = torch.tensor(rows, device=device)
            grid = Grid(
                rows=len(rows),
                queries=int(layout.lengths[which].max()),
                keys=int(path[which].max()),
                starts=layout.starts[which],
                causal=not has_prefix,
            )
            grids.append(grid)
            place = torch.arange(len(rows), device=device)
            base[which] = used + place * grid.queries
            key_base[which] = key_used + place * grid.keys
            used += grid.rows * grid.queries
            key_used += grid.rows * grid.keys
        slots = _slots(base, layout.lengths, layout.total)
        tokens = slots.new_zeros(used)
        tokens[slots] = torch.arange(layout.total, device=device)
        free = torch.ones(used, dtype=torch.bool, device=device)
        free[slots] = False
        key_tokens = tokens
        key_bags = (slots, torch.arange(layout.total, device=device))
        if layout.keys is not None:
            key_slots = _slots(key_base, path, len(layout.keys))
            key_tokens = slots.new_zeros(key_used)
            key_tokens[key_slots] = layout.keys
            order, starts = layout.key_bags
            key_bags = (key_slots[order], starts)
        return Grids(
            grids=grids,
            tokens=tokens,
            slots=slots,
            unused=free.nonzero(as_tuple=True)[0],
            key_tokens=key_tokens,
            key_bags=key_bags,
        )


def _slots(base: Tensor, lengths: Tensor, total: int) -> Tensor:
    # base[row] + place within the row, row after row.
    shift = base - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths, output_size=total) + torch.arange(total, device=base.device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: PackedLayout | None = None,
    kernel: Kernel | None = None,
    recomputed: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; without a layout, ordinary causal attention.

    Soft caps and attention sinks raise an exception; the learner then computes one row after the other. Flash attention
    where `obstacle` names none, else padded grids.

    Args:
        query: [1, H, total, D].
        key, value: [1, H_kv, total, D].
        kernel: None means torch's.
        recomputed: whether the caller computes the layer again in the backward pass, and so keeps no copies.

    Returns:
        [1, total, H, D], and None instead of attention weights.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("packed attention: soft caps and attention sinks are not supported")
    if packed is None:
        packed = _whole_rows(query)
    batch, heads, length, dim = query.shape
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (query, key, value))
    fast = query.is_cuda and not obstacle(query.device, query.dtype, dim, sliding_window)
    attend: Kernel = kernel or (_flash if fast else _padded)
    copies = 0 if packed.keys is None else 2 * len(packed.keys) * k[0].numel() * k.element_size()
    if copies > KEPT_COPIES and not recomputed and torch.is_grad_enabled():
        out = checkpoint(
            attend, q, k, v, packed, scaling, sliding_window, use_reentrant=False, preserve_rng_state=False
        )
    else:
        out = attend(q, k, v, packed, scaling, sliding_window)
    return out.reshape(batch, length, heads, dim), None


def _whole_rows(query: Tensor) -> PackedLayout:
    batch, _, length, _ = query.shape
    return make_layout(torch.full((batch,), length, dtype=torch.int64, device=query.device))


def of_paths(k: Tensor, v: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Keys and values [total, H, D] → those of every row's path, row after row: [Σ path lengths, H, D]."""
    if layout.keys is None:
        return k, v
    gather: Any = Gather.apply
    return gather(k, layout.keys, *layout.key_bags), gather(v, layout.keys, *layout.key_bags)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None, window: int | None) -> Tensor:
    # With fewer queries than keys the causal mask is aligned to the end, where a row's own tokens are.
    offsets = (layout.offsets, layout.key_offsets)
    return varlen(q, *of_paths(k, v, layout), offsets, (layout.longest, layout.longest_path), scaling, window)


def _padded(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None, window: int | None) -> Tensor:
    grids = layout.grids
    gather: Any = Gather.apply
    from_grid: Any = _FromGrid.apply
    # Each token has one query slot, and as many key slots as there are paths through it.
    q = gather(q, grids.tokens, grids.slots, torch.arange(layout.total, device=q.device))
    k, v = (gather(x, grids.key_tokens, *grids.key_bags) for x in (k, v))
    queries = torch.split(q, [g.rows * g.queries for g in grids.grids])
    key_sizes = [g.rows * g.keys for g in grids.grids]
    keys = torch.split(k, key_sizes)
    values = torch.split(v, key_sizes)
    outs = []
    for grid, *parts in zip(grids.grids, queries, keys, values, strict=True):
        # [rows · length, H, D] → [rows, H, length, D]
        q4, k4, v4 = (x.view(grid.rows, -1, x.shape[1], x.shape[2]).transpose(1, 2) for x in parts)
        mask = grid.mask(window)
        out = F.scaled_dot_product_attention(
            q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outs.append(out.transpose(1, 2).reshape(grid.rows * grid.queries, -1))
    out = from_grid(outs[0] if len(outs) == 1 else torch.cat(outs), grids.tokens, grids.slots, grids.unused)
    assert isinstance(out, Tensor)
    return out


def register() -> str:
    """Registers `packed_attention` with transformers and returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION
