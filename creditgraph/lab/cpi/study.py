"""Power laws over p_π: improvement per iteration, labels needed, and what a localiser gains."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from creditgraph.lab.cpi.bounds import Slope, claimed_bound, loglog_slope
from creditgraph.lab.cpi.families import Shape, uniform_policy
from creditgraph.lab.cpi.iteration import (
    exact_step,
    greedy,
    improvable,
    localiser_quality,
    localiser_with,
    mean_advantage,
    num_draws,
    sampled_step,
)
from creditgraph.lab.cpi.mdp import Floats, TabularMDP, evaluate, state_distribution

Family = Callable[[Shape, float], TabularMDP]
CRITERIA = ("step", "greedy", "bound")
"""When a sampled iteration counts as a success; see `successes`."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One family at one seed, over the knob: everything [N]."""

    knobs: Floats
    p: Floats
    """p_π = d^π(𝒢), exact."""
    tau: float
    level: Floats
    """𝔸_𝒢 ≥ τ, the mean best advantage on 𝒢."""
    gains: dict[str, Floats]
    """Exact improvement J(π') − J(π) of one iteration, by algorithm ("rr", "caro")."""

    def slopes(self, at_level: bool = False) -> dict[str, Slope]:
        """Log-log slope of the improvement over p_π, by algorithm; `at_level` divides the improvement by 𝔸_𝒢² first."""
        return {
            name: loglog_slope(self.p, gain / (self.level**2 if at_level else 1.0)) for name, gain in self.gains.items()
        }


def fixed_tau(family: Family, shape: Shape, knobs: Floats) -> float:
    """A threshold that the same states pass at every knob: half the smallest best advantage of a reached hard state."""
    smallest = np.inf
    for knob in knobs:
        mdp = family(shape, knob)
        best = evaluate(mdp, uniform_policy(mdp)).advantage.max(-1)
        smallest = min(smallest, best[best > 1e-9].min())
    return float(smallest / 2)


def sweep(family: Family, shape: Shape, knobs: Floats) -> Sweep:
    """Exact improvement of CPI-RR and CPI-CARO from the uniform policy at every knob."""
    tau = fixed_tau(family, shape, knobs)
    p = np.empty(len(knobs))
    level = np.empty(len(knobs))
    gains = {"rr": np.empty(len(knobs)), "caro": np.empty(len(knobs))}
    for i, knob in enumerate(knobs):
        mdp = family(shape, knob)
        policy = uniform_policy(mdp)
        oracle = improvable(evaluate(mdp, policy), np.array([tau]))
        p[i] = (state_distribution(mdp, policy) * oracle).sum()
        gains["rr"][i] = exact_step(mdp, policy).improvement[0]
        caro = exact_step(mdp, policy, oracle)
        gains["caro"][i], level[i] = caro.improvement[0], caro.advantage[0]
    return Sweep(knobs=knobs, p=p, tau=tau, level=level, gains=gains)


def tau_slopes(family: Family, shape: Shape, knob: float, gaps: Floats) -> dict[str, Slope]:
    """Log-log slope of the improvement over τ (the smallest best advantage of a hard state) at a fixed knob."""
    taus = np.empty(len(gaps))
    gains = {"rr": np.empty(len(gaps)), "caro": np.empty(len(gaps))}
    for i, gap in enumerate(gaps):
        mdp = family(replace(shape, gap=float(gap)), knob)
        policy = uniform_policy(mdp)
        values = evaluate(mdp, policy)
        best = values.advantage.max(-1)
        taus[i] = best[best > 1e-9].min()
        gains["rr"][i] = exact_step(mdp, policy).improvement[0]
        gains["caro"][i] = exact_step(mdp, policy, improvable(values, taus[i : i + 1] * (1 - 1e-9))).improvement[0]
    return {name: loglog_slope(taus, gain) for name, gain in gains.items()}


