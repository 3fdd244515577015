"""All optimiser steps on one rollout batch: denominators, loss, metrics. A `Backend` computes the passes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from components.learner.batch import RolloutBatch
from components.learner.metrics import mismatch_meters, mismatch_values
from components.learner.objective import LossInputs, Meters, aggregate, counts, loss_terms, prepare
from components.learner.offload import HostMemory
from components.learner.optimizer import Update
from components.learner.packing.pack import PackedBatch
from components.learner.settings import LearnerSettings
from components.models.shape import known_shape
from pipeline.core.component import Context
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Credit, Trajectories
from pipeline.run.timeline.memory import Peak, peak_memory

LossOf = Callable[[int, Jagged, Jagged], Tensor]
"""(number of the micro-batch, log-probs and entropies of its response tokens) → its share of the loss"""


class Backend(ABC):
    """The model of a learner, perhaps sharded over the ranks of a replica, and its optimiser.

    Attributes:
        max_context: longest sequence the model supports, in tokens; 0 means no limit.
        packs: whether it supports packed sequences, and so shared prefixes.
    """

    max_context: int
    packs: bool = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self._host = HostMemory()

    @abstractmethod
    def score(self, batches: Iterable[PackedBatch], temperature: float, reference: bool) -> list[Jagged]:
        """Log-probs of micro-batches under the present or the reference weights, without gradient."""

    @abstractmethod
    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Forward and backward passes; gradients add up until `update`. Returns this rank's loss, float64 []."""

    @abstractmethod
    def update(self) -> Update:
        """Does one optimiser step, the same on all ranks; a non-finite gradient changes no weight."""

    @abstractmethod
    def skip_update(self) -> Update:
        """Advances only the schedule; gradients are dropped."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names, one at a time, valid until the next update; all ranks iterate."""

    @property
    def exports_alone(self) -> bool:
        """Whether `export` needs no other rank, so that this one may call it whenever its weights do not change."""
        return self.context.ranks.world == 1

    @abstractmethod
    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that only learning needs (optimiser state, gradients), and those whose memory must stay."""

    def offload(self) -> None:
        """Moves the former to the CPU, so that engines have the memory."""
        self._host.offload(*self.offloadable())

    def onload(self) -> None:
        """Moves back what `offload` has moved, bit for bit; before any other method but `export` and `score`."""
        self._host.onload()

    def sum(self, value: Tensor) -> Tensor:
        """Returns a tensor summed over replicas, on every rank."""
        return self.context.all_sum(value)

    def values(self, meters: Meters) -> dict[str, float]:
        """Returns the metrics of all replicas, on every rank."""
        return meters.values(self.context.all_sum, self.context.ranks)

    def pass_metrics(self) -> dict[str, float]:
        """Returns further metrics of the passes since the last call."""
        return {}


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Result of training on a rollout batch.

    Attributes:
        metrics: metrics of all replicas, the same on every rank.
        logprobs: Jagged float32, log-prob of each token as first computed; NaN if it was not computed.
        tokens: number of trained tokens, counted once per epoch.
    """

    metrics: dict[str, float]
    logprobs: Jagged
    tokens: int


