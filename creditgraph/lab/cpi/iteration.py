"""CPI-RR, CPI-CARO and the approximate localiser (2605.25507): exact operators, and the same as sampling procedures.

One iteration mixes the policy with a target π⁺ on a set of states given by a membership g(x) in [0, 1]:

    π'(·|x) = (1 − α g(x)) π(·|x) + α g(x) π⁺(·|x)

CPI-RR has g = 1 everywhere. CPI-CARO has g = 1 on 𝒢 = {x: max_y A^π(x, y) ≥ τ}. An approximate localiser has any other
g: the probability that it accepts x. Reset states are drawn from d^π and kept with probability g(x) (rejection), so
they follow d^π(x) g(x)/p̂ with p̂ = Σ_x d^π(x) g(x).

Our reading of what the paper leaves open: 𝔸 = E_{x ~ accepted resets}[Σ_y π⁺(y|x) A^π(x, y)], with advantages of the
undiscounted, unnormalised return (|A| ≤ H R_max), and the step sizes CPI-RR α = 𝔸/(2 H² R_max), CPI-CARO α = 𝔸_𝒢/(4 H²
R_max), both cut to [0, 1].
"""

from dataclasses import dataclass

import numpy as np

from creditgraph.lab.cpi.mdp import Floats, Ints, TabularMDP, Values, evaluate, roll_out, state_distribution


def improvable(values: Values, tau: Floats) -> Floats:
    """The oracle's 0/1 membership of 𝒢 [B, H, S]: states whose best action has an advantage of at least `tau` [B]."""
    member: Floats = (values.advantage.max(-1) >= tau[:, None, None]).astype(np.float64)
    return member


def greedy(q: Floats) -> Floats:
    """[..., A]: the deterministic policy that takes the best action (the first of equals)."""
    chosen: Floats = np.eye(q.shape[-1])[q.argmax(-1)]
    return chosen


def mixture(policy: Floats, target: Floats, alpha: Floats, membership: Floats) -> Floats:
    """π + α g (π⁺ − π) [B, H, S, A], with `alpha` [B] and `membership` g [B, H, S]."""
    share = (alpha[:, None, None] * membership)[..., None]
    return policy + share * (target - policy)


