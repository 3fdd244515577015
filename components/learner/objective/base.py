"""The base class of objectives, and their inputs. Nothing here depends on a model or a process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.learner.objective.meters import AllSum, Meters
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Payload

# |log ratio| beyond this is clamped before exp: e^20 = 4.9e8 still squares within float32. Clamped tokens are counted.
MAX_LOG_RATIO = 20.0


# Columns of a credit, numbered from 0: tokens that could stand in the place of the sampled one. A learner adds their
# log-probs under CANDIDATE_LOGPROB, for objectives that read them.
CANDIDATE = "candidate_"
CANDIDATE_LOGPROB = "logprob_of_candidate_"


def numbered(columns: Mapping[str, Jagged], prefix: str) -> Tensor | None:
    """The columns `prefix`0, `prefix`1, … side by side, [total, k]; None without any."""
    names = [prefix + str(i) for i in range(len(columns))]
    found = [columns[name].values for name in names if name in columns]
    return torch.stack(found, 1) if found else None


@dataclass(frozen=True, eq=False, kw_only=True)
class LossInputs(Payload):
    """Whole trajectories, one row each; every Jagged runs over the response tokens.

    Attributes:
        logprobs: float32, log π_θ of the sampled tokens, at the sampling temperature; carries the gradient.
        old_logprobs: float32, log π_old, the denominators of all ratios.
        engine_logprobs: float32, what the sampling engine reported.
        advantage: float32.
        mask: bool, True where the token is trained on.
        group: int64 [rows].
        old_entropies: float32, entropy of the sampling distribution.
        entropies: float32, entropy of the current distribution, with gradient; None in `prepare`.
        reference_logprobs: float32, log-probs under the frozen reference model, or None without a KL term.
        comparable: bool, True where exactly the learner's weights sampled the token; None outside a learner.
        columns: per-token columns that the credit carried, or that `prepare` added.
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
    comparable: Jagged | None = None
    columns: dict[str, Jagged] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.group)

    def select(self, index: Tensor) -> LossInputs:
        """Rows by an int64 index, in its order."""
        return self.map(lambda j: j.select(index), self.group[index])

    def to(self, device: str) -> LossInputs:
        """The same on another device."""
        return self.map(lambda j: j.to(device), self.group.to(device))

    def replace(self, **changes: Jagged | Tensor | dict[str, Jagged]) -> LossInputs:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def with_columns(self, **columns: Jagged) -> LossInputs:
        """A copy with further columns."""
        return self.replace(columns=self.columns | columns)

    def map(self, change: Callable[[Jagged], Jagged], group: Tensor) -> LossInputs:
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
        return LossInputs(**changed)

    @staticmethod
    def concat(parts: Sequence[LossInputs]) -> LossInputs:
        """Stacks rows in order; fields that share one tensor in all parts share the result."""
        first = parts[0]
        if len(parts) == 1:
            return first
        done: dict[tuple[int, ...], Jagged] = {}

        def stacked(values: Sequence[Jagged]) -> Jagged:
            # Parts without tokens share nothing.
            key = tuple(id(v.values) for v in values if len(v.values))
            if not key or key not in done:
                done[key] = Jagged.concat(values)
            return done[key]

        changed: dict[str, Any] = {
            f.name: stacked([getattr(p, f.name) for p in parts])
            for f in dataclasses.fields(first)
            if isinstance(getattr(first, f.name), Jagged)
        }
        changed["columns"] = {k: stacked([p.columns[k] for p in parts]) for k in first.columns}
        return first.replace(group=torch.cat([p.group for p in parts]), **changed)


class Objective:
    """Base of objectives: a loss per response token from log-probs and credit.

    A subclass defines `terms`, a `Config` when it has settings, and `prepare` when it needs statistics of the whole
    rollout batch. The learner does everything else: masks, denominators, KL penalty, entropy bonus, mini-batches.

    Class attributes:
        metrics: definitions of the metrics that `terms` adds to its meters.
        has_trace: whether a token's loss depends on earlier tokens through a trace, on which `entropy_mask` can act.
        needs_credit: whether a token of zero advantage has no gradient, so that rows without credit can be skipped.
    """

    metrics: ClassVar[tuple[Metric, ...]] = ()
    has_trace: ClassVar[bool] = False
    needs_credit: ClassVar[bool] = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """No settings."""

    config: Any

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    def prepare(self, inputs: LossInputs, all_sum: AllSum) -> LossInputs:
        """Adds columns, or changes the mask, from the whole rollout batch with logprobs = old_logprobs.

        Called once per rollout batch, before any optimiser step and without gradient, on the CPU.

        Args:
            inputs: the rows that this replica made; a group is never split between replicas.
            all_sum: sums a tensor over replicas, for statistics of the whole batch; all replicas must call it alike.
        """
        return inputs

    def terms(self, inputs: LossInputs, meters: Meters) -> Tensor:
        """Loss of each response token, to be minimised: float32 [total]. Masked tokens are ignored, even NaN.

        Args:
            inputs: inputs of some rows, each a whole trajectory.
            meters: collects the metrics.
        """
        raise NotImplementedError
