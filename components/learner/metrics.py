"""Metrics of learners, including the mismatch of engine and learner at equal weights, and its limits."""

import logging
from dataclasses import dataclass

from torch import Tensor

from creditgraph.components.learner.objective import Meters, kl_estimate
from creditgraph.components.learner.objective.base import MAX_LOG_RATIO
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.metric import Metric

logger = logging.getLogger("creditgraph")

_WEIGHT = "mismatch_weight"
_SQUARE = "mismatch_weight_square"
_CAUSES = (
    "the usual causes are weights that did not reach the engine, another sampling temperature, or numerics (engine "
    "dtype, kernels); objective.importance corrects a small mismatch"
)

# Metrics for every objective; further ones are declared on the objective's class.
LEARNER_METRICS: tuple[Metric, ...] = (
    Metric("loss", "loss", "loss of an optimiser step, mean over the steps of the iteration"),
    Metric("grad_norm", "norm", "norm of the gradient before clipping, mean over steps"),
    Metric("lr", "rate", "learning rate, mean over steps"),
    Metric("steps", "steps", "optimiser steps made"),
    Metric("skipped_zero_credit", "steps", "steps without any credit, which only advance the schedule"),
    Metric("skipped_nonfinite", "steps", "steps whose loss or gradient was not finite, which change no weight"),
    Metric("trained_tokens", "tokens", "tokens in the loss, once per epoch"),
    Metric("trained_tokens_total", "tokens", "`trained_tokens` since the run began"),
    Metric("forward_tokens", "tokens", "tokens passed through the model in training passes"),
    Metric(
        "unique_tokens",
        "tokens",
        "smallest possible `forward_tokens`, every shared prefix passed once",
    ),
    Metric("shared_tokens", "tokens", "tokens that sharing prefixes saved"),
    Metric("replayed_tokens", "tokens", "`forward_tokens` that went to the experts that the engine chose"),
    Metric("zero_credit_rows", "share", "trajectories without a trained token of non-zero advantage"),
    Metric("policy_lag", "versions", "learner's version minus the version that sampled, mean over trajectories"),
    Metric("version", "number", "version of the published weights"),
    Metric("entropy", "nats", "entropy of the policy, mean over trained tokens"),
    Metric("approx_kl", "nats", "k3 estimate of KL(old ‖ present policy) per trained token"),
    Metric("kl_reference", "nats", "estimate of KL(policy ‖ reference) per trained token, with `objective.kl`"),
    Metric("imitated_logprob", "nats", "mean log-prob of the tokens that the credit has imitated (column `imitation`)"),
    Metric("high_entropy", "share", "trained tokens that the entropy mask keeps"),
    Metric(
        "high_entropy_ties",
        "share",
        "trained tokens of entropy 0 that the entropy mask leaves out although its threshold is 0",
    ),
    Metric("importance_weight", "ratio", "mean weight learner/engine of trained tokens, with `objective.importance`"),
    Metric("importance_capped", "share", "trained tokens whose weight learner/engine was capped"),
    Metric(
        "mismatch_clipped",
        "share",
        "trained tokens that clipping stops before the first step, by the mismatch alone; with `old_logprobs: engine`",
    ),
    Metric("mismatch_abs", "nats", "mean |log p of the learner − of the engine| at equal weights"),
    Metric("mismatch_abs_max", "nats", "largest of these"),
    Metric("mismatch_kl", "nats", "k3 estimate of KL(engine ‖ learner) at equal weights"),
    Metric(
        "mismatch_ess", "share", "effective sample size of weighing engine tokens by learner/engine; 1 when both agree"
    ),
    Metric("imbalance_before", "ratio", "longest replica over the mean, in tokens, if rows kept their order"),
    Metric("imbalance_after", "ratio", "the same after rows were given to replicas by cost"),
    Metric("seconds_exchange", "s", "wall time of moving rows to the replicas that compute them, waiting included"),
    Metric("seconds_forward_backward", "s", "wall time of forward and backward passes"),
    Metric("seconds_optimizer", "s", "wall time of optimiser steps"),
    Metric("seconds_publish", "s", "wall time of publishing the new weights"),
    Metric("seconds_old_logprobs", "s", "wall time of recomputing old log-probs"),
    Metric("seconds_reference", "s", "wall time of the reference's log-probs"),
    Metric(
        "mfu",
        "share",
        "operations that the model's passes need, recomputation left out, over what the GPUs could do in their time by "
        "the vendor's bf16 rate; left out without a GPU of a known kind (components/models/gpus.py)",
    ),
    Metric("tokens_per_second", "tokens/s", "tokens of training passes per second and GPU, optimiser steps included"),
    Metric(
        "memory_<phase>",
        "GB",
        "largest GPU memory of tensors during a phase, on rank 0; phases as in `seconds_<phase>`",
    ),
    Metric("memory_<phase>_reserved", "GB", "the same of what torch has taken from the GPU"),
)


