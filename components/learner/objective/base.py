"""What objectives see and give back. Shared by every learner; nothing here knows a model, a device layout or a process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeline.core.component import Ranks
from pipeline.core.jagged import Jagged

AllSum = Callable[[Tensor], Tensor]

# |log ratio| beyond this is clamped before exp: e^20 = 4.9e8 still squares within float32. Clamped tokens are counted.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """Whole trajectories, one row each; every Jagged runs over the response tokens.

    Attributes:
        logprobs: float32, log π_θ of the sampled tokens, at the sampling temperature; carries the gradient.
        old_logprobs: float32, log π_old, the denominators of all ratios.
        engine_logprobs: float32, what the sampling engine reported.
        advantage: float32.
        mask: bool, True where the token is trained on.
        group: int64 [rows].
        old_entropies: float32, entropy of the sampling distribution.
        entropies: float32, entropy of the current distribution, with gradient; None where it is not known (in
            `prepare`).
        reference_logprobs: float32, log-probs under the frozen reference model, or None without a KL term.
        columns: whatever per-token columns the credit carried or `prepare` added.
    """

    logprobs: Jagged
    old_logprobs: Jagged
    engine_logprobs: Jagged
    advantage: Jagged
    mask: Jagged
    group: Tensor
    old_entropies: Jagged
    entropies: Jagged | None = None
    reference_logprobs: Jagged | None = None
    columns: dict[str, Jagged] = field(default_factory=dict)

    def select(self, index: Tensor) -> Inputs:
        """Rows by an int64 index, in its order."""
        return self.map(lambda j: j.select(index), self.group[index])

    def to(self, device: str) -> Inputs:
        """The same on another device."""
        return self.map(lambda j: j.to(device), self.group.to(device))

    def replace(self, **changes: Jagged | Tensor | dict[str, Jagged]) -> Inputs:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def map(self, change: Callable[[Jagged], Jagged], group: Tensor) -> Inputs:
        """Applies `change` to every Jagged; fields that share one object share the result."""
        done: dict[int, Jagged] = {}

        def once(value: Jagged) -> Jagged:
            if id(value) not in done:
                done[id(value)] = change(value)
            return done[id(value)]

        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed: dict[str, Any] = {k: once(v) if isinstance(v, Jagged) else v for k, v in fields.items()}
        changed["columns"] = {k: once(v) for k, v in self.columns.items()}
        changed["group"] = group
        return Inputs(**changed)


class Meters:
    """Metrics as sums with their denominators, so that values do not depend on how the batch was cut; and maxima.

    >>> a, b = Meters(), Meters()
    >>> a.add("x", torch.tensor(1.0), torch.tensor(1.0)); b.add("x", torch.tensor(5.0), torch.tensor(3.0)); a.merge(b)
    >>> a.values()["x"]
    1.5
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._tops: dict[str, Tensor] = {}
        self._counted: tuple[Tensor, Tensor] | None = None

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds a sum and what to divide it by."""
        old = self._sums.get(name)
        total, count = total.detach().double(), count.detach().double()
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds values [n] where mask [n] holds."""
        self.add(name, torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64), self._count(mask))

    def share(self, name: str, flags: Tensor, mask: Tensor) -> None:
        """Adds how often flags [n] (bool) hold where mask [n] does."""
        self.add(name, (flags & mask).sum(), self._count(mask))

    def _count(self, mask: Tensor) -> Tensor:
        # One objective counts one mask many times.
        if self._counted is None or self._counted[0] is not mask:
            self._counted = (mask, mask.sum())
        return self._counted[1]

    def top(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Keeps the largest of values [n] where mask [n] holds."""
        lowest = values.new_full((1,), -torch.inf)
        top = torch.cat([lowest, torch.where(mask, values.detach(), -torch.inf)]).amax().double()
        self._tops[name] = torch.maximum(self._tops[name], top) if name in self._tops else top

    def merge(self, other: Meters) -> None:
        """Adds another part of the same batch."""
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, top in other._tops.items():
            self._tops[name] = torch.maximum(self._tops[name], top) if name in self._tops else top

    def values(self, all_sum: AllSum | None = None, ranks: Ranks | None = None) -> dict[str, float]:
        """Name → number, of all replicas when `all_sum` and `ranks` are given; all of them name the same metrics. 0/0 is 0."""
        names = sorted(self._sums)
        out: dict[str, float] = {}
        if names:
            pairs = torch.stack([torch.stack([x.cpu() for x in self._sums[n]]) for n in names])
            pairs = pairs if all_sum is None else all_sum(pairs)
            out = {n: total / count if count else 0.0 for n, (total, count) in zip(names, pairs.tolist(), strict=True)}
        tops = sorted(self._tops.items())
        highest = torch.stack([t.cpu() for _, t in tops]) if tops else torch.zeros(0, dtype=torch.float64)
        if tops and all_sum is not None and ranks is not None and ranks.num_replicas > 1:
            slots = torch.zeros(ranks.num_replicas, len(tops), dtype=torch.float64)
            slots[ranks.replica] = highest.clamp(min=-1e300)  # −inf of a replica without tokens, through a sum
            highest = all_sum(slots).amax(0)
        return out | {n: t for (n, _), t in zip(tops, highest.tolist(), strict=True) if t > -1e300}


@dataclass(frozen=True, eq=False, kw_only=True)
class Terms:
    """Per-token loss terms (to be minimised), before aggregation; and metrics."""

    loss: Jagged
    meters: Meters
