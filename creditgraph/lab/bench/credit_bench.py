"""The logic of `creditgraph creditbench`: the credit of many methods beside true values, at one state of the policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.weights import merged
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.models.load import load_causal_lm
from creditgraph.lab.bench.gradients import GradientSums, leave_one_out, pooled, prompt_gradients
from creditgraph.lab.bench.measured_run import Cost, MeasuredRun, shared_outputs
from creditgraph.lab.bench.methods import Method
from creditgraph.lab.bench.statistics import jackknife, mean_sd, reliability, spearman
from creditgraph.lab.bench.thoughts import LEAST_EFFECT, ThoughtCredit, thought_credit
from creditgraph.lab.bench.turn_truth import first_rows, turn_values, whole
from creditgraph.pipeline.app.credit.sessions import learner_of, sampling_of
from creditgraph.pipeline.app.credit.thought_credit import effective_credit
from creditgraph.pipeline.app.credit.truth import State, Truth, true_values
from creditgraph.pipeline.core.errors import CreditgraphError, RunError, ranges
from creditgraph.pipeline.core.handles import Environments, Policy, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Weights
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.core.streams import Stream
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.node_runner import NodeFailure
from creditgraph.pipeline.run.replay import Replay
from creditgraph.pipeline.run.run_settings import resolve_device

EXACT = "true_values"  # name of the row whose credit is the true advantage itself
GRADIENT_METRICS = ("cosine", "tokens", "steps", "noise", "signal")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        samples: continuations per distinct thought boundary.
        max_rows: trajectories per method and seed for which true values are computed; a keyed choice when there are
            more.
        run: run directory whose checkpoint is the policy, or None for the recipe's own model.
        iteration: of the checkpoint; None is the newest one.
        overrides: settings for every method, as on the command line.
        config_dirs: further folders with recipes.
    """

    samples: int = 48
    max_rows: int = 128
    run: Path | None = None
    iteration: int | None = None
    overrides: tuple[str, ...] = ()
    config_dirs: tuple[str, ...] = ()


@dataclass
class _Reference:
    """The baseline's batch of one seed, which all methods share, and its true values.

    Attributes:
        seed, run: the batch; `run` holds the policy and the verifier, which are alive while the seed is measured.
        known: outcomes of states that were continued already, for `true_values`.
        gradients: the true policy gradient, by prompt uid.
    """

    seed: int
    run: MeasuredRun
    known: dict[State, Tensor] = field(default_factory=dict)
    truth: Truth = field(init=False)
    gradients: dict[int, Tensor] = field(init=False)


@dataclass
class _Measured:
    """One method at one seed; `own` is None for the row of the true values."""

    metrics: dict[str, float]
    sums: GradientSums
    costs: dict[str, Cost] = field(default_factory=dict)
    own: bool | None = None


def load_policy(experiment: Experiment, run: Path | None, iteration: int | None = None) -> tuple[LearnerModel, Weights]:
    """The model with the policy's weights, for gradients, and those weights for engines.

    Raises:
        RunError: the run has no checkpoint of this iteration.
    """
    model = load_causal_lm(experiment.model, resolve_device(experiment.run.device))
    if run is not None:
        replay = Replay(run)
        try:
            saved = replay.checkpoints()
            if iteration is not None and iteration not in saved:
                raise RunError(
                    f"{run}: no checkpoint after iteration {iteration}; expected one of "
                    f"{ranges(saved) if saved else 'none: train with run.checkpoint.every'}."
                )
            iteration = replay.newest_checkpoint() if iteration is None else iteration
            weights: Weights = replay.value(Wire(learner_of(replay.graph).name, "weights"), iteration)
        finally:
            replay.close()
        weights = merged(weights, experiment.model)
        if weights.tensors is not None:
            model.load_state_dict(weights.tensors, strict=False)  # a tied output head is not among them
    learner = LearnerModel(model, slow_attention=True)
    return learner, Weights(version=0, tensors=learner.published())


