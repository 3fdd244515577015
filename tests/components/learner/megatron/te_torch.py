"""TransformerEngine's layers computed by plain torch: their constructors, parameters and signatures are the real ones.

Each replaced `forward` binds its arguments to the real signature first, so an unknown or missing one fails as on a GPU.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

CALLS: list[tuple[str, dict[str, Any], Any]] = []
"""(class, arguments, fp8 recipe or None) of the forward passes since tests last cleared it"""
CAPABILITY = [10, 0]
"""compute capability that TransformerEngine sees"""
ADAM_STEPS = [0]
"""calls of FusedAdam's kernel"""
MISSING: set[str] = set()
"""kernels that are not installed"""


def install(te: Any) -> None:
    """Replaces what computes; call after `te_sources.load` and before megatron is imported."""
    available = torch.cuda.is_available

    def for_te() -> bool:
        return sys._getframe(1).f_globals.get("__name__", "").startswith("transformer_engine.") or available()

    torch.cuda.is_available = for_te
    torch.version.cuda = "13.0"
    te.pytorch.quantization.get_device_compute_capability = lambda: tuple(CAPABILITY)
    te.pytorch.cpp_extensions.get_cudnn_version = lambda: 91800
    library = sys.modules["transformer_engine_torch"]
    for name, compute in (("adam", _adam), ("l2norm", _norm_of), ("scale", _scale)):
        # FusedAdam reads them from the library, megatron-core from the package.
        setattr(library, f"multi_tensor_{name}", compute)
        setattr(te.pytorch.optimizers, f"multi_tensor_{name}", compute)
    _replace(te.pytorch.Linear, _linear)
    _replace(te.pytorch.LayerNormLinear, _norm_linear)
    _replace(te.pytorch.RMSNorm, _norm)
    _keep_scale(te.pytorch.DotProductAttention)
    _replace(te.pytorch.DotProductAttention, _attention)


def _keep_scale(owner: Any) -> None:
    made = owner.__init__
    signature = inspect.signature(made)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.scale_of_tests = signature.bind(self, *args, **kwargs).arguments.get("softmax_scale")

    owner.__init__ = init


def _replace(owner: Any, compute: Callable[[Any, dict[str, Any]], Any]) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    signature = inspect.signature(owner.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        state = FP8GlobalStateManager
        recipe = state.get_fp8_recipe() if state.is_fp8_enabled() else None
        CALLS.append((owner.__name__, bound.arguments, recipe))
        return compute(self, bound.arguments)

    owner.forward = forward


def _adam(
    chunk: int, skip: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float, step: int, decoupled: int,
    bias_correction: int, weight_decay: float
) -> None:  # fmt: skip
    assert decoupled == bias_correction == 1
    ADAM_STEPS[0] += 1
    for gradient, p, first, second in zip(*tensors, strict=True):
        p.mul_(1 - lr * weight_decay)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        p.addcdiv_(first / (1 - beta1**step), (second / (1 - beta2**step)).sqrt() + eps, value=-lr)


def _norm_of(chunk: int, skip: Any, tensors: Any, per_tensor: bool) -> tuple[Any, None]:
    assert not per_tensor
    return torch.stack([x.float().norm() for x in tensors[0]]).norm()[None], None


def _scale(chunk: int, skip: Any, tensors: Any, factor: float) -> None:
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * factor)


def _norm(self: Any, given: dict[str, Any]) -> Any:
    x = given["input"]
    return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def _linear(self: Any, given: dict[str, Any]) -> Any:
    return _product(self, given["inp"])


def _norm_linear(self: Any, given: dict[str, Any]) -> Any:
    x = given["inp"]
    return _product(self, F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


def _product(self: Any, x: Any) -> Any:
    from megatron.core.tensor_parallel import mappings

    shared = {"group": self.tp_group} if self.tp_size > 1 else None
    bias = self.bias if self.use_bias and not self.return_bias else None
    if self.parallel_mode == "column":
        if shared and self.sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, **shared)
        elif shared:
            x = mappings.copy_to_tensor_model_parallel_region(x, **shared)
    out = F.linear(x, self.weight, bias)
    if self.parallel_mode == "row" and shared:
        if self.sequence_parallel:
            out = mappings.reduce_scatter_to_sequence_parallel_region(out, **shared)
        else:
            out = mappings.reduce_from_tensor_model_parallel_region(out, **shared)
    return (out, self.bias) if self.return_bias else out


def _attention(self: Any, given: dict[str, Any]) -> Any:
    """Only what we ask it for: packed rows, causal, by one kernel alone."""
    switches = [os.environ[f"NVTE_{name}_ATTN"] for name in ("FLASH", "FUSED", "UNFUSED")]
    assert switches in (["1", "0", "0"], ["0", "1", "0"])
    if switches[0] == "1" and "flash" in MISSING:
        raise ValueError("No dot product attention backend is available for the provided inputs.")
    assert given["qkv_format"] == "thd"
    q, k, v = (given[f"{name}_layer"] for name in ("query", "key", "value"))
    assert q.dim() == 3
    begins, ends = (given[f"cu_seqlens_{name}"].tolist() for name in ("q", "kv"))
    assert (begins[-1], ends[-1]) == (len(q), len(k))
    longest = [max(b - a for a, b in pairwise(offsets)) for offsets in (begins, ends)]
    assert longest == [given["max_seqlen_q"], given["max_seqlen_kv"]]
    behind, _ = given["window_size"]
    _assert_supported(given, longest, switches[0] == "1")
    outs = []
    for queries, keys in zip(pairwise(begins), pairwise(ends), strict=True):
        parts = (x[slice(*of)].transpose(0, 1) for x, of in zip((q, k, v), (queries, keys, keys), strict=True))
        length, path = queries[1] - queries[0], keys[1] - keys[0]
        shift = path - length if "bottom_right" in given["attn_mask_type"] else 0
        gap = torch.arange(length)[:, None] + shift - torch.arange(path)
        mask = (gap >= 0) & (gap <= (behind if behind >= 0 else path))
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=self.scale_of_tests, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs).flatten(1)


def _assert_supported(given: dict[str, Any], longest: list[int], flash: bool) -> None:
    """TransformerEngine's own choice is the kernel that we ask for, in 16 bits on a Hopper GPU with FlashAttention."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    q, k = given["query_layer"], given["key_layer"]
    params = utils.AttentionParams(
        qkv_layout="thd_thd_thd",
        batch_size=len(given["cu_seqlens_q"]) - 1,
        num_heads=q.shape[1],
        num_gqa_groups=k.shape[1],
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
        num_tokens_q=len(q),
        num_tokens_kv=len(k),
        head_dim_qk=64,
        head_dim_v=64,
        attn_mask_type=given["attn_mask_type"],
        window_size=given["window_size"],
        bottom_right_diagonal="bottom_right" in given["attn_mask_type"],
    )
    flash_attention = patch.multiple(utils.FlashAttentionUtils, is_installed=True, v2_3_plus=True)
    hopper = patch.multiple(
        utils, get_device_compute_capability=lambda: (9, 0), get_cudnn_version=lambda: (9, 18, 0), create=True
    )
    cudnn = (utils.FusedAttnBackend.F16_arbitrary_seqlen, "")
    library = patch.object(utils.tex, "get_fused_attn_backend", lambda params: cudnn)
    with flash_attention, hopper, library, patch("torch.cuda.current_device", lambda: 0):
        chosen = utils.get_attention_backend(params)
    assert (chosen[0], chosen[2]) == (flash, not flash), chosen