class MismatchError(CreditgraphError):
    """Engine and learner give the same tokens too different log-probs."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Limits on the mean |Δ log p| between engine and learner [nats], over tokens sampled by the present weights."""

    warn: float = 0.1
    """warn once above this; 0 never warns"""
    stop: float = 0.0
    """end the run above this; 0 never ends it"""
    clipped: float = 0.01
    """warn once when more than this share of trained tokens is clipped before the first step; 0 never warns"""

    def __post_init__(self) -> None:
        if self.warn < 0 or self.stop < 0 or self.clipped < 0:
            raise ValueError(
                f"expected warn ≥ 0, stop ≥ 0 and clipped ≥ 0 (0 is off), got {self.warn}, {self.stop} and "
                f"{self.clipped}."
            )


def mismatch_meters(meters: Meters, learner: Tensor, engine: Tensor, mask: Tensor) -> None:
    """Adds how engine and learner differ over tokens sampled by the present weights (mask); see `mismatch_values`.

    Mean and largest |Δ log p|, the k3 estimate of KL(engine ‖ learner) [nats], and the moments of the ratio w =
    p_learner / p_engine. Anything above rounding means that sampler and learner disagree: another temperature, stale
    weights, another chat template.
    """
    gap = (learner - engine).abs()
    meters.mean("mismatch_abs", gap, mask)
    meters.maximum("mismatch_abs_max", gap, mask)
    meters.mean("mismatch_kl", kl_estimate(engine, learner, "k3"), mask)
    weight = (learner - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().double()
    meters.mean(_WEIGHT, weight, mask)
    meters.mean(_SQUARE, weight.square(), mask)


def mismatch_values(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of `Meters.values` with `mismatch_ess` instead of the moments of the ratio.

    Effective sample size of weighing the engine's tokens by w, as a share of their number: (Σ w)² / (n Σ w²); 1 at
    equal log-probs.

    >>> mismatch_values({"mismatch_weight": 2.0, "mismatch_weight_square": 5.0})
    {'mismatch_ess': 0.8}
    """
    rest = {k: v for k, v in metrics.items() if k not in (_WEIGHT, _SQUARE)}
    square = metrics.get(_SQUARE, 0.0)
    return rest | {"mismatch_ess": metrics[_WEIGHT] ** 2 / square} if square > 0 else rest


class Guard:
    """Reads a learner's metrics: enforces the limits of `Mismatch`, and names an entropy mask without a threshold."""

    def __init__(self, limits: Mismatch) -> None:
        self.limits = limits
        self._warned: set[str] = set()

    def check(self, node: str, metrics: dict[str, float]) -> None:
        """Warns once of each, or raises MismatchError; NaN is above every limit."""
        gap = metrics.get("mismatch_abs", 0.0)
        finding = (
            f"node '{node}': engine and learner differ by {gap:.3g} nats per token at equal weights (mean |Δ log p|)"
        )
        stop = self.limits.stop
        if stop and not gap <= stop:
            raise MismatchError(f"{finding}; expected at most mismatch.stop = {stop:g}. Check the engine: {_CAUSES}.")
        warn = self.limits.warn
        if warn and not gap <= warn:
            self._warn("mismatch", f"{finding}, above mismatch.warn = {warn:g}; {_CAUSES}.")
        clipped = metrics.get("mismatch_clipped", 0.0)
        if self.limits.clipped and not clipped <= self.limits.clipped:
            self._warn(
                "clipped",
                f"node '{node}': {clipped:.1%} of the trained tokens are clipped before the first optimiser step, "
                f"above mismatch.clipped = {self.limits.clipped:.1%}; with old_logprobs: engine the ratios hold the "
                f"difference of engine and learner (mean |Δ log p| {gap:.3g} nats). Set {node}.old_logprobs=recompute.",
            )
        ties = metrics.get("high_entropy_ties", 0.0)
        if ties > 0:
            self._warn(
                "ties",
                f"node '{node}': fewer tokens have positive entropy than entropy_mask.keep asks for; {ties:.1%} of the "
                "trained tokens, of entropy 0, tie at the threshold 0 and are left out.",
            )

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", text)
