"""All optimiser steps on one rollout batch: denominators, loss, metrics. A `Backend` computes the passes."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from creditgraph.components.learner.backend import Backend
from creditgraph.components.learner.batch import Part, RolloutBatch, Route
from creditgraph.components.learner.metrics import mismatch_meters, mismatch_values
from creditgraph.components.learner.objective import (
    LossInputs,
    Meters,
    aggregate,
    counts,
    credited,
    loss_terms,
    prepare,
)
from creditgraph.components.learner.objective.base import CANDIDATE, CANDIDATE_LOGPROB, numbered
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.components.models.shape import known_shape
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories
from creditgraph.pipeline.run.timeline.memory import Peak, peak_memory


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Result of training on a rollout batch.

    Attributes:
        metrics: metrics of all replicas, the same on every rank.
        logprobs: Jagged float32, log-prob of each token of this replica's rows as first computed; NaN if it was not.
        tokens: number of trained tokens of all replicas, counted once per epoch.
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
        trajectories, credit: the rows that this replica made.
        version: version of the present weights.

    Attributes:
        batch: the rows, their mini-batches and the replicas that compute them.
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
        self._work = Counter(tokens=0, shared=0, unique=0, replayed=0)
        # At equal weights, ratios are 1 only at the temperature of the sampler.
        self._temperature = self.batch.temperature
        engine = trajectories.engine_logprobs.to("cpu")
        # New tokens that were sampled by exactly these weights, for which engine and learner should agree.
        same = trajectories.versions_by_token().values.cpu() == version
        fresh = engine.positions >= engine.spread(trajectories.inherited.cpu()).values
        # Of this replica's rows, on the CPU until a micro-batch needs them.
        self._inputs = LossInputs(
            logprobs=engine,
            old_logprobs=engine,
            engine_logprobs=engine,
            advantage=credit.advantage.to("cpu"),
            mask=credit.mask.to("cpu"),
            group=trajectories.group.cpu(),
            old_entropies=trajectories.entropies.to("cpu"),
            comparable=engine.with_values(fresh & same),
            columns=self.batch.columns(credit),
        )
        self._keeps_first = settings.old_logprobs == "engine"
        # Log-probs as first computed.
        self._first = engine.with_values(torch.full_like(engine.values, torch.nan))
        # What was fetched, and for which part of the batch.
        self._part: tuple[Route, Part, LossInputs] | None = None
        lag = (version - trajectories.policy_version).double().sum()
        other = (self._inputs.mask.values & ~(fresh & same)).sum().double()
        lag, other = context.all_sum(torch.stack([lag, other])).tolist()
        self._lag = lag / len(self.batch) if len(self.batch) else 0.0
        # Before the first step comparable tokens have ratio 1; what is clipped is the difference of engine and learner.
        self._clips_mismatch = self._keeps_first and not other

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
        own_credit = credited(self._inputs, objective)
        pulled = objective.kl.coefficient > 0 or objective.entropy_bonus != 0 or not self._settings.skip_zero_rows
        own_useful = torch.ones_like(own_credit) if pulled else own_credit
        trained, has_credit, useful = map(self.batch.of_all, (mask.sum(), own_credit, own_useful))
        costs = self.batch.costs(own_useful)
        for epoch in range(self._settings.epochs):
            self._keeps_first &= epoch == 0
            for rows in self.batch.minibatches(epoch):
                denominators = counts(trained[rows])
                if not bool(has_credit[rows].any()):
                    self._counts["skipped_zero_credit"] += 1
                    self._meter("lr", self._backend.skip_update().lr)
                    continue
                self._step(rows[useful[rows]], costs, denominators)
                self._counts["tokens"] += int(trained[rows].sum())
        zero_credit = float((~has_credit).double().mean()) if len(has_credit) else 0.0
        return Result(
            metrics=self._metrics() | {"zero_credit_rows": zero_credit},
            logprobs=self._first,
            tokens=self._counts["tokens"],
        )

    def _prepare(self) -> None:
        # Log-probs that must be known before any step: recomputed old ones, the reference's, and batch-wide columns.
        if self._settings.old_logprobs == "recompute":
            with self.clock("old_logprobs"):
                old = self.score(reference=False)
            self._inputs = self._inputs.replace(old_logprobs=old, logprobs=old)
            self._first = old
            engine = self._inputs.engine_logprobs.values
            assert self._inputs.comparable is not None
            mismatch_meters(self._meters, old.values, engine, self._inputs.comparable.values)
        if self._settings.keeps_reference:
            with self.clock("reference"):
                reference = self.score(reference=True)
            self._inputs = self._inputs.replace(reference_logprobs=reference)
        context = self._context
        self._inputs = prepare(self._inputs, self._settings.objective, self._meters, context.all_sum, context.rng())

    @torch.no_grad()
    def score(self, reference: bool) -> Jagged:
        """Log-probs of the response tokens of this replica's rows, float32, under the present or reference weights."""
        route, part = self.batch.fetch(self.batch.rows(), self.batch.costs())
        pieces = part.plan()
        batches = (self._counted(part.pack(rows), 1) for rows in pieces)
        if reference:  # another model, with a router of its own
            batches = (replace(batch, experts=None) for batch in batches)
        out = torch.zeros(len(part.response.values), device=self._context.device)
        # Not strict: ranks of an earlier pipeline stage have no log-probs.
        for rows, logprobs in zip(pieces, self._backend.score(batches, self._temperature, reference), strict=False):
            out[part.places(rows, logprobs)] = logprobs.values
        own = torch.zeros_like(self._inputs.engine_logprobs.values)
        self._give_back(route, part, out, own)
        return self._inputs.engine_logprobs.with_values(own)

    def _step(self, rows: Tensor, costs: Tensor, denominators: Tensor) -> None:
        """One optimiser step on some rows of all replicas, of which this one computes a part."""
        meters = Meters()
        first = not self._counts["steps"]
        # Every epoch has the same single mini-batch, or others.
        if self._part is None or self._settings.minibatches > 1:
            self._part = None
            with self._moving():
                route, part = self.batch.fetch(rows, costs, meters)
                self._part = (route, part, self.batch.fetch_inputs(route, self._inputs))
        route, part, inputs = self._part
        pieces = part.plan()
        self._work["unique"] += part.unique_tokens()
        first_logprobs = torch.full((len(part.response.values),), torch.nan, device=self._context.device)

        def loss_of(number: int, logprobs: Jagged, entropies: Jagged) -> Tensor:
            rows = pieces[number]
            own = inputs.select(rows)
            if len(logprobs.values) > len(entropies.values):
                own, logprobs = _apart(own.to(self._context.device), logprobs, entropies)
            if self._keeps_first:
                first_logprobs[part.places(rows, logprobs)] = logprobs.values.detach().float()
            return self._loss(own, logprobs, entropies, denominators, meters)

        with self.clock("forward_backward"):
            packed = self._packed(part, pieces, inputs)
            loss = self._backend.forward_backward(packed, self._temperature, loss_of)
            if not pieces:
                # A replica without rows in this step must log the same metrics, because they are summed over replicas.
                none = inputs.select(torch.zeros(0, dtype=torch.int64)).to(self._context.device)
                self._loss(none, none.logprobs, none.old_entropies, denominators, meters)
        if self._keeps_first:
            with self._moving():
                self._give_back(route, part, first_logprobs, self._first.values)
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

    def _packed(self, part: Part, pieces: list[Tensor], inputs: LossInputs) -> Iterator[PackedBatch]:
        candidates = {name: column for name, column in inputs.columns.items() if name.startswith(CANDIDATE)}
        for rows in pieces:
            ids = numbered({name: column.select(rows) for name, column in candidates.items()}, CANDIDATE)
            batch = part.pack(rows, None if ids is None else ids.long())
            self._work.update(tokens=batch.tokens, shared=batch.saved)
            if batch.experts is not None:
                self._work["replayed"] += int((batch.experts[:, 0] >= 0).sum())
            yield self._counted(batch, 0)

    def _counted(self, batch: PackedBatch, which: int) -> PackedBatch:
        """Counts the operations of a forward pass of the micro-batch."""
        if self._shape is not None:
            layout = batch.layout
            # A token attends to the tokens of its path before it, and to itself.
            pairs = (layout.lengths * layout.starts + layout.lengths * (layout.lengths + 1) / 2).sum()
            self.operations[which] += self._shape.forward_flops(batch.tokens, pairs, len(batch.next_tokens))
        return batch

    def _loss(
        self, rows: LossInputs, logprobs: Jagged, entropies: Jagged, denominators: Tensor, meters: Meters
    ) -> Tensor:
        """The share of the loss of some rows from their log-probs and entropies; fills the meters."""
        inputs = rows.to(self._context.device).replace(logprobs=logprobs, entropies=entropies)
        loss = loss_terms(inputs, self._settings.objective, meters)
        # Before the first step the weights are those of `version`.
        if not self._counts["steps"] and self._settings.old_logprobs == "engine":
            assert inputs.comparable is not None
            mismatch_meters(meters, logprobs.values.detach(), inputs.engine_logprobs.values, inputs.comparable.values)
        return aggregate(loss, inputs.mask, self._settings.objective, denominators)

    def _moving(self) -> AbstractContextManager[None]:
        return self.clock("exchange") if self._context.ranks.num_replicas > 1 else nullcontext()

    def _give_back(self, route: Route, part: Part, values: Tensor, into: Tensor) -> None:
        """Moves values of a part's response tokens, computed here, to the replicas that keep the rows."""
        self.batch.give_back(route, part.response.with_values(self._backend.whole(values).cpu()), into)

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
        if self.batch.own.experts is not None:
            metrics["replayed_tokens"] = total["replayed"]
        return metrics | {
            "policy_lag": self._lag,
            "version": float(self._version + 1),
        }


def _apart(inputs: LossInputs, logprobs: Jagged, entropies: Jagged) -> tuple[LossInputs, Jagged]:
    """Columns with the log-probs of candidates, and those of the response tokens, from both one after the other."""
    own, *others = logprobs.values.view(len(entropies.values), -1).unbind(1)
    columns = {f"{CANDIDATE_LOGPROB}{i}": entropies.with_values(values) for i, values in enumerate(others)}
    return inputs.with_columns(**columns), entropies.with_values(own)
