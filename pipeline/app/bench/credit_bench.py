"""Judges the credit of many methods at one state of the policy; the logic behind tools/creditbench."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.engine.weights import merged
from components.learner.hf.model import LearnerModel
from components.models.load import load_causal_lm
from components.rollouts.segments import segment_of_token
from pipeline.app.bench.credit_run import Cost, CreditRun, first_of, learner_of, run_credit, shared_outputs
from pipeline.app.bench.gradients import GradientSums, leave_one_out, pooled, prompt_gradients
from pipeline.app.bench.judging import LEAST_EFFECT, effective_credit, per_thought
from pipeline.app.bench.methods import Method
from pipeline.app.bench.statistics import jackknife, mean_sd, reliability, spearman
from pipeline.app.bench.truth import State, Truth, true_values
from pipeline.core.errors import CreditgraphError
from pipeline.core.payloads import Policy, Prompts, Sampling, Trajectories, Verifier, Weights
from pipeline.core.sockets import Wire
from pipeline.core.streams import Stream
from pipeline.run.compose import Experiment
from pipeline.run.node_runner import NodeFailure
from pipeline.run.replay import Replay
from pipeline.run.run_settings import resolve_device

EXACT = "true_values"  # name of the row whose credit is the true advantage itself
GRADIENT_METRICS = ("cosine", "tokens", "noise", "signal")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
        samples: continuations per distinct thought boundary.
        max_rows: trajectories per method and seed for which true values are computed; a keyed choice when there are
            more.
        run: run directory whose newest checkpoint is the policy, or None for the recipe's own model.
        overrides: settings for every method, as on the command line.
        config_dirs: further folders with recipes.
    """

    samples: int = 48
    max_rows: int = 128
    run: Path | None = None
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[str, ...] = ()


@dataclass
class _Seed:
    """What one seed's reference rollouts give to all methods."""

    seed: int
    run: CreditRun
    truth: Truth
    gradients: dict[int, Tensor]


def load_policy(experiment: Experiment, run: Path | None) -> tuple[LearnerModel, Weights]:
    """The model with the policy's weights, for gradients, and those weights for engines."""
    model = load_causal_lm(experiment.model, resolve_device(experiment.run.device))
    if run is not None:
        replay = Replay(run)
        try:
            iteration = replay.newest_checkpoint()
            weights: Weights = replay.value(Wire(learner_of(replay.graph).name, "weights"), iteration)
        finally:
            replay.close()
        weights = merged(weights, experiment.model)
        if weights.tensors is not None:
            model.load_state_dict(weights.tensors, strict=False)  # a tied output head is not among them
    learner = LearnerModel(model)
    return learner, Weights(version=0, tensors=learner.published())