class CreditBench:
    """Measures methods one after the other; the first is the baseline, whose rollouts are shared.

    Args:
        methods: the baseline first.
        seeds: one batch of prompts and rollouts each.
        options: what is measured.
        say: receives progress as sentences.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        seeds: Sequence[int],
        options: Options,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.methods = methods
        self.seeds = seeds
        self.options = options
        self.say = say or (lambda text: None)
        self.experiments = {m.name: m.experiment(*options.overrides, config_dirs=options.config_dirs) for m in methods}
        self.baseline = self.experiments[methods[0].name]
        self.model, self.weights = load_policy(self.baseline, options.run, options.iteration)

    def measure(self) -> dict[str, Any]:
        """The result, as JSON values.

        "methods" has, by name and the exact row first, metrics per seed with mean and spread; a method that fails is
        named under "failed" instead. "truth" and "ceiling" describe the true values of each seed.
        """
        measured: dict[str, list[_Measured]] = {EXACT: [], **{m.name: [] for m in self.methods}}
        failed: dict[str, str] = {}
        ceilings: list[float] = []
        truths: list[dict[str, float]] = []
        for seed in self.seeds:
            with MeasuredRun(self.baseline, seed, self.weights, uids_from_top=True) as run:
                reference = self._reference(seed, run)
                tokens = whole(run.trajectories.response_tokens, run.turns)
                thoughts = exact_credit(tokens, reference.truth)
                ceilings.append(reliability(spearman(*thoughts.halves)))
                truths.append(describe_truth(reference.truth))
                steps = run.learner.config.steps_per_batch
                sums = GradientSums.of(reference.gradients, reference.gradients, sampled_tokens(run), steps)
                measured[EXACT].append(_Measured(thoughts.metrics(), sums))
                for method in self.methods:
                    if method.name in failed:
                        continue
                    try:
                        measured[method.name].append(self._method(method, reference))
                    except (CreditgraphError, NodeFailure) as error:
                        failed[method.name] = str(error)
                        self.say(f"seed {seed}: {method.name} failed: {error}")
        baseline = [m.sums for m in measured[self.methods[0].name]]
        methods = {name: summarise(parts, baseline) for name, parts in measured.items() if name not in failed}
        return {"ceiling": ceilings, "truth": truths, "methods": methods, "failed": failed}

    def _reference(self, seed: int, run: MeasuredRun) -> _Reference:
        reference = _Reference(seed, run)
        rows = run.trajectories
        tokens = whole(rows.response_tokens, run.turns)
        truth = reference.truth = self._truth(reference, run, torch.arange(len(tokens)))
        # The policy gradient of the mean outcome: every token has its thought's true advantage, responses (or episodes)
        # are averaged, tokens summed.
        weight = rows.response_tokens.with_values(truth.per_token(tokens).values / max(len(tokens), 1))
        reference.gradients = prompt_gradients(self.model, rows, weight, rows.temperature)
        self.say(
            f"seed {seed}: {len(tokens)} rollouts, {truth.num_states} states, {truth.sampled_tokens} tokens for truth"
        )
        return reference

    def _truth(self, reference: _Reference, run: MeasuredRun, rows: Tensor) -> Truth:
        """True values of these responses, or episodes, of a run; of episodes in the run's own environment."""
        policy, prompts = (reference.run.first(kind) for kind in (Policy, Prompts))
        stream = Stream("creditbench", reference.seed)
        common: dict[str, Any] = {"samples": self.options.samples, "stream": stream, "known": reference.known}
        if run.turns is not None:
            world = next(node for node in run.graph.nodes if node.outputs_of(Environments))
            table = reference.run.player.table(prompts, policy, run.first(Environments))
            name = f"{world.use} {world.config}"
            return turn_values(table, run.trajectories, run.turns, rows, world=name, **common)
        verifier, sampling = reference.run.first(Verifier), sampling_of(self.baseline.graph)
        return true_values(policy, verifier, prompts, run.trajectories.select(rows), sampling, **common)

    def _method(self, method: Method, reference: _Reference) -> _Measured:
        experiment = self.experiments[method.name]
        shared = shared_outputs(experiment.graph, reference.run)
        costs = {name: reference.run.costs[name] for name in shared}
        with MeasuredRun(experiment, reference.seed, self.weights, shared=shared, shared_costs=costs) as run:
            trajectories = run.trajectories
            effective = effective_credit(trajectories, run.credit, run.learner.config.objective)
            gradients = prompt_gradients(self.model, trajectories, effective.weight, trajectories.temperature)
            first = first_rows(run.turns, len(trajectories))
            # Methods that only read the shared rollouts need no separate true values.
            if torch.equal(trajectories.uid, reference.run.trajectories.uid):
                rows = torch.arange(len(first))
                truth = reference.truth
            else:
                rows = choose_rows(trajectories.uid[first], self.options.max_rows, reference.seed)
                truth = self._truth(reference, run, rows)
            credit, mask = (whole(column, run.turns).select(rows) for column in (effective.credit, run.credit.mask))
            thoughts = thought_credit(credit, mask, trajectories.inherited[first][rows], truth)
            metrics = thoughts.metrics() | cost_metrics(run)
            shown = " ".join(f"{name} {value:.3g}" for name, value in list(metrics.items())[:4])
            self.say(f"seed {reference.seed}: {method.name} {shown}")
            steps = run.learner.config.steps_per_batch
            sums = GradientSums.of(gradients, reference.gradients, sampled_tokens(run), steps)
            return _Measured(metrics, sums, run.costs, run.own_rollouts)


