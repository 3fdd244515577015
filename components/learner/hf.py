"""`learner.hf`: trains any transformers causal LM on one device per replica, all parameters or LoRA. The reference learner."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from components.learner.metrics import mismatch_meters
from components.learner.model import LearnerModel, Lora
from components.learner.objective import Inputs, Meters, Objective, aggregate, counts, loss_terms, prepare
from components.learner.optimizer import Optimizer, OptimizerSettings
from components.learner.packing import PackedBatch, check_rows, join, pack, plan
from components.learner.prefix import Sorted, plan_shared, unique_tokens
from pipeline.component import Component, Context, identity_sum, same_rows
from pipeline.jagged import Jagged
from pipeline.payloads import Credit, TrainReport, Trajectories, Weights, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What the learner publishes."""

    report: TrainReport
    weights: Weights


class HFLearner(Component):
    """Policy-gradient steps on packed micro-batches with global denominators.

    One `run` makes epochs × minibatches optimiser steps. A mini-batch holds all trajectories of some prompts; its loss denominators
    are counted over the whole mini-batch and all replicas, so the gradient does not depend on `micro_batch_tokens`. Steps without
    any credit, and steps with a non-finite loss or gradient, change no weight and are counted.
    """

    placement = "collective"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of `learner.hf`."""

        objective: Objective = field(default_factory=Objective)
        """loss per token and aggregation"""
        optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
        """AdamW, clipping, schedule"""
        lora: Lora = field(default_factory=Lora)
        """low-rank adapters; rank 0 trains all parameters"""
        micro_batch_tokens: int = 16384
        """token budget of one forward and backward pass; lower it when memory runs out, the gradient stays the same"""
        minibatches: int = 1
        """optimiser steps per epoch; prompts are split evenly among them, all trajectories of a prompt together"""
        epochs: int = 1
        """passes over the rollout batch"""
        old_logprobs: Literal["engine", "recompute"] = "engine"
        """denominators of the ratios: what the engine reported, or this model's own before its first step"""
        gradient_checkpointing: bool = False
        """recompute activations in the backward pass: less memory, about a third more time"""
        skip_zero_rows: bool = True
        """leave rows without any credit out of the passes when neither KL nor entropy bonus acts on them; same gradient, but
        entropy, ratio and mismatch metrics then describe the other rows only"""
        share_prefixes: bool = True
        """compute a prompt, or an inherited prefix, once for all rows of a micro-batch that begin with it; same loss and gradient.
        Without effect for a model that does not take packed sequences"""

        def __post_init__(self) -> None:
            if self.minibatches < 1 or self.epochs < 1 or self.micro_batch_tokens < 0:
                raise ValueError(
                    f"minibatches {self.minibatches}, epochs {self.epochs}, micro_batch_tokens {self.micro_batch_tokens}; "
                    "wanted at least 1, 1 and 0 (0: one micro-batch)."
                )
            if self.objective.importance_cap and self.old_logprobs != "recompute":
                raise ValueError(
                    "objective.importance_cap compares the learner's old log-probs with the engine's, but old_logprobs is 'engine'; "
                    "set old_logprobs: recompute, or importance_cap: 0."
                )

    config: Config

    def setup(self, context: Context) -> None:
        """Loads the model and makes the optimiser."""
        super().setup(context)
        from components.models.load import check_context, load_causal_lm

        c = self.config
        model = load_causal_lm(context.model, context.device)
        self.max_context = check_context(context.model, model.config)
        self.model = LearnerModel(
            model,
            lora=c.lora,
            gradient_checkpointing=c.gradient_checkpointing,
            keep_reference=c.objective.kl.coefficient > 0,
            seed=context.seed,
        )
        self.optimizer = Optimizer(
            self.model.trainable(),
            c.optimizer,
            total_steps=context.iterations * c.epochs * c.minibatches,
            no_decay=self.model.embedding_names(),
        )
        self.version = 0
        self.totals = {"tokens": 0, "steps": 0, "skipped_zero_credit": 0, "skipped_nonfinite": 0}

    def initial(self) -> dict[str, Any]:
        """The present weights: version 0, or the resumed version after `load_state_dict`."""
        return {"weights": self._weights()}

    def run(self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]) -> Outputs:
        """Trains on one rollout batch."""
        check_aligned(trajectories, credit)
        step = _Pass(self, trajectories, credit)
        metrics = step.train()
        self.version += 1
        with step.clock("publish"):
            weights = self._weights()
        self.context.log(**metrics, **{f"seconds_{k}": v for k, v in step.seconds.items()})
        return Outputs(report=TrainReport(metrics=metrics, seconds=step.seconds), weights=weights)

    def _weights(self) -> Weights:
        return Weights(version=self.version, tensors=self.model.published())

    def state_dict(self) -> dict[str, Any]:
        """Trained parameters, optimiser, schedule position, version and counters."""
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "totals": dict(self.totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, bit for bit."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        self.totals = {k: int(v) for k, v in state["totals"].items()}


class _Pass:
    """One rollout batch on its way through the learner."""

    def __init__(self, learner: HFLearner, trajectories: Trajectories, credit: Credit) -> None:
        self.config, self.context, self.model, self.optimizer = learner.config, learner.context, learner.model, learner.optimizer
        self.totals, self.version = learner.totals, learner.version
        self.seconds: dict[str, float] = {}
        self.meters = Meters()
        self.untouched = True  # no step made yet: the weights are those of `version`
        device = self.context.device
        check_rows(trajectories.prompt_tokens, trajectories.response_tokens, learner.max_context)
        self.prompt, self.response = trajectories.prompt_tokens.to(device), trajectories.response_tokens.to(device)
        self.lengths = torch.where(self.response.lengths > 0, self.prompt.lengths + self.response.lengths - 1, 0)
        share = self.config.share_prefixes and not self.model.padded
        self.tree = Sorted.of(join(self.prompt, self.response)) if share else None
        self.work = Counter[str]()
        self.prompt_uid = trajectories.prompt_uid
        self.temperature = trajectories.temperature  # ratios are 1 at equal weights only at the temperature of the sampler
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
        # Rows whose new tokens were sampled by exactly these weights, and those tokens: where engine and learner should agree.
        same = (trajectories.policy_version == self.version).to(device)
        fresh = self.response.positions >= self.response.spread(trajectories.inherited.to(device)).values
        self.comparable = self.response.with_values(fresh & self.response.spread(same).values)
        self.lag = float((self.version - trajectories.policy_version).double().mean()) if len(trajectories) else 0.0

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Adds the seconds spent to a phase."""
        start = time.perf_counter()
        yield
        if self.context.device.startswith("cuda"):
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def train(self) -> dict[str, float]:
        """All optimiser steps; returns the metrics."""
        c = self.config
        self._score_old()
        credited = (self.inputs.advantage.values != 0) & self.inputs.mask.values
        has_credit = self.inputs.advantage.with_values(credited).sum() > 0
        pulled = c.objective.kl.coefficient > 0 or c.objective.entropy_bonus != 0 or not c.skip_zero_rows
        useful = torch.ones_like(has_credit) if pulled else has_credit
        before = dict(self.totals)
        for epoch in range(c.epochs):
            for rows in self._minibatches(epoch):
                denominators = self.context.all_sum(
                    torch.cat([counts(self.inputs.mask.select(rows), c.objective), has_credit[rows].sum().double()[None]])
                )
                if not float(denominators[2]):
                    self.totals["skipped_zero_credit"] += 1
                    self.meters.add("lr", torch.tensor(self.optimizer.skip(), dtype=torch.float64), torch.ones(()))
                    continue
                self._step(rows[useful[rows]], denominators[:2])
                self.totals["tokens"] += int(self.inputs.mask.select(rows).values.sum())
        metrics = self.meters.values(self.context.all_sum)
        metrics |= {k: float(self.totals[k] - before[k]) for k in ("steps", "skipped_zero_credit", "skipped_nonfinite")}
        metrics |= {"trained_tokens": float(self.totals["tokens"] - before["tokens"]), "forward_tokens": float(self.work["tokens"])}
        if self.tree is not None:
            metrics |= {f"{k}_tokens": float(self.work[k]) for k in ("unique", "shared")}
        return metrics | {
            "trained_tokens_total": float(self.totals["tokens"]),
            "zero_credit_rows": float((~has_credit).double().mean()) if len(has_credit) else 0.0,
            "pack_waste": 1.0 - self.work["tokens"] / self.work["slots"] if self.work["slots"] else 0.0,
            "policy_lag": self.lag,
            "version": float(self.version + 1),
        }

    def _score_old(self) -> None:
        # Log-probs that must be known before any step: recomputed old ones, the reference's, and batch-wide columns.
        c = self.config
        if c.old_logprobs == "recompute":
            with self.clock("old_logprobs"):
                old = self._score_all(lambda batch: self.model.logprobs(batch, self.temperature)[0])
            self.inputs = self.inputs.replace(old_logprobs=old, logprobs=old)
            mismatch_meters(self.meters, old.values, self.inputs.engine_logprobs.values, self.comparable.values)
        if c.objective.kl.coefficient:
            with self.clock("reference"):
                reference = self._score_all(lambda batch: self.model.reference_logprobs(batch, self.temperature))
            self.inputs = self.inputs.replace(reference_logprobs=reference)
        self.inputs = prepare(self.inputs, c.objective, self.context.all_sum)

    @torch.no_grad()
    def _score_all(self, score: Any) -> Jagged:
        out = torch.zeros_like(self.inputs.engine_logprobs.values)
        for index in self._plan(torch.arange(len(self.lengths), device=self.lengths.device)):
            found = score(self._pack(index))
            starts = self.response.offsets[:-1][index]
            out[starts[found.row_ids] + found.positions] = found.values
        return self.response.with_values(out)

    def _pack(self, index: Tensor) -> PackedBatch:
        return pack(self.prompt, self.response, index, self.model.padded, share=self.tree is not None)

    def _plan(self, rows: Tensor) -> list[Tensor]:
        """Micro-batches of some rows, those without a response left out."""
        budget = self.config.micro_batch_tokens
        if self.tree is None:
            return [rows[p] for p in plan(self.lengths[rows], budget, self.model.padded)]
        return plan_shared(self._subtree(rows), self.lengths, budget)

    def _subtree(self, rows: Tensor) -> Sorted:
        assert self.tree is not None
        keep = torch.zeros_like(self.lengths, dtype=torch.bool)
        keep[rows] = True
        return self.tree.restrict(keep & (self.lengths > 0))

    def _minibatches(self, epoch: int) -> list[Tensor]:
        """Row indices per optimiser step: prompts shuffled by a keyed stream and split evenly; one mini-batch keeps the order."""
        count = self.config.minibatches
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
        loss = torch.zeros((), dtype=torch.float64, device=self.lengths.device)
        with self.clock("forward_backward"):
            pieces = self._plan(rows)
            if self.tree is not None:
                self.work["unique"] += unique_tokens(self._subtree(rows), self.lengths)
            for index in pieces:
                batch = self._pack(index)
                logprobs, entropies = self.model.logprobs(batch, self.temperature)
                share = self._loss(self.inputs.select(index).replace(logprobs=logprobs, entropies=entropies), index, denominators, meters)
                share.backward()  # type: ignore[no-untyped-call]
                self.optimizer.collect()
                loss += share.detach()
                self.work.update(slots=batch.slots, tokens=batch.tokens, shared=batch.saved)
            if not pieces:
                # A replica without rows in this step still names the same metrics, which are then summed over replicas.
                empty = self.inputs.select(rows)
                self._loss(empty.replace(entropies=empty.old_entropies), rows, denominators, meters)
        with self.clock("optimizer"):
            self._finish(self.context.all_sum(loss), meters)

    def _loss(self, part: Inputs, index: Tensor, denominators: Tensor, meters: Meters) -> Tensor:
        terms = loss_terms(part, self.config.objective)
        meters.merge(terms.meters)
        if self.untouched and self.config.old_logprobs == "engine":
            mask = self.comparable.select(index).values
            mismatch_meters(meters, part.logprobs.values.detach(), part.engine_logprobs.values, mask)
        return aggregate(terms.loss, part.mask, self.config.objective, denominators)

    def _finish(self, loss: Tensor, meters: Meters) -> None:
        if bool(torch.isfinite(loss)):
            one = self.context.all_sum is identity_sum
            norm, rate, made = self.optimizer.step(None if one else self.context.all_sum)
        else:
            norm, rate, made = 0.0, self.optimizer.skip(), False
        self.meters.add("lr", torch.tensor(rate, dtype=torch.float64), torch.ones(()))
        if not made:
            self.totals["skipped_nonfinite"] += 1
            return
        self.untouched = False
        self.totals["steps"] += 1
        self.meters.merge(meters)
        self.meters.add("loss", loss.cpu(), torch.ones(()))
        self.meters.add("grad_norm", torch.tensor(norm, dtype=torch.float64), torch.ones(()))
