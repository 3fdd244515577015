"""The improvement bounds on random MDPs: exact operators with good and bad targets, and sampled iterations."""

import numpy as np
from numpy.typing import NDArray

from creditgraph.lab.cpi.bounds import claimed_bound, guaranteed_gain
from creditgraph.lab.cpi.families import random_mdps
from creditgraph.lab.cpi.iteration import exact_step, greedy, improvable, localiser_quality, sampled_step
from creditgraph.lab.cpi.mdp import Floats, TabularMDP, Values, evaluate, state_distribution

ALGORITHMS = ("rr", "oracle", "localiser")
TARGETS = ("exact", "noisy", "adversarial")
Rows = dict[str, Floats]


def _targets(values: Values, distribution: Floats, rng: np.random.Generator) -> dict[str, Floats]:
    """π⁺ to try the bound with: greedy; greedy in a noisy Q; greedy where π often is, the worst action elsewhere."""
    scale = values.advantage.std(axis=(1, 2, 3), keepdims=True)
    level = np.quantile(distribution, rng.uniform(0.1, 0.9), axis=(1, 2), keepdims=True)
    return {
        "exact": greedy(values.q),
        "noisy": greedy(values.q + scale * rng.uniform(0, 3, size=scale.shape) * rng.standard_normal(values.q.shape)),
        "adversarial": np.where((distribution >= level)[..., None], greedy(values.q), greedy(-values.q)),
    }


def random_localiser(distribution: Floats, oracle: Floats, rng: np.random.Generator) -> Floats:
    """A random membership for every MDP: half of them random sets of states, half random acceptance probabilities."""
    inside = rng.uniform(0.05, 1, size=(len(oracle), 1, 1))
    outside = rng.uniform(0, 1, size=(len(oracle), 1, 1)) ** 2
    chance = np.where(oracle > 0, inside, outside)
    sets = (rng.random(oracle.shape) < chance).astype(np.float64)
    soft = np.clip(chance * rng.uniform(0, 2, size=oracle.shape), 0, 1)
    membership = np.where(rng.random((len(oracle), 1, 1)) < 0.5, sets, soft)
    empty = (membership * oracle * distribution).sum((1, 2)) <= 0  # recall would be 0
    return np.where(empty[:, None, None], oracle, membership)


def _random_case(
    rng: np.random.Generator, count: int
) -> tuple[TabularMDP, Floats, Values, Floats, dict[str, Floats | None], Rows]:
    """Random MDPs, policies, τ (2–100 % of the best advantage reached) and localisers, with their claimed bounds."""
    mdp, policy = random_mdps(rng, count)
    values = evaluate(mdp, policy)
    distribution = state_distribution(mdp, policy)
    best = np.where(distribution > 1e-6, values.advantage.max(-1), 0).max((1, 2))
    tau = best * rng.uniform(0.02, 1, size=count)
    oracle = improvable(values, tau)
    p = (distribution * oracle).sum((1, 2))
    membership = random_localiser(distribution, oracle, rng)
    beta, gamma = localiser_quality(distribution, oracle, membership)
    rows = {"p": p, "tau": tau, "beta": beta, "gamma": gamma, "scale": mdp.horizon * mdp.max_reward}
    rows["bound_rr"] = claimed_bound(mdp, tau, p)
    rows["bound_oracle"] = claimed_bound(mdp, tau, p, np.ones(count))
    rows["bound_localiser"] = claimed_bound(mdp, tau, p, (1 - beta) * gamma)
    return mdp, policy, values, distribution, {"rr": None, "oracle": oracle, "localiser": membership}, rows


def check_bound(rng: np.random.Generator, count: int) -> Rows:
    """The bounds on `count` random MDPs of one random shape: columns [count] of gains, bounds and their conditions.

    For each target t in exact, noisy, adversarial: gain_rr_t, gain_oracle_t, gain_localiser_t; for each, the gain
    that is certain for the target's own 𝔸 (sure_*), whether a full step (α = 1) would lose return although 𝔸 > 0
    (lost_*), and whether 𝔸 is high enough for the claimed constant 16 (fit_*: 𝔸 ≥ τ p_π/2 for random resets, τ/√2 for
    the oracle, (1−β) τ/√2 for a localiser).
    """
    mdp, policy, values, distribution, memberships, rows = _random_case(rng, count)
    tau = rows["tau"]
    enough = {
        "rr": tau * rows["p"] / 2,
        "oracle": tau / np.sqrt(2),
        "localiser": (1 - rows["beta"]) * tau / np.sqrt(2),
    }
    for target_name, target in _targets(values, distribution, rng).items():
        for name, accepts in memberships.items():
            step = exact_step(mdp, policy, accepts, target)
            rows[f"gain_{name}_{target_name}"] = step.improvement
            rows[f"sure_{name}_{target_name}"] = guaranteed_gain(mdp, step, accepts is not None)
            full = exact_step(mdp, policy, accepts, target, alpha=np.ones(count))
            rows[f"lost_{name}_{target_name}"] = (
                (step.advantage > 0) & (full.improvement < -1e-9 * rows["scale"])
            ).astype(np.float64)
            rows[f"fit_{name}_{target_name}"] = (step.advantage >= enough[name]).astype(np.float64)
    return rows


