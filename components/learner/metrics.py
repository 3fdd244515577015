"""Metrics that compare the sampling engine with the learner at equal weights, and the limits set on them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor

from components.learner.objective import Meters
from components.learner.objective.base import MAX_LOG_RATIO
from components.learner.objective.kl import kl_estimate
from pipeline.core.errors import CreditgraphError

logger = logging.getLogger("creditgraph")

_WEIGHT, _SQUARE = "mismatch_weight", "mismatch_weight_square"
_CAUSES = (
    "the usual causes are weights that did not reach the engine, another sampling temperature, or numerics (engine "
    "dtype, kernels); "
    "objective.importance_cap corrects a small mismatch"
)


class MismatchError(CreditgraphError):
    """Engine and learner give the same tokens too different log-probs."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Limits on the mean |Δ log p| between engine and learner [nats per token], over tokens sampled by the present weights."""

    warn: float = 0.1
    """warn once above this; 0 never warns"""
    stop: float = 0.0
    """end the run above this; 0 never ends it"""

    def __post_init__(self) -> None:
        if self.warn < 0 or self.stop < 0:
            raise ValueError(
                f"mismatch.warn {self.warn}, mismatch.stop {self.stop}; wanted 0 (off) or a number of nats."
            )


def mismatch_meters(meters: Meters, learner: Tensor, engine: Tensor, mask: Tensor) -> None:
    """Adds, over tokens sampled by the present weights (mask), how engine and learner differ; `mismatch_values` completes it.

    Mean and largest |Δ log p|, the k3 estimate of KL(engine ‖ learner) [nats], and the moments of the ratio w =
    p_learner / p_engine. Anything above rounding means that sampler and learner disagree: another temperature, stale
    weights, another chat template.
    """
    gap = (learner - engine).abs()
    meters.mean("mismatch_abs", gap, mask)
    meters.top("mismatch_abs_max", gap, mask)
    meters.mean("mismatch_kl", kl_estimate(engine, learner, "k3"), mask)
    weight = (learner - engine).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().double()
    meters.mean(_WEIGHT, weight, mask)
    meters.mean(_SQUARE, weight.square(), mask)


def mismatch_values(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of `Meters.values` with `mismatch_ess` in place of the moments of the ratio.

    Effective sample size of weighing the engine's tokens by w, as a share of their number: (Σ w)² / (n Σ w²); 1 at
    equal log-probs.

    >>> mismatch_values({"mismatch_weight": 2.0, "mismatch_weight_square": 5.0})
    {'mismatch_ess': 0.8}
    """
    rest = {k: v for k, v in metrics.items() if k not in (_WEIGHT, _SQUARE)}
    square = metrics.get(_SQUARE, 0.0)
    return rest | {"mismatch_ess": metrics[_WEIGHT] ** 2 / square} if square > 0 else rest


class MismatchGuard:
    """Holds a learner to its `Mismatch` limits."""

    def __init__(self, limits: Mismatch) -> None:
        self.limits = limits
        self._warned = False

    def check(self, node: str, metrics: dict[str, float]) -> None:
        """Warns once, or raises MismatchError, when the mean |Δ log p| of `metrics` is above its limit; NaN is above every limit."""
        found, limits = metrics.get("mismatch_abs", 0.0), self.limits
        said = (
            f"node '{node}': engine and learner differ by {found:.3g} nats per token at equal weights (mean |Δ log p|)"
        )
        if limits.stop and not found <= limits.stop:
            raise MismatchError(f"{said}; wanted at most mismatch.stop = {limits.stop:g}. Check the engine: {_CAUSES}.")
        if limits.warn and not found <= limits.warn and not self._warned:
            self._warned = True
            logger.warning("%s, above mismatch.warn = %g; %s.", said, limits.warn, _CAUSES)
