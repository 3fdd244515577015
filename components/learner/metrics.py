"""Metrics that compare the sampling engine with the learner at equal weights."""

from __future__ import annotations

from torch import Tensor

from components.learner.objective import Meters
from components.learner.objective.kl import kl_estimate


def mismatch_meters(meters: Meters, learner: Tensor, engine: Tensor, mask: Tensor) -> None:
    """Mean and largest |Δ log p| and the k3 estimate of KL(engine ‖ learner) [nats], over tokens sampled by the present weights.

    Anything above rounding means that sampler and learner disagree: another temperature, stale weights, another chat template.
    """
    gap = (learner - engine).abs()
    meters.mean("mismatch_abs", gap, mask)
    meters.top("mismatch_abs_max", gap, mask)
    meters.mean("mismatch_kl", kl_estimate(engine, learner, "k3"), mask)