def check_sampled(rng: np.random.Generator, count: int, num_labels: int) -> Rows:
    """The claimed bound after one *sampled* iteration with `num_labels` roll-outs: gains and bounds [count]."""
    mdp, policy, _, _, memberships, rows = _random_case(rng, count)
    for name, accepts in memberships.items():
        gains = np.empty(count)
        for i in range(count):
            chosen = None if accepts is None else accepts[i : i + 1]
            step, _ = sampled_step(mdp.row(i), policy[i : i + 1], num_labels, rng, chosen)
            gains[i] = step.improvement[0]
        rows[f"gain_{name}"] = gains
    return rows


def below(gain: Floats, bound: Floats, scale: Floats) -> NDArray[np.bool_]:
    """Where a gain misses its bound by more than the rounding of returns, 1e-13 of `scale` (H R_max)."""
    return gain < bound - 1e-13 * scale


def count_checks(rows: Rows) -> dict[str, dict[str, float]]:
    """Violations of `check_bound` rows by "algorithm/target":

    num, num_tiny (bounds under 1e-13 of H R_max, which float64 cannot decide), num_fit (𝔸 high enough for the constant
    16), violations (of the claimed bound, any target), violations_fit (among num_fit), violations_sure (of the bound
    derived for the target's own 𝔸), full_step_loses (of the targets with 𝔸 > 0), min_ratio and min_ratio_sure (smallest
    gain over bound, num_fit and not tiny).
    """
    counts = {}
    for name in ALGORITHMS:
        bound = rows[f"bound_{name}"]
        scale = rows["scale"]
        for target in TARGETS:
            gain = rows[f"gain_{name}_{target}"]
            sure = rows[f"sure_{name}_{target}"]
            fit = rows[f"fit_{name}_{target}"] > 0
            wrong = below(gain, bound, scale)
            clear = fit & (bound > 1e-10 * scale)
            clear_sure = sure > 1e-10 * scale
            counts[f"{name}/{target}"] = {
                "num": float(len(gain)),
                "num_tiny": float((bound <= 1e-13 * scale).sum()),
                "num_fit": float(fit.sum()),
                "violations": float(wrong.sum()),
                "violations_fit": float((wrong & fit).sum()),
                "violations_sure": float(below(gain, sure, scale).sum()),
                "full_step_loses": float(rows[f"lost_{name}_{target}"].sum()),
                "min_ratio": float((gain[clear] / bound[clear]).min()),
                "min_ratio_sure": float((gain[clear_sure] / sure[clear_sure]).min()),
            }
    return counts


def count_better(rows: Rows) -> dict[str, float]:
    """ "Better than random resets iff (1−β)γ > p_π" on `check_bound` rows, ties (within 1e-9) left out.

    agree_bounds: share of MDPs where the claimed bounds order that way; agree_gains: where the exact gains do (greedy
    π⁺), with the counts of disagreement, and of localisers that are worse although (1−β)γ > 2 p_π; agree_own: share
    where the exact gains order as the bounds with the MDP's own 𝔸, p̂ 𝔸²/8 against 𝔸²/4.
    """
    quality = (1 - rows["beta"]) * rows["gamma"]
    clear = abs(quality / rows["p"] - 1) > 1e-9
    claimed = (quality > rows["p"])[clear]
    bounds = (rows["bound_localiser"] > rows["bound_rr"])[clear]
    gains = (rows["gain_localiser_exact"] > rows["gain_rr_exact"])[clear]
    return {
        "num": float(clear.sum()),
        "num_claimed": float(claimed.sum()),
        "agree_bounds": float((bounds == claimed).mean()),
        "agree_gains": float((gains == claimed).mean()),
        "agree_own": float((gains == (rows["sure_localiser_exact"] > rows["sure_rr_exact"])[clear]).mean()),
        "worse_above_2p": float(((quality > 2 * rows["p"])[clear] & ~gains).sum()),
        "claimed_but_worse": float((claimed & ~gains).sum()),
        "better_unclaimed": float((~claimed & gains).sum()),
    }
