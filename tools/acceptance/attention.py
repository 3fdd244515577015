"""Attention of packed rows against a float64 loop, whether the fast kernel ran, and its speed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from acceptance.measure import Run, difference, generator, operations
from creditgraph.components.learner.packing.attention import PackedLayout, make_layout, packed_attention
from creditgraph.components.learner.packing.prefix import paths

FAST = ("flash", "varlen", "cudnn", "fused_attn")  # in the names of operations that are one fused kernel
SLOW = ("_attention_math", "_softmax", "_efficient_attention")
# A float has 8 bits of precision in bfloat16; sums of many rounded numbers stay below three roundings of 2⁻⁸.
LIMITS = {torch.bfloat16: 0.012, torch.float32: 1e-4}


class Case(NamedTuple):
    """Rows of `lengths` tokens, the first `overlap` of each shared with the row before it."""

    name: str
    heads: int
    kv_heads: int
    lengths: list[int]
    overlap: list[int]
    window: int | None = None


def cases(small: bool) -> list[Case]:
    """Plain, grouped, sliding window, shared prefix."""
    unit = 8 if small else 512
    rows = [4 * unit, unit - 3, 2 * unit + 1]
    none = [0, 0, 0]
    return [
        Case("plain", 4, 4, rows, none),
        Case("grouped", 12, 2, rows, none),
        Case("window", 12, 2, rows, none, unit // 2),
        Case("shared prefix", 12, 2, [3 * unit, 3 * unit - 5, 2 * unit, unit], [0, 2 * unit + 1, unit, 0]),
    ]


def layout_of(case: Case, device: str) -> PackedLayout:
    """Each row computes what it does not share."""
    lengths = torch.tensor(case.lengths, device=device)
    overlap = torch.tensor(case.overlap, device=device)
    return make_layout(lengths - overlap, paths(overlap, lengths) if any(case.overlap) else None)


def exact(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None) -> Tensor:
    """Attention [total, H, D] row by row, in the dtype of its inputs, from [total, heads, D]."""
    out = []
    begin = 0
    key_begin = 0
    for start, own in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        keys = torch.arange(begin, begin + own, device=q.device)
        if layout.keys is not None:
            keys = layout.keys[key_begin : key_begin + start + own]
        rows = q[begin : begin + own].transpose(0, 1)
        shared = q.shape[1] // k.shape[1]
        own_k, own_v = (x[keys].transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
        gap = torch.arange(start, start + own, device=q.device)[:, None] - torch.arange(start + own, device=q.device)
        hidden = gap < 0 if window is None else (gap < 0) | (gap >= window)
        scores = (rows @ own_k.transpose(1, 2)) * q.shape[2] ** -0.5
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ own_v).transpose(0, 1))
        begin += own
        key_begin += start + own
    return torch.cat(out)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, window: int | None) -> Tensor:
    """The product's attention, [total, H, D] from [total, heads, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return packed_attention(nn.Module(), query, key, value, None, sliding_window=window, packed=layout)[0][0]


def stage(run: Run) -> None:
    """See the module docstring."""
    for dtype in (torch.bfloat16, torch.float32):
        for case in cases(run.small):
            _compare(run, case, dtype)
    for heads, kv_heads in ((4, 2),) if run.small else ((12, 2), (32, 8)):
        _speed(run, heads, kv_heads, 64 if run.small else 32768, 16 if run.small else 128)


def _compare(run: Run, case: Case, dtype: torch.dtype) -> None:
    layout = layout_of(case, run.device)
    g = generator(run.device)
    dim = 16 if run.small else 128
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, upstream = (torch.randn(layout.total, n, dim, device=run.device, generator=g).to(dtype) for n in sizes)
    narrow = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = attend(*narrow, layout, case.window)
    expected = exact(*wide, layout, case.window)
    grads = torch.autograd.grad(out, narrow, upstream)
    true_grads = torch.autograd.grad(expected, wide, upstream.double())
    name = str(dtype).removeprefix("torch.")
    gaps = [difference(got, true) for got, true in zip((out, *grads), (expected, *true_grads), strict=True)]
    run.row(case=case.name, dtype=name, **dict(zip(("output", "dq", "dk", "dv"), gaps, strict=True)))
    run.check(f"{case.name}, {name}: largest gap to float64", max(gaps), LIMITS[dtype])
    if dtype is torch.bfloat16 and run.device == "cuda":
        names = operations(lambda: attend(*narrow, layout, case.window))
        fast = any(word in name for name in names for word in FAST)
        slow = sorted(name for name in names if any(word in name for word in SLOW))
        run.check(
            f"{case.name}: the fused kernel ran{', beside ' + ', '.join(slow) if slow else ''}", fast and not slow
        )


def _speed(run: Run, heads: int, kv_heads: int, length: int, dim: int) -> None:
    layout = make_layout(torch.tensor([length], device=run.device))
    g = generator(run.device)
    q, k, v = (
        torch.randn(length, n, dim, device=run.device, dtype=run.dtype, generator=g).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    forward = run.seconds(lambda: attend(q, k, v, layout, None))
    both = run.seconds(lambda: attend(q, k, v, layout, None).sum().backward())
    # Scores and values, half of the square each; the backward pass has five products for the forward pass's two.
    work = 2.0 * length * length * heads * dim
    rate = run.matmul_rate(length, heads * dim, heads * dim)
    run.row(
        case=f"one row of {length}, {heads}/{kv_heads} heads",
        dtype=str(run.dtype).removeprefix("torch."),
        forward_tflops=work / forward / 1e12,
        both_tflops=3.5 * work / both / 1e12,
        of_matmul_rate=3.5 * work / both / rate,
    )
