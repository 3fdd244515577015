"""Choices by measurement at the start of a run: the fastest of several ways to compute the same, on this device."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

log = logging.getLogger(__name__)

REPEATS = 3


def seconds(compute: Callable[[], object], device: torch.device) -> float:
    """Shortest time of a few calls after one that warms up."""
    best = math.inf
    for number in range(REPEATS + 1):
        _wait(device)
        start = time.perf_counter()
        compute()
        _wait(device)
        if number:
            best = min(best, time.perf_counter() - start)
    return best


def measure(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    over_ranks: Callable[[Tensor], Tensor],
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each candidate, summed over ranks, and why others failed here.

    Args:
        candidates: the same names on all ranks, in the same order; one that raises an exception is excluded on all.
        device: where they compute.
        over_ranks: sums a float64 tensor over ranks.
    """
    times = []
    failed = {}
    for name, compute in candidates.items():
        try:
            times.append(seconds(compute, device))
        except Exception as error:  # a library's own: not built, not installed, out of memory
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')}"
            times.append(math.inf)
    summed = over_ranks(torch.tensor(times, dtype=torch.float64)).tolist()
    return {name: t for name, t in zip(candidates, summed, strict=True) if math.isfinite(t)}, failed


def report(settings: str, times: Mapping[str, float], failed: Mapping[str, str]) -> None:
    """Logs a choice, as the settings that repeat it."""
    measured = ", ".join(f"{name} {1000 * t:.2f} ms" for name, t in times.items())
    without = "".join(f"; without {name} ({why})" for name, why in failed.items())
    log.info("fastest here: %s (%s)%s; set that to repeat this run exactly", settings, measured, without)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
