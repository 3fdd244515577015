"""SGLang plugin of the tests: seeds per request and the prefix cache together on a CPU, and forked processes.

Its entry point group, sglang.srt.plugins, is called in every SGLang process; a fork makes imports happen once.

Seeds need --enable-deterministic-inference, which SGLang allows for GPU attention only, couples with batch-invariant
Triton kernels, and runs without a prefix cache where it does not know the attention.
"""

import multiprocessing


def register():
    import sglang.srt.arg_groups.choices as choices
    import sglang.srt.batch_invariant_ops as batch_invariant
    import sglang.srt.mem_cache.pool_host.common as pool_host
    import torch

    for backends in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in backends:
            backends.append("torch_native")
    batch_invariant.enable_batch_invariant_mode = lambda *_, **__: None
    # SGLang keeps the experts of each token in memory that it has CUDA pin.
    pool_host.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)
    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start_method("fork", force=True)
