"""Metrics of a batch that is computed in parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from creditgraph.pipeline.core.ranks import Ranks

AllSum = Callable[[Tensor], Tensor]


class Meters:
    """Metrics as sums with their denominators, so that values do not depend on how the batch was cut; and maxima.

    >>> a, b = Meters(), Meters()
    >>> a.add("x", torch.tensor(1.0), torch.tensor(1.0)); b.add("x", torch.tensor(5.0), torch.tensor(3.0)); a.merge(b)
    >>> a.values()["x"]
    1.5
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counted: tuple[Tensor, Tensor] | None = None

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds a sum and its denominator."""
        total = total.detach().double()
        count = count.detach().double()
        old = self._sums.get(name)
        self._sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds values [n] where mask [n] holds."""
        self.add(name, torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64), self._count(mask))

    def share(self, name: str, flags: Tensor, mask: Tensor) -> None:
        """Adds how often flags [n] (bool) hold where mask [n] does."""
        self.add(name, (flags & mask).sum(), self._count(mask))

    def copy(self, name: str, other: Meters, *sources: str) -> None:
        """Adds, under a further name, the first of these sums that another part of the batch has."""
        for source in [s for s in sources if s in other._sums][:1]:
            self.add(name, *other._sums[source])

    def _count(self, mask: Tensor) -> Tensor:
        # One objective counts the same mask many times.
        if self._counted is None or self._counted[0] is not mask:
            self._counted = (mask, mask.sum())
        return self._counted[1]

    def maximum(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Keeps the largest of values [n] where mask [n] holds."""
        lowest = values.new_full((1,), -torch.inf)
        largest = torch.cat([lowest, torch.where(mask, values.detach(), -torch.inf)]).amax().double()
        self._keep_largest(name, largest)

    def _keep_largest(self, name: str, value: Tensor) -> None:
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def merge(self, other: Meters) -> None:
        """Adds another part of the same batch."""
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, value in other._maxima.items():
            self._keep_largest(name, value)

    def values(self, all_sum: AllSum | None = None, ranks: Ranks | None = None) -> dict[str, float]:
        """Name → number; 0/0 is 0. With `all_sum` and `ranks` of all replicas, which must have the same names."""
        out: dict[str, float] = {}
        names = sorted(self._sums)
        if names:
            pairs = torch.stack([torch.stack([x.cpu() for x in self._sums[n]]) for n in names])
            pairs = pairs if all_sum is None else all_sum(pairs)
            out = {n: total / count if count else 0.0 for n, (total, count) in zip(names, pairs.tolist(), strict=True)}
        names = sorted(self._maxima)
        if names:
            maxima = torch.stack([self._maxima[n].cpu() for n in names])
            if all_sum is not None and ranks is not None and ranks.num_replicas > 1:
                # The largest of all replicas through a sum: each fills its own row. −inf, of a replica without tokens,
                # would make NaN.
                rows = torch.zeros(ranks.num_replicas, len(names), dtype=torch.float64)
                rows[ranks.replica] = maxima.clamp(min=-1e300)
                maxima = all_sum(rows).amax(0)
            out |= {n: value for n, value in zip(names, maxima.tolist(), strict=True) if value > -1e300}
        return out
