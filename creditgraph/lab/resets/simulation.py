"""Training on chains of independent steps, in a table: the tokens that GRPO and resets need.

Every step of a problem goes right with a probability σ(θ) of its own. A chain without a wrong step ends correct; one
with a wrong step does so with the probability `recovery`, whatever it does afterwards. Trajectories are chosen, grouped
and credited as by `sampler.failures`, `expander.reset` and `advantage.group` (`std_exact`, mean over a row's trained
tokens), every thought is one token, and Adam makes one step per iteration over all problems. Every method has the
learning rate and the number of groups per step that are best for it: with those of one for all, whoever samples fewer
tokens per step looks cheaper.

What it leaves out: steps that problems share, decisions within a step, and anything that differs in cost but sampled
tokens. Its target is ours; docs/lab.md says how the numbers move with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from creditgraph.components.sampler.failures import Split, wave_sizes
from creditgraph.pipeline.core.streams import Stream

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
RATES = (0.2, 0.4, 0.8, 1.6)  # Adam's, in logits; at .2 a step of .3 needs some twenty updates to .95
GROUPS = (1, 2, 4)  # of each problem, whose gradients are averaged before a step
CLOSED = 0.6  # training ends when this share of the distance from the start value to 1 is gone
EASY = 0.995  # steps that go right more often are taken as certain
UPDATES = 300  # at most


@dataclass(frozen=True, eq=False, kw_only=True)
class Chains:
    """Problems of a policy.

    Attributes:
        success: float64 [P, T], chance of each step of each problem to go right while all before it did.
        recovery: chance of a chain with an error to end correct, in [0, 1).
    """

    success: Floats
    recovery: float

    def value(self) -> float:
        """Mean chance of a chain without error."""
        return float(self.success.prod(1).mean())


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to sample and group.

    Attributes:
        split: of the group between base and suffixes; None is GRPO.
        right: chance that the localised step is the true one, else a uniform wrong one; None draws it uniformly from
            all steps.
        group_size, max_attempts: as of `sampler.failures`.
        rate: of Adam, in logits.
        groups: of each problem per step.
    """

    split: Split | None = None
    right: float | None = 1.0
    group_size: int = 8
    max_attempts: int = 12
    rate: float = 0.2
    groups: int = 1


class Ratio(NamedTuple):
    """GRPO's tokens over a method's, with its standard error; 0 when the method never arrives."""

    value: float
    error: float


def relative_tokens(grpo: Floats, method: Floats) -> Ratio:
    """Median tokens of GRPO over those of a method, one entry per seed (inf: never); NaN when GRPO rarely arrives.

    The median, because a run in many may get stuck; its error is from the quartiles, as of a normal distribution.

    >>> relative_tokens(np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    Ratio(value=2.0, error=0.0)
    """
    middle, base = float(np.median(method)), float(np.median(grpo))
    if math.isinf(base):
        return Ratio(math.nan, math.nan)
    if math.isinf(middle):
        return Ratio(0.0, math.nan)
    value = base / middle
    return Ratio(value, value * math.hypot(_error_of_median(grpo) / base, _error_of_median(method) / middle))


def _error_of_median(values: Floats) -> float:
    low, high = (float(np.quantile(values, q, method="nearest")) for q in (0.25, 0.75))
    return 0.93 * (high - low) / math.sqrt(len(values))  # √(π/2) · (high − low)/1.349


def tuned(chains: Chains, method: Method, seeds: int = 32) -> Method:
    """The method with the rate and the groups per step that reach the target with the fewest tokens."""
    tried = [replace(method, rate=rate, groups=groups) for rate in RATES for groups in GROUPS]
    best, fewest = tried[0], math.inf
    for one in tried:
        tokens = float(tokens_to_target(chains, one, seeds, draw=1, most=fewest).mean())
        best, fewest = (one, tokens) if tokens < fewest else (best, fewest)
    return best


def tokens_to_target(chains: Chains, method: Method, seeds: int = 32, draw: int = 0, most: float = math.inf) -> Floats:
    """Sampled tokens, in thoughts, until the target is reached: float64 [seeds], inf where it is not.

    Args:
        chains, method: what is trained, and how.
        seeds: independent runs.
        draw: number of their random stream.
        most: mean tokens of all seeds from which on training is given up.
    """
    hard = chains.success < EASY
    width = max(int(hard.sum(1).max()), 1)
    # Hard steps first, in their order: padded with certain ones behind the end.
    order = np.argsort(~hard, axis=1, kind="stable")[:, :width]
    kept = np.take_along_axis(hard, order, 1)
    place = np.where(kept, order + 1, chains.success.shape[1] + 1)  # [P, K]
    start = np.clip(np.take_along_axis(chains.success, order, 1), 0.01, EASY)
    table = _Table(place, kept, chains.success.shape[1], chains.recovery, method)
    logit = np.repeat(np.log(start / (1 - start))[None], seeds, 0)  # [S, P, K]
    mean, square = np.zeros_like(logit), np.zeros_like(logit)
    spent, reached = np.zeros(seeds), np.full(seeds, np.inf)
    first = _value(logit, kept)
    target = first + CLOSED * (1 - first)
    rng = Stream("resets", draw).generator()
    for update in range(1, UPDATES + 1):
        chance = 1 / (1 + np.exp(-logit))
        parts = [table.gradient(chance, rng) for _ in range(method.groups)]
        gradient = sum(part for part, _ in parts) / method.groups
        spent += sum(tokens for _, tokens in parts)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        logit += method.rate * mean / (1 - 0.9**update) / (np.sqrt(square / (1 - 0.999**update)) + 1e-8)
        reached = np.where(np.isinf(reached) & (_value(logit, kept) >= target), spent, reached)
        if np.minimum(reached, spent).mean() >= most or np.isfinite(reached).all():
            break
    return reached