def successes(
    mdp: TabularMDP, policy: Floats, tau: float, localised: bool, num: int, repeats: int, rng: np.random.Generator
) -> dict[str, float]:
    """Share of `repeats` sampled iterations with `num` labels that succeed, by criterion:

    * "step": 𝔸̂ (hence the step size) lies within half of the exact operator's 𝔸;
    * "greedy": the regressed π⁺ reaches half of that 𝔸 (only regression counts, not the step size);
    * "bound": the exact gain of the sampled update reaches the claimed bound (τ² p_π²/(16 H R_max), for CARO τ²
    p_π/(16 H R_max)).
    """
    values = evaluate(mdp, policy)
    oracle = improvable(values, np.array([tau]))
    weights = state_distribution(mdp, policy) * (oracle if localised else 1.0)
    exact, _ = mean_advantage(values, greedy(values.q), weights)
    p = (state_distribution(mdp, policy) * oracle).sum((1, 2))
    step, estimate = sampled_step(mdp, policy, num, rng, oracle if localised else None, repeats)
    bound = claimed_bound(mdp, np.array([tau]), p, np.ones(1) if localised else None)
    return {
        "step": float((abs(estimate - exact) <= exact / 2).mean()),
        "greedy": float((step.advantage >= exact / 2).mean()),
        "bound": float((step.improvement >= bound).mean()),
    }


def labels_needed(
    mdp: TabularMDP,
    policy: Floats,
    tau: float,
    localised: bool,
    rng: np.random.Generator,
    repeats: int,
    share: float = 0.9,
) -> dict[str, float]:
    """Roll-out labels that one iteration needs to succeed with probability `share`, by criterion.

    Doubles the labels from 4 on, and interpolates the success probability in log K between the last failure and the
    first success that the next doubling confirms.
    """
    needed: dict[str, float] = {}
    history: dict[str, list[float]] = {name: [] for name in CRITERIA}
    for exponent in range(2, 42):
        rates = successes(mdp, policy, tau, localised, 2**exponent, repeats, rng)
        for name in CRITERIA:
            history[name].append(rates[name])
            rate = history[name]
            if name not in needed and len(rate) >= 2 and rate[-2] >= share and rate[-1] >= share:
                before = rate[-3] if len(rate) >= 3 else rate[-2]
                back = (rate[-2] - share) / (rate[-2] - before) if rate[-2] > before else 0.0
                needed[name] = 2.0 ** (exponent - 1 - back)
        if len(needed) == len(CRITERIA):
            return needed
    raise ValueError(f"no success within 2^41 labels for {sorted(set(CRITERIA) - set(needed))}; raise tau or the knob.")


@dataclass(frozen=True, kw_only=True)
class LabelCurve:
    """Labels needed along a sweep, by algorithm and criterion, and resets that CARO draws for "step"; all [N]."""

    labels: dict[str, dict[str, Floats]]
    draws: Floats


def label_curve(family: Family, shape: Shape, swept: Sweep, rng: np.random.Generator, repeats: int) -> LabelCurve:
    """`labels_needed` for both algorithms at every knob of a sweep."""
    needed: dict[str, list[dict[str, float]]] = {"rr": [], "caro": []}
    draws = []
    for knob, p in zip(swept.knobs, swept.p, strict=True):
        mdp = family(shape, knob)
        policy = uniform_policy(mdp)
        for name, rows in needed.items():
            rows.append(labels_needed(mdp, policy, swept.tau, name == "caro", rng, repeats))
        draws.append(num_draws(round(needed["caro"][-1]["step"]), p, rng, repeats).mean())
    labels = {name: {c: np.array([row[c] for row in rows]) for c in CRITERIA} for name, rows in needed.items()}
    return LabelCurve(labels=labels, draws=np.array(draws))


def localiser_curve(family: Family, shape: Shape, knob: float, qualities: Floats) -> tuple[Floats, Floats]:
    """((1−β)γ/p_π [N], gain of the localised step over that of CPI-RR [N]) for localisers with β = 1 − √q, γ = √q."""
    mdp = family(shape, knob)
    policy = uniform_policy(mdp)
    distribution = state_distribution(mdp, policy)
    oracle = improvable(evaluate(mdp, policy), np.array([fixed_tau(family, shape, np.array([knob]))]))
    p = (distribution * oracle).sum()
    random_gain = exact_step(mdp, policy).improvement[0]
    x = []
    y = []
    for quality in qualities:
        root = np.array([np.sqrt(quality)])
        membership = localiser_with(distribution, oracle, 1 - root, root)
        beta, gamma = localiser_quality(distribution, oracle, membership)
        x.append(((1 - beta) * gamma / p)[0])
        y.append(exact_step(mdp, policy, membership).improvement[0] / random_gain)
    return np.array(x), np.array(y)
