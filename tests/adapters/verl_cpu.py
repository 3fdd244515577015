"""verl's own worker on a CPU, by its interface for other hardware; in the environment .venv-verl."""

import contextlib
import os
from types import SimpleNamespace

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform


def nothing(*args, **kwargs):
    """Of memory, streams and random numbers of a device."""
    return 0


class Cpu(PlatformBase):
    """The CPU as a device of verl."""

    device_name, vendor_name = "cpu", "none"
    device_module = SimpleNamespace(
        **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
        **dict.fromkeys(
            (
                *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"),
                *("reset_peak_memory_stats", "ipc_collect"),
            ),
            nothing,
        ),
        mem_get_info=lambda *_: (1 << 30, 1 << 30),
        get_device_name=lambda *_: "CPU",
    )

    def current_device(self):
        return "cpu"

    def nvtx_range(self, message):
        return contextlib.nullcontext()

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "NO_DEVICES"


for _name in PlatformBase.__abstractmethods__:
    if _name not in vars(Cpu):
        setattr(Cpu, _name, nothing)
Cpu.__abstractmethods__ = frozenset()


def workers(folder, port):
    """verl's training worker with FSDP2 in this process, in the place of a group of them."""
    set_platform(Cpu())
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "VERL_ENGINE_DEVICE": "cuda"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.config.engine import FSDPEngineConfig
    from verl.workers.engine_workers import TrainingWorker

    model = {"override_config": {"attn_implementation": "eager"}, "enable_gradient_checkpointing": False}
    engine = {"infer_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False, "use_torch_compile": False}
    precise = {"model_dtype": "fp32", "mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype"), "fp32")}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=folder, use_remove_padding=False, **model),
            engine_config=FSDPEngineConfig(strategy="fsdp2", **engine, **precise),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return SimpleNamespace(world_size=1, compute_log_prob=worker.infer_batch)
