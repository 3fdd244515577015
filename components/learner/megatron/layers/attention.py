"""The attention kernel of packed rows: torch's flash attention, or one of TransformerEngine's.

TransformerEngine runs FlashAttention (version 3 on Hopper, where it is installed) and cuDNN's attention. Rows with more
keys than queries, which continue a shared prefix or are a context-parallel rank's, have the causal mask aligned to
their end.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.learner.measure import measure, report
from creditgraph.components.learner.megatron.settings import Kernel
from creditgraph.components.learner.packing.attention import PackedLayout, make_layout, of_paths, packed_attention
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

# Rows that the kernels are compared on.
ROWS = 4
MOST_TOKENS = 65536
SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class TransformerEngineAttention:
    """One of TransformerEngine's kernels, for `packed_attention`.

    Args:
        kernel: "flash" or "cudnn".
    """

    last: ClassVar[str] = ""  # the kernel that TransformerEngine chose last in this process

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self._modules: dict[Any, Any] = {}

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scaling: float | None, window: int | None
    ) -> Tensor:
        """[total, H, D] → [total, H · D]."""
        size = (q.shape[1], k.shape[1], q.shape[2], scaling)
        if size not in self._modules:
            self._modules[size] = _module(*size)
        with self._alone():
            out: Tensor = self._modules[size](
                q,
                *of_paths(k, v, layout),
                qkv_format="thd",
                cu_seqlens_q=layout.offsets,
                cu_seqlens_kv=layout.key_offsets,
                max_seqlen_q=layout.longest,
                max_seqlen_kv=layout.longest_path,
                attn_mask_type="padding_causal" if layout.keys is None else "padding_causal_bottom_right",
                window_size=(-1 if window is None else window - 1, 0),
            )
        return out

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # TransformerEngine reads these variables when shapes change; megatron-core requires its own values of them
        # whenever it builds a model.
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

        before = {name: os.environ.get(name) for name in SWITCHES}
        os.environ.update(zip(SWITCHES, ("1", "0", "0") if self.kernel == "flash" else ("0", "1", "0"), strict=True))
        if TransformerEngineAttention.last != self.kernel:
            _attention_backends["backend_selection_requires_update"] = True
            TransformerEngineAttention.last = self.kernel
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _module(heads: int, key_heads: int, head_dim: int, scaling: float | None) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=head_dim,
        num_gqa_groups=key_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scaling,
    )


def choose_kernel(
    setting: Kernel,
    shape: tuple[int, int, int],
    windows: list[int | None],
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    over_ranks: Callable[[Tensor], Tensor],
) -> TransformerEngineAttention | None:
    """The attention kernel of a run; None for torch's. Collective where it measures.

    Args:
        setting: a kernel, or "auto" for the fastest on a GPU with TransformerEngine.
        shape: heads and key-value heads of a rank, and head size.
        windows: the sliding window of each layer, or None.
        tokens: of a micro-batch.
        dtype, device: of the activations.
        over_ranks: sums a tensor over ranks, so that all choose the same.

    Raises ConfigError for a kernel that cannot be had.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None and device.type == "cuda"
    if setting == "torch" or (setting == "auto" and not installed):
        return None
    names = ("torch", "flash", "cudnn") if setting == "auto" else (setting,)
    rows = _Rows(shape, windows, min(tokens or MOST_TOKENS, MOST_TOKENS), dtype, device)
    kernels = {name: None if name == "torch" else TransformerEngineAttention(name) for name in names}
    candidates = {name: partial(rows.attend, kernel) for name, kernel in kernels.items()}
    times, failed = measure(candidates, device, over_ranks)
    if not times:
        why = failed.get(setting, "it failed on another rank")
        raise ConfigError(
            f"learner.layers.attention '{setting}' needs TransformerEngine with that kernel on a GPU, but: {why}. "
            "Install what is missing (see docs/scaling.md), or set learner.layers.attention=auto."
        )
    chosen = min(times, key=times.__getitem__)
    if setting == "auto":
        report(f"learner.layers.attention={chosen}", times, failed)
    return kernels[chosen]


class _Rows:
    """Random queries, keys and values, which kernels are run and compared on.

    They are run as plain rows and as rows that continue half of the first one, with every window that layers have.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        windows: list[int | None],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads, key_heads, head_dim = shape
        length = max(tokens // ROWS, 2)
        generator = torch.Generator(device).manual_seed(0)
        self.inputs = [
            torch.randn(1, count, ROWS * length, head_dim, generator=generator, device=device).to(dtype)
            for count in (heads, key_heads, key_heads)
        ]
        lengths = torch.full((ROWS,), length, dtype=torch.int64, device=device)
        own = torch.arange(ROWS * length, device=device).view(ROWS, length)
        paths = [own[0], *(torch.cat([own[0, : length // 2], row]) for row in own[1:])]
        shared = make_layout(lengths, Jagged.from_rows(paths))
        self.cases = [(rows, window) for rows in (make_layout(lengths), shared) for window in dict.fromkeys(windows)]
        self._first: list[Tensor] = []

    def attend(self, kernel: TransformerEngineAttention | None) -> None:
        """Forward and backward; ValueError for a kernel whose results differ from the first one's."""
        nothing: Any = None
        made = []
        for layout, window in self.cases:
            q, k, v = (x.detach().requires_grad_() for x in self.inputs)
            out, _ = packed_attention(nothing, q, k, v, None, sliding_window=window, packed=layout, kernel=kernel)
            out.backward(out.detach())  # type: ignore[no-untyped-call]
            made.append(out.detach())
        self._first = self._first or made
        gap = max(float((a - b).abs().max()) for a, b in zip(made, self._first, strict=True))
        if not gap <= 0.05:
            raise ValueError(f"its result differs from torch's by {gap:.2g}")