def step_size(advantage: Floats, mdp: TabularMDP, localised: bool) -> Floats:
    """[B]: 𝔸/(2 H² R_max) for random resets, 𝔸/(4 H² R_max) for localised ones (our reading), cut to [0, 1]."""
    scale = (4 if localised else 2) * mdp.horizon**2 * mdp.max_reward
    return np.clip(advantage / scale, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one iteration did; all [B] but `policy`."""

    policy: Floats
    """[B, H, S, A]: π'."""
    alpha: Floats
    advantage: Floats
    """𝔸 of the target under accepted resets."""
    mass: Floats
    """p̂ = d^π(g): the share of resets that is accepted."""
    improvement: Floats
    """J(π') − J(π), exact."""


def mean_advantage(values: Values, target: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """(𝔸 [B], p̂ [B]) of `target` under unnormalised state weights d^π g [B, H, S]; 𝔸 = 0 where p̂ = 0."""
    mass = weights.sum((1, 2))
    total = (weights[..., None] * target * values.advantage).sum((1, 2, 3))
    return np.divide(total, mass, out=np.zeros_like(total), where=mass > 0), mass


def exact_step(
    mdp: TabularMDP,
    policy: Floats,
    membership: Floats | None = None,
    target: Floats | None = None,
    alpha: Floats | None = None,
) -> Step:
    """One iteration with exact expectations: CPI-RR without `membership` [B, H, S], localised with it.

    `target` [B, H, S, A] is π⁺, by default greedy in Q^π; `alpha` [B] replaces the step size.
    """
    values = evaluate(mdp, policy)
    target = greedy(values.q) if target is None else target
    accepts = np.ones_like(values.v) if membership is None else membership
    advantage, mass = mean_advantage(values, target, state_distribution(mdp, policy) * accepts)
    alpha = step_size(advantage, mdp, localised=membership is not None) if alpha is None else alpha
    new = mixture(policy, target, alpha, accepts)
    return Step(
        policy=new, alpha=alpha, advantage=advantage, mass=mass, improvement=evaluate(mdp, new).start - values.start
    )


def localiser_quality(distribution: Floats, oracle: Floats, membership: Floats) -> tuple[Floats, Floats]:
    """(false-discovery rate β [B], recall γ [B]) of a localiser g against 𝒢, both measured under d^π.

    β = d^π(g outside 𝒢)/d^π(g), γ = d^π(g inside 𝒢)/d^π(𝒢).
    """
    accepted = (distribution * membership).sum((1, 2))
    right = (distribution * membership * oracle).sum((1, 2))
    return np.clip(1 - right / accepted, 0, 1), right / (distribution * oracle).sum((1, 2))


def localiser_with(distribution: Floats, oracle: Floats, beta: Floats, gamma: Floats) -> Floats:
    """A membership [B, H, S] with recall γ and false-discovery rate β (lowered where too few states lie outside 𝒢)."""
    mass = (distribution * oracle).sum((1, 2))
    with np.errstate(divide="ignore", invalid="ignore"):
        wrong = gamma * mass * beta / ((1 - beta) * (1 - mass))
    wrong = np.clip(np.nan_to_num(wrong, nan=0.0, posinf=1.0), 0, 1)
    membership: Floats = gamma[:, None, None] * oracle + wrong[:, None, None] * (1 - oracle)
    return membership


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Roll-out labels of Q, summed by cell, for R independent repetitions; each [R, H, S, A]."""

    counts: Ints
    sums: Floats


def draw_labels(
    mdp: TabularMDP, policy: Floats, weights: Floats, num: int, rng: np.random.Generator, repeats: int = 1
) -> Labels:
    """`num` labels per repetition of one MDP (B = 1): state ~ `weights` [1, H, S], uniform action, then `policy`.

    Outcome MDPs are sampled in aggregate, equal in law to one roll-out at a time: the counts of cells are multinomial
    and a cell's paid roll-outs binomial with probability Q/R_max.
    """
    _, horizon, num_states = weights.shape
    actions = mdp.num_actions
    cells = np.repeat(weights.ravel() / weights.sum() / actions, actions)
    shape = (repeats, horizon, num_states, actions)
    counts = rng.multinomial(num, cells / cells.sum(), size=repeats)
    if mdp.outcome:
        paid = np.clip(evaluate(mdp, policy).q[0].ravel() / mdp.max_reward[0], 0, 1)
        total = rng.binomial(counts, paid).astype(np.float64) * mdp.max_reward[0]
        return Labels(counts=counts.reshape(shape), sums=total.reshape(shape))
    flat = np.repeat(np.tile(np.arange(counts.shape[1]), repeats), counts.ravel())
    repetition = np.repeat(np.arange(repeats), num)
    step, state, action = np.unravel_index(flat, shape[1:])
    returns = roll_out(mdp, policy, step, state, action, rng)
    sums = np.bincount(repetition * counts.shape[1] + flat, weights=returns, minlength=counts.size).astype(np.float64)
    return Labels(counts=counts.reshape(shape), sums=sums.reshape(shape))


def num_draws(num: int, mass: float, rng: np.random.Generator, repeats: int = 1) -> Ints:
    """[repeats]: resets drawn until `num` of them are accepted with probability `mass` each."""
    return num + rng.negative_binomial(num, min(mass, 1.0), size=repeats)


def regress(labels: Labels, policy: Floats) -> tuple[Floats, Floats]:
    """(π⁺ [R, H, S, A], baseline [R, H, S]) from labels: greedy in the cell means, and the mean label of a state.

    An action that was never tried counts as the state's mean; a state that was never reset to keeps `policy`.
    """
    seen = labels.counts.sum(-1)
    baseline = labels.sums.sum(-1) / np.maximum(seen, 1)
    means = np.where(labels.counts > 0, labels.sums / np.maximum(labels.counts, 1), baseline[..., None])
    return np.where((seen > 0)[..., None], greedy(means), policy), baseline


def estimate_advantage(labels: Labels, target: Floats, policy: Floats, baseline: Floats) -> Floats:
    """𝔸̂ [R] from labels independent of `target`: the mean of A (π⁺(y|x) − π(y|x)) (label − baseline(x)).

    Unbiased for 𝔸: y is uniform (hence the factor A) and Σ_y (π⁺ − π) = 0 removes any baseline that depends on x alone.
    """
    weight = policy.shape[-1] * (target - policy)
    total = (weight * (labels.sums - labels.counts * baseline[..., None])).sum((1, 2, 3))
    mean: Floats = total / labels.counts.sum((1, 2, 3))
    return mean


def sampled_step(
    mdp: TabularMDP,
    policy: Floats,
    num_labels: int,
    rng: np.random.Generator,
    membership: Floats | None = None,
    repeats: int = 1,
) -> tuple[Step, Floats]:
    """`repeats` sampled iterations of one MDP (B = 1): (steps with leading size `repeats`, 𝔸̂ [repeats]).

    Half of the labels regress Q, the other half measures 𝔸̂ for the step size. Step.advantage is the exact 𝔸 of the
    sampled π⁺.
    """
    values = evaluate(mdp, policy)
    accepts = np.ones_like(values.v) if membership is None else membership
    weights = state_distribution(mdp, policy) * accepts
    half = num_labels // 2
    target, baseline = regress(draw_labels(mdp, policy, weights, half, rng, repeats), policy)
    others = draw_labels(mdp, policy, weights, num_labels - half, rng, repeats)
    estimate = estimate_advantage(others, target, policy, baseline)
    advantage, mass = mean_advantage(values, target, np.broadcast_to(weights, (repeats, *weights.shape[1:])))
    alpha = step_size(estimate, mdp, localised=membership is not None)
    new = mixture(policy, target, alpha, accepts)
    gain = evaluate(mdp, new).start - values.start
    return Step(policy=new, alpha=alpha, advantage=advantage, mass=mass, improvement=gain), estimate
