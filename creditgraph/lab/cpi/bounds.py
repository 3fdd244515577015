"""Improvement bounds of CPI with resets, and slopes of power laws.

Why our reading of the paper (iteration.py) gives the claimed bound. Run π' by choosing π⁺ with probability α g(x) at
each step. Until the first such choice the trajectory is one of π, so with c_h = P(no choice before step h) and
|Σ_y π⁺ A^π| ≤ H R_max, the performance difference is

    J(π') − J(π) = α Σ_h E_{x_h ~ π'}[g Ā] ≥ α Σ_h (E_{x_h ~ π}[g Ā] − 2 (1 − c_h) H R_max)

* localised: 1 − c_h ≤ α H p̂, so the gain is ≥ α H p̂ (𝔸 − 2 α H² R_max), and α = 𝔸/(4 H² R_max) leaves p̂ 𝔸²/(8 H
R_max);
* random resets: 1 − c_h ≤ α h, so the gain is ≥ α H (𝔸 − α H² R_max), and α = 𝔸/(2 H² R_max) leaves 𝔸²/(4 H R_max).

This holds for every π⁺ with 𝔸 ≥ 0. For the greedy π⁺, 𝔸 ≥ (1 − β) τ and p̂ = γ p_π/(1 − β): the localised gain is at
least (1 − β) γ τ² p_π/(8 H R_max), twice the claimed one, whose 16 leaves room for a sampled 𝔸. For random resets 𝔸 ≥
τ p_π.
"""

from dataclasses import dataclass

import numpy as np

from creditgraph.lab.cpi.iteration import Step
from creditgraph.lab.cpi.mdp import Floats, TabularMDP


def claimed_bound(mdp: TabularMDP, tau: Floats, p: Floats, quality: Floats | None = None) -> Floats:
    """[B]: (1−β)γ τ² p_π/(16 H R_max) with `quality` = (1−β)γ (1 for an exact oracle), τ² p_π²/(16 H R_max) without."""
    factor = p if quality is None else quality
    return factor * tau**2 * p / (16 * mdp.horizon * mdp.max_reward)


def guaranteed_gain(mdp: TabularMDP, step: Step, localised: bool) -> Floats:
    """[B]: the gain that the argument above guarantees for the target that was used; 0 where 𝔸 ≤ 0, without a step."""
    positive = np.maximum(step.advantage, 0)
    scale = mdp.horizon * mdp.max_reward
    return step.mass * positive**2 / (8 * scale) if localised else positive**2 / (4 * scale)


@dataclass(frozen=True, kw_only=True)
class Slope:
    """A least-squares slope with its standard error over n values."""

    value: float
    error: float
    num: int


def loglog_slope(x: Floats, y: Floats) -> Slope:
    """Least-squares slope of log y over log x [N], with the standard error of the residuals (N ≥ 3, all positive)."""
    if len(x) < 3 or (x <= 0).any() or (y <= 0).any():
        raise ValueError(
            f"a log-log slope: expected at least 3 positive points, got {len(x)} with smallest x {min(x)}, y {min(y)}."
        )
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    return Slope(value=float(slope), error=float(np.sqrt(covariance[0, 0])), num=len(x))


def mean_slope(slopes: list[Slope]) -> Slope:
    """Mean over seeds; the error is the standard error of that mean (that of the fit where there is one seed)."""
    values = np.array([s.value for s in slopes])
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else slopes[0].error
    return Slope(value=float(values.mean()), error=float(error), num=len(values))