class CreditBench:
    """Measures methods one after the other; the first is the baseline, whose rollouts are shared.

    Args:
        methods: the baseline first.
        seeds: one batch of prompts and rollouts each.
        options: what is measured.
        say: is told about progress.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        seeds: Sequence[int],
        options: Options,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.methods, self.seeds, self.options = methods, seeds, options
        self.say = say or (lambda text: None)
        self.experiments = {m.name: m.experiment(*options.overrides, config_dirs=options.config_dirs) for m in methods}
        self.baseline = self.experiments[methods[0].name]
        self.model, self.weights = load_policy(self.baseline, options.run)

    def measure(self) -> dict[str, Any]:
        """Name → metrics per seed, their mean and spread; the exact row first. A method that fails is named under "failed"."""
        rows: dict[str, list[dict[str, float]]] = {EXACT: [], **{m.name: [] for m in self.methods}}
        sums: dict[str, list[GradientSums]] = {name: [] for name in rows}
        costs: dict[str, list[dict[str, Cost]]] = {m.name: [] for m in self.methods}
        own: dict[str, bool] = {}
        failed: dict[str, str] = {}
        ceilings, truths = [], []
        for seed in self.seeds:
            with run_credit(self.baseline, self.weights, seed, reference=True) as run:
                self.policy, self.verifier, self.known = (
                    first_of(run, Policy),
                    first_of(run, Verifier),
                    dict[State, Tensor](),
                )
                shared = self._share(seed, run)
                truth, thoughts = shared.truth, self._exact_row(shared)
                ceilings.append(reliability(spearman(*thoughts.halves)))
                truths.append(describe_truth(truth))
                rows[EXACT].append(thoughts.metrics())
                sums[EXACT].append(GradientSums.of(shared.gradients, shared.gradients, sampled_tokens(run)))
                self.say(
                    f"seed {seed}: {len(run.trajectories)} rollouts, {truth.num_states} states, {truth.sampled_tokens} "
                    "tokens for truth"
                )
                for method in self.methods:
                    if method.name in failed:
                        continue
                    try:
                        found = self._method(method, shared)
                    except (CreditgraphError, NodeFailure) as error:
                        failed[method.name] = str(error)
                        self.say(f"seed {seed}: {method.name} failed: {error}")
                        continue
                    rows[method.name].append(found.metrics)
                    sums[method.name].append(found.sums)
                    costs[method.name].append(found.costs)
                    own[method.name] = found.own
                    self.say(
                        f"seed {seed}: {method.name} "
                        + " ".join(f"{k} {v:.3g}" for k, v in list(found.metrics.items())[:4])
                    )
        methods = {name: summarise(rows[name], sums[name]) for name in rows if name not in failed}
        for name, found_own in own.items():
            if name in failed:
                continue
            methods[name]["own_rollouts"] = found_own
            methods[name]["costs"] = [{n: vars(c) for n, c in seed.items()} for seed in costs[name]]
        for name, entry in methods.items():
            entry["tokens_relative"] = relative_tokens(sums[name], sums[self.methods[0].name])
        return {"ceiling": ceilings, "truth": truths, "methods": methods, "failed": failed}

    def _share(self, seed: int, run: CreditRun) -> _Seed:
        truth = self._truth(seed, run.trajectories, run)
        share = 1.0 / max(len(run.trajectories), 1)
        spread = truth.advantage.values[_thought_of(truth, run.trajectories)]
        # The policy gradient of the mean outcome: every token has its thought's true advantage, rows are averaged,
        # tokens summed.
        weight = run.trajectories.response_tokens.with_values(spread * share)
        gradients = prompt_gradients(self.model, run.trajectories, weight, run.trajectories.temperature)
        return _Seed(seed, run, truth, gradients)

    def _exact_row(self, shared: _Seed) -> Any:
        rows = shared.run.trajectories
        credit = rows.response_tokens.with_values(shared.truth.advantage.values[_thought_of(shared.truth, rows)])
        mask = rows.response_tokens.with_values(torch.ones(len(credit.values), dtype=torch.bool))
        return per_thought(credit, mask, rows.inherited, shared.truth)

    def _truth(self, seed: int, trajectories: Trajectories, run: CreditRun) -> Truth:
        prompts: Prompts = first_of(run, Prompts)
        stream = Stream("creditbench", seed)
        sampling, samples = sampling_of(self.baseline), self.options.samples
        return true_values(self.policy, self.verifier, prompts, trajectories, sampling, samples, stream, self.known)

    def _method(self, method: Method, shared: _Seed) -> _Found:
        experiment = self.experiments[method.name]
        given = shared_outputs(experiment.graph, self.baseline.graph, shared.run)
        costs = {name: shared.run.costs[name] for name in given}
        with run_credit(experiment, self.weights, shared.seed, given, costs) as run:
            objective = run.learner.config.objective
            effective = effective_credit(run.trajectories, run.credit, objective)
            gradients = prompt_gradients(self.model, run.trajectories, effective.weight, run.trajectories.temperature)
            chosen = choose_rows(run.trajectories, self.options.max_rows, shared.seed)
            same = torch.equal(run.trajectories.uid, shared.run.trajectories.uid)
            truth = shared.truth if same else self._truth(shared.seed, run.trajectories.select(chosen), shared.run)
            rows = torch.arange(len(run.trajectories)) if same else chosen
            thoughts = per_thought(
                effective.credit.select(rows), run.credit.mask.select(rows), run.trajectories.inherited[rows], truth
            )
            return _Found(
                metrics=thoughts.metrics() | cost_metrics(run),
                sums=GradientSums.of(gradients, shared.gradients, sampled_tokens(run)),
                costs=run.costs,
                own=run.own_rollouts,
            )


@dataclass
class _Found:
    metrics: dict[str, float]
    sums: GradientSums
    costs: dict[str, Cost]
    own: bool


def _thought_of(truth: Truth, trajectories: Trajectories) -> Tensor:
    return segment_of_token(truth.ends, trajectories.response_tokens)


def sampling_of(experiment: Experiment) -> Sampling:
    """How the recipe's sampler samples: the settings of its first sampling node."""
    for node in experiment.graph.nodes:
        if node.use.startswith("sampler."):
            found: Sampling = node.config.sampling()
            return found
    raise ValueError("the baseline's graph has no sampler node; wanted one whose settings say how the policy samples.")


