"""LoRA adapters on their way from a learner to an engine: what stands beside the tensors, and merging for engines that take none."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from components.engine.weights import local_folder, read_safetensors
from components.models.load import resolve_model_path
from pipeline.core.component import ModelSpec
from pipeline.core.errors import DataError
from pipeline.core.payloads import Adapter, Weights

TENSORS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "creditgraph-weights-"
_ROOT = "base_model.model."
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """Whether the learner publishes LoRA adapters; `configs/engine/vllm.yaml` takes both from the settings of the node `learner`."""

    publish: Literal["merged", "adapter"] = "merged"
    """what the learner publishes; with merged the engine starts without LoRA and merges an adapter that it is given all
    the same"""
    rank: int = 0
    """largest rank of the adapters that are taken without merging"""

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= _RANKS[-1] and self.publish == "adapter":
            raise ValueError(f"lora.rank is {self.rank}; wanted 0 to {_RANKS[-1]}, or lora.publish=merged.")

    @property
    def room(self) -> int:
        """The rank that vLLM is started for, one of those it knows; 0: it starts without LoRA."""
        return next(r for r in _RANKS if r >= self.rank) if self.publish == "adapter" and self.rank else 0


def adapter_name(version: int) -> str:
    """The name under which requests ask for the adapter of a version."""
    return f"{PREFIX}{version}"


def peft_config(adapter: Adapter) -> str:
    """The text of PEFT's adapter_config.json."""
    known: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapter.targets),
    }
    return json.dumps(known, indent=1)


def merged(weights: Weights, spec: ModelSpec) -> Weights:
    """The whole weights that an adapter makes of the model's own, which are read from its files; other weights as they are.

    Raises:
        DataError: the adapter does not fit the model.
    """
    if weights.adapter is None:
        return weights
    place, given = f"adapter version {weights.version}", weights.tensors or {}
    device = next((t.device for t in given.values()), torch.device("cpu"))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    base = read_safetensors(local_folder(resolve_model_path(spec.path)))
    tensors = {n: t.to(device=device, dtype=dtype if t.is_floating_point() else t.dtype) for n, t in base.items()}
    for name in (n for n in given if ".lora_A." in n):
        layer = name.removeprefix(_ROOT).partition(".lora_A.")[0]
        a, b = given[name], given.get(name.replace(".lora_A.", ".lora_B."))
        weight = tensors.get(f"{layer}.weight")
        if weight is None or b is None or (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise DataError(
                f"{place}: '{name}' has no weight or no counterpart of its form in model '{spec.path}'; wanted an "
                "adapter of linear layers "
                "of that model. Learner and engine must use one model.path."
            )
        tensors[f"{layer}.weight"] = weight + _delta(a, b, weights.adapter).to(dtype)
    return dataclasses.replace(weights, tensors=tensors, adapter=None)


def _delta(a: Tensor, b: Tensor, adapter: Adapter) -> Tensor:
    # In peft's order, so that merging here and in the learner gives the same bits.
    return (b @ a) * (adapter.alpha / adapter.rank)
