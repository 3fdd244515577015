"""One rollout batch on its way through a learner: mini-batches, denominators, micro-batches, metrics.

Every learner rank holds the global batch, so mini-batches, denominators and the shares of replicas are the same
everywhere without communication. What a learner adds is how log-probs are computed and how a step is made.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from components.learner.metrics import Mismatch, MismatchGuard, mismatch_meters, mismatch_values
from components.learner.objective import Inputs, Meters, Objective, aggregate, counts, loss_terms, prepare
from components.learner.packing.balance import assign, contiguous, imbalance
from components.learner.packing.pack import PackedBatch, check_rows, pack, plan
from components.learner.packing.prefix import Sorted, plan_shared, unique_tokens, without_last
from pipeline.core.component import Context, identity_sum, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Credit, TokenLogprobs, TrainReport, Trajectories, Weights


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a learner publishes."""

    report: TrainReport
    weights: Weights
    logprobs: Annotated[TokenLogprobs, same_rows("trajectories")]


class Settings(Protocol):
    """What the settings of every learner contain; see `learner.hf` for what they mean."""

    @property
    def objective(self) -> Objective:
        """Loss per token."""

    @property
    def micro_batch_tokens(self) -> int:
        """Budget."""

    @property
    def minibatches(self) -> int:
        """Steps per epoch."""

    @property
    def epochs(self) -> int:
        """Passes over the batch."""

    @property
    def old_logprobs(self) -> Literal["engine", "recompute"]:
        """Whose denominators."""

    @property
    def skip_zero_rows(self) -> bool:
        """Leave rows without credit out."""

    @property
    def share_prefixes(self) -> bool:
        """Compute prefixes once."""

    @property
    def mismatch(self) -> Mismatch:
        """Limits."""


def check_settings(settings: Settings) -> None:
    """Raises ValueError for settings that no learner can follow."""
    if settings.minibatches < 1 or settings.epochs < 1 or settings.micro_batch_tokens < 0:
        raise ValueError(
            f"minibatches {settings.minibatches}, epochs {settings.epochs}, micro_batch_tokens "
            f"{settings.micro_batch_tokens}; "
            "wanted at least 1, 1 and 0 (0: one micro-batch)."
        )
    if settings.objective.importance_cap and settings.old_logprobs != "recompute":
        raise ValueError(
            "objective.importance_cap compares the learner's old log-probs with the engine's, but old_logprobs is "
            "'engine'; "
            "set old_logprobs: recompute, or importance_cap: 0."
        )


