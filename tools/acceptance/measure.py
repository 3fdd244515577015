"""What stages share: the run they report to, clocks, peak memory, the device's own matmul rate."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.run.timeline.memory import peak_memory


@dataclass
class Run:
    """One stage on one device. Rows and checks are sent as they are measured, so that a stage cut off keeps them.

    Attributes:
        device: "cpu" or "cuda".
        small: sizes for a CPU, which prove that the code runs and nothing about speed.
        scratch: folder for models and files, kept between stages.
        lines: where rows, checks and notes go.
    """

    device: str
    small: bool
    scratch: Path
    lines: Connection | list[Any] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """What models are trained in on this device."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def _send(self, kind: str, value: Any) -> None:
        if isinstance(self.lines, list):
            self.lines.append((kind, value))
        else:
            self.lines.send((kind, value))

    def row(self, **figures: Any) -> None:
        """A line of the stage's table."""
        self._send("rows", figures)

    def check(self, name: str, value: float | bool, limit: float | None = None, at_least: bool = False) -> None:
        """A number with its limit, or a statement that holds or not. NaN holds never."""
        holds = bool(value) if limit is None else bool(value >= limit if at_least else value <= limit)
        sign = None if limit is None else f"{'≥' if at_least else '≤'} {limit:.3g}"
        self._send("checks", {"name": name, "value": value, "limit": sign, "holds": holds})

    def note(self, text: str) -> None:
        """A sentence of what was left out, or of how it was measured."""
        self._send("notes", text)

    def clock(self) -> float:
        """Seconds, with nothing pending on the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, work: Callable[[], Any], repeats: int = 3) -> float:
        """The least of some repetitions after one that is not timed."""
        work()
        times = []
        for _ in range(1 if self.small else repeats):
            start = self.clock()
            work()
            times.append(self.clock() - start)
        return min(times)

    @contextmanager
    def peak(self) -> Iterator[dict[str, float | None]]:
        """Most bytes on the device within the block, and above what was there before; None on a CPU."""
        found: dict[str, float | None] = {"gb": None, "added_gb": None}
        self.free()
        before = torch.cuda.memory_allocated() / 1e9 if self.device == "cuda" else 0.0
        # Learners measure their phases, which begins torch's count again: this one has all of it.
        with peak_memory(self.device) as most:
            yield found
        if self.device == "cuda":
            found.update(gb=most.allocated, added_gb=most.allocated - before)

    def free(self) -> None:
        """Gives back what no tensor holds."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def matmul_rate(self, tokens: int, inner: int, outer: int) -> float:
        """Operations per second of one large product of random numbers in the training dtype, over half a second."""
        g = generator(self.device)
        a = torch.randn(tokens, inner, device=self.device, dtype=self.dtype, generator=g)
        b = torch.randn(inner, outer, device=self.device, dtype=self.dtype, generator=g)
        once = self.seconds(lambda: a @ b)
        repeats = max(1, int((0.01 if self.small else 0.5) / once))

        def work() -> None:
            for _ in range(repeats):
                a @ b

        return 2.0 * tokens * inner * outer * repeats / self.seconds(work)


def generator(device: str, seed: int = 0) -> torch.Generator:
    """A generator of that device; torch refuses one of another device than the tensor's."""
    return torch.Generator(device=device).manual_seed(seed)


def difference(got: Tensor, expected: Tensor) -> float:
    """‖got − expected‖ / ‖expected‖ in float64."""
    wide = expected.detach().double()
    return float((got.detach().double() - wide).norm() / wide.norm().clamp(min=1e-30))


def operations(work: Callable[[], Any]) -> set[str]:
    """Names of the operations that torch dispatches in `work`; needs no access to the device's counters."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return {event.key for event in seen.key_averages()}