def sampled_tokens(run: CreditRun) -> float:
    """All tokens sampled for the batch: rollouts and what credit needed."""
    return run.cost(rollouts=True).sampled_tokens + run.cost(rollouts=False).sampled_tokens


def cost_metrics(run: CreditRun) -> dict[str, float]:
    """Tokens of the rollouts, and what credit cost beside them."""
    rollouts, credit = run.cost(rollouts=True), run.cost(rollouts=False)
    return {
        "rollout_tokens": rollouts.sampled_tokens,
        "credit_sampled": credit.sampled_tokens,
        "credit_scored": credit.scored_tokens,
        "credit_processed": credit.processed,
        "credit_seconds": credit.seconds,
    }


def choose_rows(trajectories: Trajectories, most: int, seed: int) -> Tensor:
    """int64: all rows, or a keyed choice of `most` of them, in order."""
    if len(trajectories) <= most:
        return torch.arange(len(trajectories))
    order = torch.argsort(Stream("creditbench rows", seed).uniform(trajectories.uid))
    return order[:most].sort().values


def describe_truth(truth: Truth) -> dict[str, float]:
    """What the true values look like; values before and after the first error cross-check them against the task's own step truth."""
    values, error = truth.values, truth.error[truth.values.row_ids]
    inner = values.positions < truth.ends.lengths[values.row_ids]
    dead = inner & (error > 0) & (values.positions >= error)
    alive = inner & ((error == 0) | (values.positions < error))
    clear = truth.advantage.values.abs() >= LEAST_EFFECT

    def mean(where: Tensor) -> float:
        return float(values.values[where].mean()) if bool(where.any()) else math.nan

    return {
        "states": float(truth.num_states),
        "sampled_tokens": float(truth.sampled_tokens),
        "accuracy": float(truth.correct.double().mean()),
        "value_sound": mean(alive),
        "value_after_error": mean(dead),
        "clear_share": float(clear.double().mean()),
    }


def relative_tokens(sums: Sequence[GradientSums], baseline: Sequence[GradientSums]) -> tuple[float, float]:
    """Tokens at which noise equals signal over those of the baseline, and the jackknife standard error over seeds."""

    def ratio(a: float, b: float) -> float:
        return a / b if b > 0 else math.nan

    parts = zip(leave_one_out(sums, "tokens"), leave_one_out(baseline, "tokens"), strict=True)
    return ratio(pooled(sums)["tokens"], pooled(baseline)["tokens"]), jackknife([ratio(a, b) for a, b in parts])


def summarise(rows: Sequence[dict[str, float]], sums: Sequence[GradientSums]) -> dict[str, Any]:
    """Per-seed metrics with mean and standard deviation; gradient metrics pooled over seeds with a jackknife standard error."""
    means = {name: mean_sd([row[name] for row in rows]) for name in rows[0]}
    joined = pooled(sums)
    gradient = {
        name: (joined[name], jackknife(leave_one_out(sums, name)) if len(sums) > 1 else math.nan)
        for name in GRADIENT_METRICS
    }
    return {"seeds": list(rows), "mean": means, "gradient": gradient}
