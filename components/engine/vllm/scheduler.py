"""vLLM's scheduler with prefix-cache hits for scored prompts (0.32 and 0.33; its setting `scheduler_cls`).

vLLM reads no prefix cache for a request that wants log-probs of its prompt, because positions that come from the cache
have no hidden states. Of ours only the last positions are scored: those before may come from the cache.
"""

import inspect
from typing import Any

FIRST = "creditgraph_first"  # in a request's `extra_args`: the position whose next token is the first to score


def first_scored(sampling_params: Any) -> int | None:
    """The first position whose next token is scored; None for a request that does not say it."""
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get(FIRST)


def top_scored(sampling_params: Any) -> int:
    """How many of the most likely tokens are scored in each place: the columns of log-probs but that of the entropy."""
    return max(int(sampling_params.prompt_logprobs) - 1, 0)


def scoring_parameters(context_tokens: int, temperature: float, top: int) -> dict[str, Any]:
    """vLLM's `SamplingParams` that score the tokens of a prompt after its first `context_tokens`, at least 1.

    Beside each, the `top` most likely ones. One token is sampled, because vLLM samples at least one.
    """
    return {
        "max_tokens": 1,
        "temperature": temperature,
        "prompt_logprobs": 1 + top,
        "skip_reading_prefix_cache": False,
        "extra_args": {FIRST: context_tokens - 1},
    }


def exact_scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's scheduler, synchronous or not as it is configured, with capped cache hits."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    scheduler = (AsyncScheduler if asynchronous else Scheduler)(*args, **kwargs)
    cap_hits(scheduler.kv_cache_manager)
    return scheduler


def cap_hits(manager: Any) -> None:
    """Has vLLM's `KVCacheManager` take no scored position of a prompt from the cache."""
    computed_blocks = manager.get_computed_blocks
    find = manager.coordinator.find_longest_cache_hit

    def capped(request: Any, max_cache_hit_length: int | None = None) -> Any:
        first = first_scored(request.sampling_params)
        if first is not None:
            most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
            max_cache_hit_length = min(most, first)
        return computed_blocks(request, max_cache_hit_length)

    def get_computed_blocks(request: Any) -> Any:
        first = first_scored(request.sampling_params)
        if first is None:
            return computed_blocks(request)
        manager.coordinator.find_longest_cache_hit = lambda hashes, most: find(hashes, min(most, first))
        try:
            return computed_blocks(request)
        finally:
            manager.coordinator.find_longest_cache_hit = find

    own = "max_cache_hit_length" in inspect.signature(computed_blocks).parameters  # from 0.33 on
    manager.get_computed_blocks = capped if own else get_computed_blocks