class RolloutPass(ABC):
    """The state of one `run`, and the loop over epochs and mini-batches.

    Args:
        settings: of the learner.
        context: of its node.
        trajectories, credit: the batch of all replicas.
        version: of the present weights.
        totals: counters of the learner, updated here.
        max_context: tokens the model takes.
        padded: micro-batches are padded grids, for models that do not take packed sequences.
    """

    def __init__(
        self,
        settings: Settings,
        context: Context,
        trajectories: Trajectories,
        credit: Credit,
        *,
        version: int,
        totals: dict[str, int],
        max_context: int,
        padded: bool = False,
    ) -> None:
        self.settings, self.context, self.version, self.totals, self.padded = settings, context, version, totals, padded
        self.seconds: dict[str, float] = {}
        self.meters = Meters()
        self.untouched = True  # no step made yet: the weights are those of `version`
        device = context.device
        check_rows(trajectories.prompt_tokens, trajectories.response_tokens, max_context)
        self.prompt, self.response = trajectories.prompt_tokens.to(device), trajectories.response_tokens.to(device)
        self.lengths = torch.where(self.response.lengths > 0, self.prompt.lengths + self.response.lengths - 1, 0)
        self.tree = Sorted.of(self.prompt.join(self.response)) if settings.share_prefixes and not padded else None
        self.work = Counter[str](slots=0, tokens=0, shared=0, unique=0)
        self.uid, self.prompt_uid = trajectories.uid, trajectories.prompt_uid
        self.temperature = (
            trajectories.temperature
        )  # ratios are 1 at equal weights only at the temperature of the sampler
        engine = trajectories.engine_logprobs.to(device)
        self.inputs = Inputs(
            logprobs=engine,
            old_logprobs=engine,
            engine_logprobs=engine,
            advantage=credit.advantage.to(device),
            mask=credit.mask.to(device),
            group=trajectories.group.to(device),
            old_entropies=trajectories.entropies.to(device),
            columns={k: v.to(device) for k, v in credit.columns.items()},
        )
        # Log-probs as first computed, and for which tokens.
        self.first = torch.zeros(2, len(engine.values), device=device)
        self.keeps_first = settings.old_logprobs == "engine"
        # New tokens that were sampled by exactly these weights: where engine and learner should agree.
        same = (trajectories.versions_by_token().values == version).to(device)
        fresh = self.response.positions >= self.response.spread(trajectories.inherited.to(device)).values
        self.comparable = self.response.with_values(fresh & same)
        self.lag = float((version - trajectories.policy_version).double().mean()) if len(trajectories) else 0.0

    @abstractmethod
    def score(self, pieces: list[Tensor], reference: bool) -> list[Jagged]:
        """Log-probs of the micro-batches `pieces` (row indices each), under the present or the reference weights; without gradient."""

    @abstractmethod
    def accumulate(self, pieces: list[Tensor], denominators: Tensor, meters: Meters) -> Tensor:
        """Forward and backward passes of micro-batches; their share of the loss, float64 [], see `loss`."""

    @abstractmethod
    def update(self) -> tuple[float, float, bool]:
        """One optimiser step on what was accumulated: gradient norm, learning rate, whether it was made. The same on all ranks."""

    @abstractmethod
    def skip_update(self) -> float:
        """A step of the schedule alone, accumulated gradients dropped; returns its learning rate."""

    def shared(self, value: Tensor) -> Tensor:
        """Summed over replicas, on every rank; a learner whose ranks differ in what they know takes the value of one that knows."""
        return self.context.all_sum(value)

    def metrics(self, meters: Meters) -> dict[str, float]:
        """Numbers of all replicas, on every rank."""
        return meters.values(self.context.all_sum, self.context.ranks)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent to a phase."""
        start = time.perf_counter()
        yield
        if self.context.device.startswith("cuda"):
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def run(self, guard: MismatchGuard, publish: Callable[[], Weights]) -> Outputs:
        """Trains, then publishes the new weights."""
        metrics = self.train()
        guard.check(self.context.node, metrics)
        with self.clock("publish"):
            weights = publish()
        self.context.log(**metrics, **{f"seconds_{k}": v for k, v in self.seconds.items()})
        logprobs = TokenLogprobs(uid=self.uid, logprobs=self._first_logprobs())
        return Outputs(report=TrainReport(metrics=metrics, seconds=self.seconds), weights=weights, logprobs=logprobs)

    def train(self) -> dict[str, float]:
        """All optimiser steps; returns the metrics."""
        c = self.settings
        self._score_old()
        credited = (self.inputs.advantage.values != 0) & self.inputs.mask.values
        has_credit = self.inputs.advantage.with_values(credited).sum() > 0
        pulled = c.objective.kl.coefficient > 0 or c.objective.entropy_bonus != 0 or not c.skip_zero_rows
        useful = torch.ones_like(has_credit) if pulled else has_credit
        before = dict(self.totals)
        for epoch in range(c.epochs):
            self.keeps_first &= epoch == 0
            for rows in self.minibatch_rows(epoch):
                denominators = counts(self.inputs.mask.select(rows), c.objective)
                if not bool(has_credit[rows].any()):
                    self.totals["skipped_zero_credit"] += 1
                    self._meter("lr", self.skip_update())
                    continue
                self._step(rows[useful[rows]], denominators)
                self.totals["tokens"] += int(self.inputs.mask.select(rows).values.sum())
        metrics = mismatch_values(self.metrics(self.meters))
        self._sum_work()
        metrics |= {k: float(self.totals[k] - before[k]) for k in ("steps", "skipped_zero_credit", "skipped_nonfinite")}
        metrics |= {
            "trained_tokens": float(self.totals["tokens"] - before["tokens"]),
            "forward_tokens": float(self.work["tokens"]),
        }
        if self.tree is not None:
            metrics |= {f"{k}_tokens": float(self.work[k]) for k in ("unique", "shared")}
        return metrics | {
            "trained_tokens_total": float(self.totals["tokens"]),
            "zero_credit_rows": float((~has_credit).double().mean()) if len(has_credit) else 0.0,
            "pack_waste": 1.0 - self.work["tokens"] / self.work["slots"] if self.work["slots"] else 0.0,
            "policy_lag": self.lag,
            "version": float(self.version + 1),
        }

    def _first_logprobs(self) -> Jagged:
        """Of all replicas, on every rank: recomputed old log-probs, else those of the first epoch's forward passes."""
        if self.settings.old_logprobs == "recompute":
            return self.inputs.old_logprobs.to("cpu")
        values, known = self.shared(self.first).to("cpu")  # exact: one replica knows a token, the others add 0
        return self.response.to("cpu").with_values(torch.where(known > 0, values, torch.nan))

    def _score_old(self) -> None:
        # Log-probs that must be known before any step: recomputed old ones, the reference's, and batch-wide columns.
        c = self.settings
        if c.old_logprobs == "recompute":
            with self.clock("old_logprobs"):
                old = self._score_all(reference=False)
            self.inputs = self.inputs.replace(old_logprobs=old, logprobs=old)
            mismatch_meters(self.meters, old.values, self.inputs.engine_logprobs.values, self.comparable.values)
        if c.objective.kl.coefficient:
            with self.clock("reference"):
                reference = self._score_all(reference=True)
            self.inputs = self.inputs.replace(reference_logprobs=reference)
        # The whole batch is here, so statistics of it need no reduction.
        self.inputs = prepare(self.inputs, c.objective, identity_sum)

    @torch.no_grad()
    def _score_all(self, reference: bool) -> Jagged:
        out = torch.zeros_like(self.inputs.engine_logprobs.values)
        pieces = self.plan(self._mine(torch.arange(len(self.lengths), device=self.lengths.device)))
        for index, found in zip(pieces, self.score(pieces, reference), strict=False):
            starts = self.response.offsets[:-1][index]
            out[starts[found.row_ids] + found.positions] = found.values
        # Exact: every token is scored by one replica and 0 on the others.
        return self.response.with_values(self.shared(out))

    def _mine(self, rows: Tensor, meters: Meters | None = None) -> Tensor:
        """Those of some rows that this replica computes."""
        count = self.context.ranks.num_replicas
        if count == 1:
            return rows
        costs, group = self._costs(rows), self.prompt_uid.to(rows.device)[rows]
        replica = assign(costs, group, count)
        if meters is not None:
            for name, found in (("before", contiguous(group, count)), ("after", replica)):
                meters.add(f"imbalance_{name}", torch.tensor(imbalance(costs, found, count)), torch.ones(()))
        return rows[replica == self.context.ranks.replica]

    def _costs(self, rows: Tensor) -> Tensor:
        """int64, tokens that each row adds to a forward pass."""
        if self.tree is None:
            return self.lengths[rows]
        tree = self._subtree(rows)
        costs, sizes = torch.zeros_like(self.lengths), self.lengths[tree.order]
        costs[tree.order] = sizes - without_last(tree.overlap, sizes + 1)
        return costs[rows]

    def _sum_work(self) -> None:
        names = sorted(self.work)
        total = self.context.all_sum(torch.tensor([self.work[n] for n in names], dtype=torch.float64))
        self.work = Counter({n: int(x) for n, x in zip(names, total.tolist(), strict=True)})

    def pack(self, index: Tensor) -> PackedBatch:
        """The model input of some rows."""
        return pack(self.prompt, self.response, index, self.padded, share=self.tree is not None)

    def plan(self, rows: Tensor) -> list[Tensor]:
        """Micro-batches of some rows, those without a response left out."""
        budget = self.settings.micro_batch_tokens
        if self.tree is None:
            return [rows[p] for p in plan(self.lengths[rows], budget, self.padded)]
        return plan_shared(self._subtree(rows), self.lengths, budget)

    def _subtree(self, rows: Tensor) -> Sorted:
        assert self.tree is not None
        keep = torch.zeros_like(self.lengths, dtype=torch.bool)
        keep[rows] = True
        return self.tree.restrict(keep & (self.lengths > 0))

    def minibatch_rows(self, epoch: int) -> list[Tensor]:
        """Row indices per optimiser step: prompts shuffled by a keyed stream and split evenly; one mini-batch keeps the order."""
        count = self.settings.minibatches
        if count == 1:
            return [torch.arange(len(self.prompt_uid), device=self.lengths.device)]
        uids, which = torch.unique(self.prompt_uid, return_inverse=True)
        order = torch.from_numpy(self.context.rng().generator(draw=f"epoch {epoch}").permutation(len(uids)))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(uids))
        part = place[which] * count // max(1, len(uids))
        return [(part == i).nonzero(as_tuple=True)[0].to(self.lengths.device) for i in range(count)]

    def _step(self, rows: Tensor, denominators: Tensor) -> None:
        """One optimiser step."""
        meters = Meters()
        rows = self._mine(rows, meters)
        with self.clock("forward_backward"):
            pieces = self.plan(rows)
            if self.tree is not None:
                self.work["unique"] += unique_tokens(self._subtree(rows), self.lengths)
            loss = self.accumulate(pieces, denominators, meters)
            if not pieces:
                # A replica without rows in this step still names the same metrics, which are then summed over replicas.
                empty = self.inputs.select(rows)
                self.loss(empty.logprobs, empty.old_entropies, rows, denominators, meters)
        with self.clock("optimizer"):
            self._finish(self.shared(loss), meters)

    def loss(self, logprobs: Jagged, entropies: Jagged, index: Tensor, denominators: Tensor, meters: Meters) -> Tensor:
        """The share of the loss of rows `index` from their log-probs and entropies; fills the meters."""
        part = self.inputs.select(index).replace(logprobs=logprobs, entropies=entropies)
        if self.keeps_first:
            place = self.response.offsets[:-1][index][logprobs.row_ids] + logprobs.positions
            self.first[0, place], self.first[1, place] = logprobs.values.detach().to(self.first), 1.0
        terms = loss_terms(part, self.settings.objective)
        meters.merge(terms.meters)
        if self.untouched and self.settings.old_logprobs == "engine":
            mask = self.comparable.select(index).values
            mismatch_meters(meters, logprobs.values.detach(), part.engine_logprobs.values, mask)
        return aggregate(terms.loss, part.mask, self.settings.objective, denominators)

    def count_work(self, batch: PackedBatch) -> None:
        """Adds the tokens of a micro-batch that was passed through the model."""
        self.work.update(slots=batch.slots, tokens=batch.tokens, shared=batch.saved)

    def _meter(self, name: str, value: float) -> None:
        self.meters.add(name, torch.tensor(value, dtype=torch.float64), torch.ones(()))

    def _finish(self, loss: Tensor, meters: Meters) -> None:
        if bool(torch.isfinite(loss)):
            norm, rate, made = self.update()
        else:
            norm, rate, made = 0.0, self.skip_update(), False
        self._meter("lr", rate)
        if not made:
            self.totals["skipped_nonfinite"] += 1
            return
        self.untouched = False
        self.totals["steps"] += 1
        self.meters.merge(meters)
        self._meter("loss", float(loss))
        self._meter("grad_norm", norm)
