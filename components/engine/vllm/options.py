"""vLLM's arguments and environment, for its offline engine and for servers."""

from __future__ import annotations

from typing import Any

from creditgraph.components.engine.served.dialect import ServedModel
from creditgraph.components.engine.vllm.settings import VllmSettings
from creditgraph.pipeline.core.errors import ConfigError

EXTENSION = "creditgraph.components.engine.vllm.worker.WorkerExtension"
TRANSFER = "creditgraph"  # name of `creditgraph.components.engine.vllm.receive.Receiver` among vLLM's transfer engines
SCHEDULER = "creditgraph.components.engine.vllm.scheduler.exact_scheduler"
_CPU_CACHE_GB = 1.0


def engine_options(settings: VllmSettings, model: ServedModel) -> dict[str, Any]:
    """vLLM's engine arguments, for `vllm.LLM` and for a server's command line."""
    cpu = model.device == "cpu"
    if settings.return_routed_experts and engine_variables(settings, model)["VLLM_USE_V2_MODEL_RUNNER"] == "0":
        raise ConfigError(
            "engine.return_routed_experts: expected a GPU, whose V2 model runner returns them, got device 'cpu'. Set "
            "it to false, or use engine=sglang."
        )
    if settings.lora.max_rank and not cpu and model.dtype == "float32":
        raise ConfigError(
            "engine.lora.publish: expected a model in bfloat16, because vLLM's kernels for adapters on GPUs take 16 "
            "bits only, got float32. Set model.dtype=bfloat16, or learner.lora.publish=merged."
        )
    options: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "load_format": "safetensors",  # other files are pickles
        # A row that fills the context is scored as a prompt, and vLLM requires room for one token after a prompt.
        "max_model_len": model.context_length + 1,
        "trust_remote_code": model.trust_remote_code,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.tensor_parallel,
        # On a CPU, compiling takes a minute and gains nothing.
        "enforce_eager": cpu or settings.enforce_eager,
        # The V1 runner rewinds the random stream of a row whose prompt it cuts in two, which CPU generators cannot.
        "enable_chunked_prefill": not cpu,
        "gpu_memory_utilization": settings.gpu_memory,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "max_logprobs": model.vocab_size + 1,  # most likely tokens of a scored place, and its entropy
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "weight_transfer_config": {"backend": TRANSFER},
        "enable_sleep_mode": model.sleeps,
        "seed": 0,
        "enable_return_routed_experts": settings.return_routed_experts,
    }
    if cache := settings.kv_cache_gb or (_CPU_CACHE_GB if cpu else 0.0):
        options["kv_cache_memory_bytes"] = int(cache * 2**30)
    if cpu:
        options["block_size"] = 32  # others have no kernel
    if settings.quantization == "fp8":
        options["quantization"] = "fp8_per_channel"
    if rank := settings.lora.max_rank:
        options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1, "max_cpu_loras": 1}
    return options


def engine_variables(settings: VllmSettings, model: ServedModel) -> dict[str, str]:
    """Environment variables of vLLM's engine, in this process or in a server."""
    cpu = model.device == "cpu"
    # In float32 Triton's kernels, attention among them, would compute products in TF32, which has 10 bits.
    products = {"TRITON_F32_DEFAULT": "ieee"} if model.dtype == "float32" and not cpu else {}
    return {
        **products,
        # The V2 runner needs Triton, which CPUs lack.
        "VLLM_USE_V2_MODEL_RUNNER": "0" if cpu else "1",
        "VLLM_BATCH_INVARIANT": "1" if settings.exact and not cpu else "0",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