def _value(logit: Floats, kept: Bools) -> Floats:
    """Mean chance over problems of a chain without error, [S]."""
    value: Floats = np.where(kept, 1 / (1 + np.exp(-logit)), 1.0).prod(-1).mean(-1)
    return value


def advantages(reward: Bools, rows: Bools) -> Floats:
    """(r − mean)/std of the `rows` of the last axis; 0 elsewhere and where all of them agree.

    >>> advantages(np.array([True, False, True]), np.array([True, True, False])).tolist()
    [1.0, -1.0, 0.0]
    """
    count = np.maximum(rows.sum(-1, keepdims=True), 1)
    mean = (reward & rows).sum(-1, keepdims=True) / count
    spread = np.sqrt(mean * (1 - mean))
    scaled: Floats = np.where(rows & (spread > 0), (reward - mean) / np.where(spread > 0, spread, 1.0), 0.0)
    return scaled


@dataclass(frozen=True, eq=False)
class _Table:
    """The problems: place of each hard step [P, K], which of them exist, and the number of steps T."""

    place: NDArray[np.int64]
    kept: Bools
    steps: int
    recovery: float
    method: Method

    def gradient(self, chance: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Policy gradient of the logits [S, P, K] of one iteration, and its sampled tokens [S]."""
        chance = np.where(self.kept, chance, 1.0)
        split, size = self.method.split, self.method.group_size
        if split is None:
            right, reward = self._sample(chance, size, rng)
            gradient = self._credit(advantages(reward, np.ones_like(reward)) / self.steps, right, chance)
            return gradient / size, np.full(len(chance), float(size * self.steps * chance.shape[1]))
        most = self.method.max_attempts
        right, reward = self._sample(chance, most + size - split.base, rng)
        chosen, found, attempts = choose_rows(reward[..., :most], split)
        later = np.ones((*found.shape, size - split.base), bool)
        first = np.arange(most) < split.base
        base = np.concatenate([np.where(found[..., None], chosen, first), np.where(found[..., None], False, later)], -1)
        gradient = self._credit(advantages(reward, base) / self.steps, right, chance)
        tokens = np.where(found, attempts, most + size - split.base) * float(self.steps)
        failed = np.cumsum(~reward[..., :most], -1)
        for number in range(1, split.num_failures + 1):
            row = (failed >= number).argmax(-1)[..., None, None]
            parent = np.take_along_axis(right, row, 2)[:, :, 0]  # [S, P, K]
            added, length = self._suffixes(parent, chance, rng)
            gradient += np.where(found[..., None], added, 0.0)
            tokens += found * length * split.num_suffixes
        return gradient / size, tokens.sum(1)

    def _suffixes(self, parent: Bools, chance: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Gradient of the suffixes of a failure [S, P, K], and their length [S, P]."""
        assert self.method.split is not None
        error = np.where(parent, self.steps, self.place).min(-1)  # [S, P]
        step = self._localise(error, rng)
        length = (self.steps - step + 1).astype(np.float64)
        own = self.place >= step[..., None]  # [S, P, K]
        fresh = rng.random((*parent.shape[:2], self.method.split.num_suffixes, parent.shape[2])) < chance[:, :, None]
        right = np.where(own[:, :, None], fresh, parent[:, :, None])
        reward = self._outcome(right, rng)
        credit = advantages(reward, np.ones_like(reward)) / length[..., None]
        return self._credit(credit, right, chance) * own, length

    def _localise(self, error: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """Step to reset to, from 1, for each true one [S, P]."""
        if self.method.right is None:
            return rng.integers(1, self.steps + 1, error.shape)
        if self.steps == 1:
            return error
        wrong = rng.integers(1, self.steps, error.shape)
        step: NDArray[np.int64] = np.where(rng.random(error.shape) < self.method.right, error, wrong + (wrong >= error))
        return step

    def _sample(self, chance: Floats, rows: int, rng: np.random.Generator) -> tuple[Bools, Bools]:
        right = rng.random((*chance.shape[:2], rows, chance.shape[2])) < chance[:, :, None]
        return right, self._outcome(right, rng)

    def _outcome(self, right: Bools, rng: np.random.Generator) -> Bools:
        reward: Bools = right.all(-1) | (rng.random(right.shape[:3]) < self.recovery)
        return reward

    def _credit(self, credit: Floats, right: Bools, chance: Floats) -> Floats:
        """Σ over rows of credit [S, P, N] times ∂ log π/∂θ of each step."""
        gradient: Floats = np.einsum("spn,spnk->spk", credit, right - chance[:, :, None])
        return gradient


def choose_rows(reward: Bools, split: Split) -> tuple[Bools, Bools, NDArray[np.int64]]:
    """Base group, whether there are enough failures, and attempts, as `sampler.failures` does for responses in order.

    Args:
        reward: bool [..., N], whether each of the most attempts is correct.
        split: of the group.

    Returns:
        bool [..., N] base rows (of prompts with enough failures), bool [...], and int64 [...] attempts, N where a
        prompt falls back.
    """
    most = reward.shape[-1]
    failed = ~reward & (np.cumsum(~reward, -1) <= split.num_failures)
    others = np.cumsum(~failed, -1)
    enough = (np.cumsum(failed, -1) >= split.num_failures) & (others >= split.base)
    attempts = np.full(reward.shape[:-1], most)
    for end in reversed(np.cumsum(wave_sizes(split.fewest, most)).tolist()):
        attempts = np.where(enough[..., end - 1], end, attempts)
    return ~failed & (others <= split.base), enough[..., -1], attempts