def exact_credit(tokens: Jagged, truth: Truth) -> ThoughtCredit:
    """Thoughts whose credit is the true advantage itself, on all response tokens."""
    mask = tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool))
    return thought_credit(truth.per_token(tokens), mask, torch.zeros(len(tokens), dtype=torch.int64), truth)


def sampled_tokens(run: MeasuredRun) -> float:
    """All tokens sampled for the batch: rollouts and what credit needed."""
    return run.cost(rollouts=True).sampled_tokens + run.cost(rollouts=False).sampled_tokens


def cost_metrics(run: MeasuredRun) -> dict[str, float]:
    """Tokens of the rollouts, and what credit cost in addition."""
    rollouts = run.cost(rollouts=True)
    credit = run.cost(rollouts=False)
    return {
        "rollout_tokens": rollouts.sampled_tokens,
        "credit_sampled": credit.sampled_tokens,
        "credit_scored": credit.scored_tokens,
        "credit_processed": credit.processed,
        "credit_seconds": credit.seconds,
    }


def choose_rows(uid: Tensor, most: int, seed: int) -> Tensor:
    """int64: all rows, or a keyed choice of `most` of them by their uid [N], in order."""
    if len(uid) <= most:
        return torch.arange(len(uid))
    order = torch.argsort(Stream("creditbench rows", seed).uniform(uid))
    return order[:most].sort().values


def describe_truth(truth: Truth) -> dict[str, float]:
    """Statistics of the true values; those before and after the first error check them against the task's steps."""
    values = truth.values
    error = truth.error[values.row_ids]
    inner = values.positions < truth.ends.lengths[values.row_ids]  # the last value of a row is its outcome
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
    """Tokens at which noise equals signal relative to the baseline, and the jackknife standard error over seeds."""

    def ratio(a: float, b: float) -> float:
        return a / b if b > 0 else math.nan

    parts = zip(leave_one_out(sums, "tokens"), leave_one_out(baseline, "tokens"), strict=True)
    return ratio(pooled(sums)["tokens"], pooled(baseline)["tokens"]), jackknife([ratio(a, b) for a, b in parts])


def summarise(parts: Sequence[_Measured], baseline: Sequence[GradientSums]) -> dict[str, Any]:
    """Metrics per seed with mean and standard deviation; gradient metrics pooled over seeds, with a jackknife error."""
    rows = [part.metrics for part in parts]
    sums = [part.sums for part in parts]
    joined = pooled(sums)
    summary: dict[str, Any] = {
        "seeds": rows,
        "mean": {name: mean_sd([row[name] for row in rows]) for name in rows[0]},
        "gradient": {name: (joined[name], jackknife(leave_one_out(sums, name))) for name in GRADIENT_METRICS},
        "tokens_relative": relative_tokens(sums, baseline),
    }
    if parts[0].own is not None:
        summary["own_rollouts"] = parts[-1].own
        summary["costs"] = [{node: vars(cost) for node, cost in part.costs.items()} for part in parts]
    return summary