class RolloutTraining:
    """Training on one rollout batch.

    Args:
        settings: settings of the learner.
        context: context of its node.
        backend: model and optimiser.
        trajectories, credit: the batch of all replicas.
        version: version of the present weights.

    Attributes:
        batch: the rows, and their mini-batches and micro-batches.
        seconds: wall time by phase.
        memory: peaks of GPU memory by phase.
        operations: float64 [2], operations of the model's forward passes with and without gradient; of all replicas
            after `run`.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        context: Context,
        backend: Backend,
        trajectories: Trajectories,
        credit: Credit,
        version: int,
    ) -> None:
        self._settings = settings
        self._context = context
        self._backend = backend
        self._version = version
        self.batch = RolloutBatch(settings, context, trajectories, backend.max_context, backend.packs)
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, Peak] = {}
        self.operations = torch.zeros(2, dtype=torch.float64, device=context.device)
        self._shape = known_shape(context.model.path)
        self._meters = Meters()
        self._counts = Counter(tokens=0, steps=0, skipped_zero_credit=0, skipped_nonfinite=0)
        self._work = Counter(tokens=0, shared=0, unique=0)
        # At equal weights, ratios are 1 only at the temperature of the sampler.
        self._temperature = trajectories.temperature
        device = context.device
        engine = trajectories.engine_logprobs.to(device)
        self._inputs = LossInputs(
            logprobs=engine,
            old_logprobs=engine,
            engine_logprobs=engine,
            advantage=credit.advantage.to(device),
            mask=credit.mask.to(device),
            group=trajectories.group.to(device),
            old_entropies=trajectories.entropies.to(device),
            columns={k: v.to(device) for k, v in credit.columns.items()},
        )
        # Log-probs as first computed, and 1 for each token that has one.
        self._first = torch.zeros(2, len(engine.values), device=device)
        self._keeps_first = settings.old_logprobs == "engine"
        # New tokens that were sampled by exactly these weights, for which engine and learner should agree.
        response = self.batch.response
        same = (trajectories.versions_by_token().values == version).to(device)
        fresh = response.positions >= response.spread(trajectories.inherited.to(device)).values
        self._comparable = response.with_values(fresh & same)
        # Before the first step such tokens have ratio 1; what is clipped is the difference of engine and learner.
        trained = self._inputs.mask.values
        self._clips_mismatch = self._keeps_first and bool(self._comparable.values[trained].all())
        self._lag = float((version - trajectories.policy_version).double().mean()) if len(trajectories) else 0.0

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the elapsed seconds to a phase, and its peak of memory."""
        start = time.perf_counter()
        with peak_memory(self._context.device) as peak:
            yield
        if self._context.device.startswith("cuda"):
            torch.cuda.synchronize(self._context.device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        before = self.memory.setdefault(phase, peak)
        before.allocated = max(before.allocated, peak.allocated)
        before.reserved = max(before.reserved, peak.reserved)

    def run(self) -> Result:
        """Makes all optimiser steps."""
        self._prepare()
        objective = self._settings.objective
        mask = self._inputs.mask
        credited = (self._inputs.advantage.values != 0) & mask.values
        has_credit = mask.with_values(credited).sum() > 0
        pulled = objective.kl.coefficient > 0 or objective.entropy_bonus != 0 or not self._settings.skip_zero_rows
        useful = torch.ones_like(has_credit) if pulled else has_credit
        for epoch in range(self._settings.epochs):
            self._keeps_first &= epoch == 0
            for rows in self.batch.minibatches(epoch):
                denominators = counts(mask.select(rows), objective)
                if not bool(has_credit[rows].any()):
                    self._counts["skipped_zero_credit"] += 1
                    self._meter("lr", self._backend.skip_update().lr)
                    continue
                self._step(rows[useful[rows]], denominators)
                self._counts["tokens"] += int(mask.select(rows).values.sum())
        zero_credit = float((~has_credit).double().mean()) if len(has_credit) else 0.0
        return Result(
            metrics=self._metrics() | {"zero_credit_rows": zero_credit},
            logprobs=self._first_logprobs(),
            tokens=self._counts["tokens"],
        )

    def _prepare(self) -> None:
        # Log-probs that must be known before any step: recomputed old ones, the reference's, and batch-wide columns.
        if self._settings.old_logprobs == "recompute":
            with self.clock("old_logprobs"):
                old = self.score(reference=False)
            self._inputs = self._inputs.replace(old_logprobs=old, logprobs=old)
            engine = self._inputs.engine_logprobs.values
            mismatch_meters(self._meters, old.values, engine, self._comparable.values)
        if self._settings.keeps_reference:
            with self.clock("reference"):
                reference = self.score(reference=True)
            self._inputs = self._inputs.replace(reference_logprobs=reference)
        self._inputs = prepare(self._inputs, self._settings.objective, self._meters)

    @torch.no_grad()
    def score(self, reference: bool) -> Jagged:
        """Log-probs of all response tokens of all replicas, float32, under the present or the reference weights."""
        response = self.batch.response
        pieces = self.batch.plan(self.batch.share(self.batch.rows()))
        batches = (self._counted(self.batch.pack(rows), 1) for rows in pieces)
        out = torch.zeros_like(self._inputs.engine_logprobs.values)
        # Not strict: ranks of an earlier pipeline stage have no log-probs.
        for rows, logprobs in zip(pieces, self._backend.score(batches, self._temperature, reference), strict=False):
            out[response.offsets[:-1][rows][logprobs.row_ids] + logprobs.positions] = logprobs.values
        # The sum is exact: every token is scored by one replica and 0 on the others.
        return response.with_values(self._backend.sum(out))

    def _step(self, rows: Tensor, denominators: Tensor) -> None:
        """One optimiser step."""
        meters = Meters()
        first = not self._counts["steps"]
        rows = self.batch.share(rows, meters)
        pieces = self.batch.plan(rows)
        self._work["unique"] += self.batch.unique_tokens(rows)

        def loss_of(number: int, logprobs: Jagged, entropies: Jagged) -> Tensor:
            return self._loss(pieces[number], logprobs, entropies, denominators, meters)

        with self.clock("forward_backward"):
            loss = self._backend.forward_backward(self._packed(pieces), self._temperature, loss_of)
            if not pieces:
                # A replica without rows in this step must log the same metrics, because they are summed over replicas.
                empty = self._inputs.select(rows)
                self._loss(rows, empty.logprobs, empty.old_entropies, denominators, meters)
        with self.clock("optimizer"):
            loss = self._backend.sum(loss)
            update = self._backend.update() if bool(torch.isfinite(loss)) else self._backend.skip_update()
        self._meter("lr", update.lr)
        if not update.applied:
            self._counts["skipped_nonfinite"] += 1
            return
        self._counts["steps"] += 1
        self._meters.merge(meters)
        if first and self._clips_mismatch:
            self._meters.copy("mismatch_clipped", meters, "clipped_terms", "clip_fraction")
        self._meter("loss", float(loss))
        self._meter("grad_norm", update.grad_norm)

    def _packed(self, pieces: list[Tensor]) -> Iterator[PackedBatch]:
        for rows in pieces:
            batch = self.batch.pack(rows)
            self._work.update(tokens=batch.tokens, shared=batch.saved)
            yield self._counted(batch, 0)

    def _counted(self, batch: PackedBatch, which: int) -> PackedBatch:
        """Counts the operations of a forward pass of the micro-batch."""
        if self._shape is not None:
            layout = batch.layout
            # A token attends to the tokens of its path before it, and to itself.
            pairs = (layout.lengths * layout.starts + layout.lengths * (layout.lengths + 1) / 2).sum()
            self.operations[which] += self._shape.forward_flops(batch.tokens, pairs, len(batch.next_tokens))
        return batch

    def _loss(self, rows: Tensor, logprobs: Jagged, entropies: Jagged, denominators: Tensor, meters: Meters) -> Tensor:
        """The share of the loss of some rows from their log-probs and entropies; fills the meters."""
        part = self._inputs.select(rows).replace(logprobs=logprobs, entropies=entropies)
        if self._keeps_first:
            place = self.batch.response.offsets[:-1][rows][logprobs.row_ids] + logprobs.positions
            self._first[0, place] = logprobs.values.detach().to(self._first)
            self._first[1, place] = 1.0
        loss = loss_terms(part, self._settings.objective, meters)
        # Before the first step the weights are those of `version`.
        if not self._counts["steps"] and self._settings.old_logprobs == "engine":
            mask = self._comparable.select(rows).values
            mismatch_meters(meters, logprobs.values.detach(), part.engine_logprobs.values, mask)
        return aggregate(loss, part.mask, self._settings.objective, denominators)

    def _meter(self, name: str, value: float) -> None:
        self._meters.add(name, torch.tensor(value, dtype=torch.float64), torch.ones(()))

    def _metrics(self) -> dict[str, float]:
        metrics = mismatch_values(self._backend.values(self._meters))
        names = sorted(self._work)
        # Each replica did its own part of the work; all of them counted the same steps.
        work = self._context.all_sum(torch.tensor([self._work[n] for n in names], dtype=torch.float64)).tolist()
        total = dict(zip(names, work, strict=True))
        self.operations = self._context.all_sum(self.operations)
        metrics |= {n: float(self._counts[n]) for n in ("steps", "skipped_zero_credit", "skipped_nonfinite")}
        metrics |= {"trained_tokens": float(self._counts["tokens"]), "forward_tokens": total["tokens"]}
        if self.batch.shares_prefixes:
            metrics |= {f"{n}_tokens": total[n] for n in ("unique", "shared")}
        return metrics | {
            "policy_lag": self._lag,
            "version": float(self._version + 1),
        }

    def _first_logprobs(self) -> Jagged:
        """Log-probs of all replicas, on every rank: recomputed old ones, else those of the first epoch's passes."""
        if self._settings.old_logprobs == "recompute":
            return self._inputs.old_logprobs.to("cpu")
        values, computed = self._backend.sum(self._first).to("cpu")  # exact: one replica has a token, the others add 0
        return self.batch.response.to("cpu").with_values(torch.where(computed > 0, values, torch.nan))
