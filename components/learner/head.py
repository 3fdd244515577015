"""Chunk size and precision of the log-prob head, by setting or by measurement at the start of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from creditgraph.components.learner.logprobs import Head, token_logprobs
from creditgraph.components.learner.measure import measure, report
from creditgraph.components.learner.settings import Compute

log = logging.getLogger(__name__)

# Elements of a chunk of logits that are tried, and the share of a GPU's memory that its temporaries may take (about
# three float32 tensors of that size).
ELEMENTS = (1 << 26, 1 << 27, 1 << 28, 1 << 29)
MEMORY_SHARE = 0.05
TOKENS = 4096
# float32 is taken unless it costs more than this.
WORTH = 1.1


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """Arguments of `token_logprobs`."""

    chunk: int = 0
    wide: bool = False


def plan_head(
    settings: Compute,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    over_ranks: Callable[[Tensor], Tensor],
) -> HeadPlan:
    """The chunk size and precision of a run; on a GPU collective, and a second or two of measurement.

    Args:
        settings: what is set, and what is chosen.
        shape: rows (vocabulary of this rank) and width of the head's weight.
        dtype, device: of the weight.
        over_ranks: sums a tensor over ranks, so that all choose the same.
    """
    fixed = HeadPlan(chunk=settings.head_chunk, wide=settings.head_precision == "float32")
    if device.type != "cuda" or (settings.head_chunk and settings.head_precision != "auto"):
        return fixed
    memory = torch.cuda.get_device_properties(device).total_memory
    plans = {_name(plan): plan for plan in plans_of(settings, shape, memory)}
    candidates = {name: partial(_pass, plan, shape, dtype, device) for name, plan in plans.items()}
    times, failed = measure(candidates, device, over_ranks)
    torch.cuda.empty_cache()
    if not times:
        log.warning("learner.compute: nothing could be measured (%s); %s", failed, fixed)
        return fixed
    chosen = fastest(times, plans)
    report(chosen, times, failed)
    return plans[chosen]


def _name(plan: HeadPlan) -> str:
    precision = "float32" if plan.wide else "model"
    return f"learner.compute.head_chunk={plan.chunk} learner.compute.head_precision={precision}"


def plans_of(settings: Compute, shape: tuple[int, int], memory: int) -> list[HeadPlan]:
    """The plans that are measured: chunks whose temporaries fit into the share of `memory` (bytes)."""
    fitting = [n for n in ELEMENTS if 12 * n <= MEMORY_SHARE * memory] or [ELEMENTS[0]]
    chunks = [settings.head_chunk] if settings.head_chunk else [max(n // shape[0], 1) for n in fitting]
    wide = {"auto": (False, True), "model": (False,), "float32": (True,)}[settings.head_precision]
    return [HeadPlan(chunk=chunk, wide=kept) for chunk in chunks for kept in wide]


def fastest(times: Mapping[str, float], plans: Mapping[str, HeadPlan]) -> str:
    """Name of the fastest plan; of one in float32 if that costs little."""
    narrow, wide = ([name for name in times if plans[name].wide == kept] for kept in (False, True))
    best = [min(names, key=times.__getitem__) for names in (narrow, wide) if names]
    return best[-1] if times[best[-1]] <= WORTH * times[best[0]] else best[0]


def _pass(plan: HeadPlan, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, width = shape
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, width, generator=generator, device=device, dtype=dtype).requires_grad_()
    hidden = torch.randn(TOKENS, width, generator=generator, device=device, dtype=dtype).requires_grad_()
    targets = torch.arange(TOKENS, device=device) % rows
    logprobs, entropies = token_logprobs(hidden, targets, Head(weight=weight), chunk=plan.chunk, wide=plan.wide)
    torch.autograd.grad((logprobs + entropies).sum(), (hidden, weight))
