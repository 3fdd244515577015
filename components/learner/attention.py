"""Attention over packed sequences: rows of different length laid end to end in one [1, total] input.

Every other layer of a transformer works on tokens one by one, so a packed input wastes nothing there; only attention must know
where sequences begin. The function here is registered with transformers as an attention implementation and receives the
`Layout` through the model's keyword arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IMPLEMENTATION = "creditgraph_packed"


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """Where the sequences of a packed input lie.

    Attributes:
        lengths: int64 [rows].
        offsets: int32 [rows + 1], cumulative lengths.
        places: int64 [total], place of each token in the padded [rows · longest] grid.
        rows, longest: numbers.
    """

    lengths: Tensor
    offsets: Tensor
    places: Tensor
    rows: int
    longest: int


class _ToGrid(torch.autograd.Function):
    """[total, …] → [slots, …] with zeros in unused slots; its backward pass is `_FromGrid` and the reverse."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, places: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(places)
        return packed.new_zeros((slots, *packed.shape[1:])).index_copy_(0, places, packed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None


class _FromGrid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.slots = len(grid)
        return grid.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros((ctx.slots, *grad.shape[1:])).index_copy_(0, places, grad), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; query [1, H, total, D], key and value [1, H_kv, total, D] → [1, total, H, D].

    Without a layout it is ordinary causal attention. Soft caps and attention sinks are refused by an exception, on which the
    learner falls back to padded batches.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("packed attention: soft caps and attention sinks are not supported")
    if packed is None:
        packed = _whole_rows(query)
    batch, heads, length, dim = query.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[3]) for x in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out = _flash(q, k, v, packed, scaling, sliding_window)
    else:
        out = _grid(q, k, v, packed, scaling, sliding_window)
    return out.reshape(batch, length, heads, dim), None


def _whole_rows(query: Tensor) -> Layout:
    batch, length = query.shape[0], query.shape[2]
    return make_layout(torch.full((batch,), length, dtype=torch.int64, device=query.device))


def make_layout(lengths: Tensor) -> Layout:
    """The layout of sequences of the given int64 lengths [rows], each at least 1."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    rows, longest, total = len(lengths), int(lengths.max()), int(offsets[-1])
    shift = torch.arange(rows, device=lengths.device) * longest - offsets[:-1]
    places = torch.repeat_interleave(shift, lengths, output_size=total) + torch.arange(total, device=lengths.device)
    return Layout(lengths=lengths, offsets=offsets.to(torch.int32), places=places, rows=rows, longest=longest)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    past = -1 if window is None else window - 1
    out = varlen_attn(
        q,
        k,
        v,
        layout.offsets,
        layout.offsets,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(past, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def _grid(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    rows, longest = layout.rows, layout.longest
    full = rows * longest == len(q)
    to_grid: Any = _ToGrid.apply
    from_grid: Any = _FromGrid.apply
    grids = [x if full else to_grid(x, layout.places, rows * longest) for x in (q, k, v)]
    q4, k4, v4 = (x.view(rows, longest, x.shape[1], x.shape[2]).transpose(1, 2) for x in grids)
    mask = None
    if window is not None and longest > window:
        place = torch.arange(longest, device=q.device)
        gap = place[:, None] - place[None, :]
        mask = (gap >= 0) & (gap < window)
    out = F.scaled_dot_product_attention(
        q4, k4, v4, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = out.transpose(1, 2).reshape(rows * longest, -1)
    return flat if full else from_grid(flat, layout.places)


def register() -> str:
    """Makes `packed_attention` known to transformers and returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    return IMPLEMENTATION
