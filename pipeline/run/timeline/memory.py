"""Peaks of GPU memory over spans that may lie in each other, and overlap in several threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Peak:
    """Largest memory of a span in gigabytes: held by tensors, and taken from the GPU by torch; 0 without a GPU."""

    allocated: float = 0.0
    reserved: float = 0.0


_lock = threading.Lock()
_open: list[Peak] = []


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measures a span of this process on its device; the peak is complete when the span ends."""
    peak = Peak()
    if not device.startswith("cuda"):
        yield peak
        return
    with _lock:
        _note(device)
        _open.append(peak)
    try:
        yield peak
    finally:
        with _lock:
            _note(device)
            _open.remove(peak)


def _note(device: str) -> None:
    """Adds the peak since the last call to all open spans: torch counts one, which ends where any span does."""
    for peak in _open:
        peak.allocated = max(peak.allocated, torch.cuda.max_memory_allocated(device) / 1e9)
        peak.reserved = max(peak.reserved, torch.cuda.max_memory_reserved(device) / 1e9)
    torch.cuda.reset_peak_memory_stats(device)
