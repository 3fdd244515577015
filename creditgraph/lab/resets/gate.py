"""What decides whether resets pay, measured on sampled rollouts of a policy, before training.

Failures are reset to the true first error (the task's own where it has one, else what the recipe's localizer names),
to the localizer's step, to a uniform one, to the start, and to just after the error. Every number is a ratio of sums
over prompts; its standard error is the jackknife's, leaving out one prompt at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditgraph.components.expander.reset import reset_length
from creditgraph.components.localizer.base import Localizer
from creditgraph.components.rollouts.requests import keyed_seeds, sample_fresh, sample_from_prefix
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.rollouts.thoughts import has_oracle, num_thoughts, true_first_errors
from creditgraph.components.sampler.failures import Split, parse_split
from creditgraph.lab.bench.statistics import jackknife
from creditgraph.lab.resets.simulation import Chains, choose_rows
from creditgraph.pipeline.app.credit.sessions import samples_rollouts
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Policy, Sampling, Verifier
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Weights
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.core.streams import Stream, keys_within
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.session import GraphSession

Floats = NDArray[np.float64]
SPLITS = ("1x4", "2x4", "1x8")
TRUE, OWN, RANDOM, START, AFTER = "true first error", "localizer", "random step", "start", "after the error"
PER_PROMPT = 2  # failures of a prompt that are reset, the first ones
FEWEST_SUCCESSES = 20  # of the sampled responses: with fewer, a prediction is noise
RESAMPLES = 12  # of problems and of their responses, for the error that a prediction has from them


class Estimate(NamedTuple):
    """A number and its standard error; NaN where it is not defined."""

    value: float
    error: float


UNKNOWN = Estimate(math.nan, math.nan)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Resets to steps of a kind.

    Attributes:
        suffix_share: tokens of a suffix over those of a whole response.
        value: chance of a suffix to end correct.
        silent: number of suffixes → share of such groups whose outcomes agree.
        exact: share of failures that are reset to the true first error; NaN where it is not known.
    """

    suffix_share: Estimate
    value: Estimate
    silent: dict[int, Estimate]
    exact: Estimate


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What was measured.

    Attributes:
        problems, responses, failures: sampled prompts, responses to them, and failures that were reset.
        unverified: responses and suffixes that could not be verified, which count as wrong.
        truth: where the true first errors are from.
        start: chance of a response to be correct.
        silent: share of GRPO's groups whose outcomes agree.
        kinds: name → resets of this kind.
        over_start, over_random: V(x*)/V(start) and V(x*)/V(random reset) of the same failures.
        recovery: chance of a continuation of a prefix that holds the error to end correct.
        attempts: responses per prompt of each split until base group and failures are filled.
        group_size, max_attempts: of the recipe's sampler, or its defaults.
        chains: for the simulation.
        resampled: the same from problems and responses drawn with replacement.
    """

    problems: int
    responses: int
    failures: int
    unverified: int
    truth: str
    start: Estimate
    silent: Estimate
    kinds: dict[str, Kind]
    over_start: Estimate
    over_random: Estimate
    recovery: Estimate
    attempts: dict[str, Estimate]
    group_size: int
    max_attempts: int
    chains: Chains = field(repr=False)
    resampled: tuple[Chains, ...] = field(repr=False, default=())


def ratio(top: Any, bottom: Any) -> Estimate:
    """Σ top / Σ bottom over prompts, with the jackknife's standard error.

    >>> ratio([1.0, 1.0], [2.0, 2.0])
    Estimate(value=0.5, error=0.0)
    """
    a, b = np.asarray(top, np.float64), np.asarray(bottom, np.float64)

    def divided(x: float, y: float) -> float:
        return x / y if y > 0 else math.nan

    without = [divided(a.sum() - x, b.sum() - y) for x, y in zip(a, b, strict=True)]
    return Estimate(divided(float(a.sum()), float(b.sum())), jackknife(without))


def silence(correct: int, total: int, size: int) -> float:
    """Chance that `size` of `total` outcomes, drawn without replacement, agree (the unbiased estimate); NaN if fewer.

    >>> silence(1, 4, 2), silence(0, 4, 2)
    (0.5, 1.0)
    """
    if total < size:
        return math.nan
    return (math.comb(correct, size) + math.comb(total - correct, size)) / math.comb(total, size)


def success_by_step(error: NDArray[np.int64], steps: NDArray[np.int64], recovery: float) -> Floats:
    """Chance of each step to go right while all before it did, float64 [P, T]; 1 behind a problem's last step.

    A share `recovery` of the responses with an error ends correct, so that there are failures/(1 − recovery) of them.
    Each chance is drawn to the mean of its place with the weight of one response, because few reach late steps.

    Args:
        error: int64 [P, N], first error of each response from 1; 0 of a correct one.
        steps: int64 [P], number of steps of each problem.
        recovery: chance of a chain with an error to end correct.
    """
    place = np.arange(1, int(steps.max()) + 1)
    exists = place <= steps[:, None]
    wrong = (error[:, :, None] == place).sum(1) / (1 - min(recovery, 0.9))
    alive = np.maximum(error.shape[1] - (np.cumsum(wrong, 1) - wrong), 0.0)
    wrong = np.minimum(wrong, alive)
    reached = np.maximum((alive * exists).sum(0), 1e-9)
    typical = 1 - (wrong * exists).sum(0) / reached
    return np.where(exists, (alive - wrong + typical) / (alive + 1), 1.0)


def sampler_of(graph: Graph) -> Node:
    """The first node that samples rollouts, in thoughts; ConfigError when there is none."""
    for node in graph.nodes:
        if samples_rollouts(node) and hasattr(node.config, "sampling"):
            if node.config.mode == "plain":
                raise ConfigError(
                    f"node '{node.name}': samples whole responses, which have no steps to reset to; expected thoughts. "
                    f"Set {node.name}.mode=thought, or line."
                )
            return node
    raise ConfigError(f"no node of the graph ({', '.join(graph.names)}) says how its rollouts are sampled.")


def measure(experiment: Experiment, weights: Weights | None, prompts: int, samples: int, seed: int) -> Gate:
    """Samples, localises, resets and verifies.

    Args:
        experiment: the recipe, or that of a run.
        weights: the policy; None is the recipe's own model.
        prompts: problems, at most.
        samples: suffixes per failure and kind of reset, and fewest responses per problem.
        seed: key of every draw.

    Raises:
        ConfigError: responses without steps, or neither an oracle nor a localizer.
        DataError: no response failed.
    """
    node = sampler_of(experiment.graph)
    size = getattr(node.config, "group_size", 8)
    most = getattr(node.config, "max_attempts", 12)
    with GraphSession(experiment, seed=seed, weights=weights) as session:
        work = _Sampling(session, node.config.sampling(), prompts, samples, Stream("resets", seed))
        return work.gate(max(samples, most, size), size, most)


class _Sampling:
    """Policy, verifier and problems of a session, and what was sampled from them."""

    def __init__(self, session: GraphSession, sampling: Sampling, most: int, samples: int, stream: Stream) -> None:
        self.session = session
        self.sampling = sampling
        self.samples = samples
        self.stream = stream
        self.unverified = 0
        graph = session.graph
        self.policy: Policy = session.value(graph.outputs_of(Policy)[0], 0)
        self.verifier: Verifier = session.value(graph.outputs_of(Verifier)[0], 0)
        source = next(wire for wire in graph.outputs_of(Prompts) if not graph[wire.source].wires)
        parts: list[Prompts] = []
        seen: set[int] = set()
        while len(seen) < most:
            batch: Prompts = session.value(source, len(parts))
            new = [i for i, uid in enumerate(batch.uid.tolist()) if uid not in seen][: most - len(seen)]
            if not new:  # the data have no more
                break
            parts.append(batch.select(torch.tensor(new)))
            seen.update(parts[-1].uid.tolist())
        self.prompts = Prompts.concat(parts)
        self.localizer = next((n for n in graph.nodes if issubclass(n.cls, Localizer)), None)
        self.oracle = has_oracle(self.prompts)
        if not self.oracle and self.localizer is None:
            raise ConfigError(
                "the true first errors of this task are not known and the graph has no localizer; expected one of "
                "them. Take a recipe with a localizer, such as graph=srpo."
            )

    def gate(self, responses: int, size: int, most: int) -> Gate:
        """Everything, from `responses` per problem, for groups of `size` and at most `most` attempts."""
        count = len(self.prompts)
        rows = torch.arange(count).repeat_interleave(responses)
        seeds = keyed_seeds(self.stream, self.prompts.uid, 0, responses).reshape(-1)
        uid = torch.arange(len(rows))
        base = sample_fresh(self.policy, self.prompts, rows, seeds, self.sampling, uid)
        correct = self._correct(base).reshape(count, responses)
        right = correct.numpy()
        wrong = base.select((~correct.reshape(-1)).nonzero()[:, 0])
        if not len(wrong):
            raise DataError(
                f"all {len(base)} responses to {count} problems are correct, so there is nothing to reset. Take harder "
                "problems, or more of them with --prompts."
            )
        if int(right.sum()) < FEWEST_SUCCESSES:
            raise DataError(
                f"{int(right.sum())} of {len(base)} responses are correct; expected at least {FEWEST_SUCCESSES}, "
                "on which the chances of a step and of a suffix rest. Raise --prompts or --samples, or take easier "
                "problems."
            )
        error = self._errors(wrong)
        place = (~correct).cumsum(1)[~correct]  # of each failure among those of its problem, from 1
        chosen = (place <= PER_PROMPT).nonzero()[:, 0]
        failures, true = wrong.select(chosen), error[chosen]
        owner = self.prompts.index_of(failures.prompt_uid).numpy()
        splits = {text: parse_split(text, size) for text in SPLITS if _fits(text, size, most)}
        kinds, values = self._kinds(failures, true, owner, splits)
        hits, number = self._recovery(failures, true, owner)
        recovery = ratio(hits, number)
        errors = np.zeros((count, responses), np.int64)
        errors[~right] = error.numpy()
        steps = num_thoughts(base).reshape(count, responses).amax(1).numpy()
        draws = [np.arange(count), *self._resamples(count)]
        chances = [_share(hits[rows], number[rows]) for rows in draws]
        chains = [
            Chains(success=success_by_step(self._redrawn(errors[rows], i), steps[rows], chance), recovery=chance)
            for i, (rows, chance) in enumerate(zip(draws, chances, strict=True))
        ]
        silent = [silence(int(c), responses, size) for c in right.sum(1)]
        return Gate(
            problems=count,
            responses=len(base),
            failures=len(failures),
            unverified=self.unverified,
            truth="the task's own" if self.oracle else f"{self.localizer.use if self.localizer else ''}",
            start=ratio(right.sum(1), np.full(count, responses)),
            silent=ratio(silent, np.ones(count)),
            kinds=kinds,
            over_start=ratio(values[TRUE], values[START]),
            over_random=ratio(values[TRUE], values[RANDOM]),
            recovery=recovery,
            attempts={
                text: ratio(choose_rows(right[:, :most], split)[2], np.ones(count)) for text, split in splits.items()
            },
            group_size=size,
            max_attempts=most,
            chains=chains[0],
            resampled=tuple(chains[1:]),
        )

    def _resamples(self, count: int) -> list[NDArray[np.int64]]:
        """Rows of problems, drawn with replacement."""
        return [self.stream.generator(draw=f"problems {i}").integers(0, count, count) for i in range(1, RESAMPLES + 1)]

    def _redrawn(self, errors: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        """Responses of each problem drawn with replacement, int64 [P, N]; those that were sampled for number 0."""
        if not number:
            return errors
        columns = self.stream.generator(draw=f"responses {number}").integers(0, errors.shape[1], errors.shape)
        return np.take_along_axis(errors, columns, 1)

    def _correct(self, rows: Trajectories) -> Tensor:
        rewards = finite_rewards(self.verifier.verify(self.prompts, rows))
        self.unverified += int((~rewards.valid).sum())
        return rewards.correct & rewards.valid

    def _errors(self, failures: Trajectories) -> Tensor:
        """The true first error of each failure, int64 [N]."""
        if self.oracle:
            return true_first_errors(self.prompts, failures, self.policy.tokenizer)
        return self._localised(failures)

    def _localised(self, failures: Trajectories) -> Tensor:
        assert self.localizer is not None
        inputs = {"prompts": self.prompts, "failures": failures, "policy": self.policy}
        step: Tensor = self.session.runner(self.localizer).run(0, inputs)["errors"].step
        return step

    def _continue(self, failures: Trajectories, step: Tensor, draw: str) -> tuple[Tensor, Floats]:
        """Outcomes bool [N, samples] of the suffixes of each failure from a step on, and their mean tokens [N]."""
        rows = torch.arange(len(failures)).repeat_interleave(self.samples)
        length = reset_length(failures.thought_ends, step)[rows]
        # keys_within numbers the rows of a prompt, and so both its failures and their suffixes
        seeds = self.stream.seeds(keys_within(failures.prompt_uid[rows]), draw)
        parents, uid = failures.select(rows), torch.arange(len(rows))
        suffixes = sample_from_prefix(self.policy, parents, length, seeds, self.sampling, uid)
        tokens = (suffixes.response_tokens.lengths - suffixes.inherited).double().reshape(len(failures), -1).mean(1)
        return self._correct(suffixes).reshape(len(failures), -1), tokens.numpy()

    def _kinds(
        self, failures: Trajectories, true: Tensor, owner: NDArray[np.int64], splits: dict[str, Split]
    ) -> tuple[dict[str, Kind], dict[str, Floats]]:
        """Kinds of resets by name, and the summed value of each prompt's failures."""
        uniform = self.stream.integers(keys_within(failures.prompt_uid), 1, num_thoughts(failures) + 1, "uniform")
        steps = {TRUE: true, RANDOM: uniform, START: torch.ones_like(true)}
        if self.localizer is not None and self.oracle:
            steps[OWN] = self._localised(failures)
        count = len(self.prompts)
        number = np.bincount(owner, minlength=count)
        whole = np.bincount(owner, failures.response_tokens.lengths.numpy(), count)
        kinds: dict[str, Kind] = {}
        values: dict[str, Floats] = {}

        def summed(x: Any) -> Floats:
            return np.bincount(owner, np.asarray(x, np.float64), count).astype(np.float64)

        for name, step in steps.items():
            outcome, tokens = self._continue(failures, step, name)
            hits = outcome.sum(1).tolist()
            values[name] = summed(outcome.double().mean(1))
            kinds[name] = Kind(
                suffix_share=ratio(summed(tokens), whole),
                value=ratio(values[name], number),
                silent={
                    b: ratio(summed([silence(hit, self.samples, b) for hit in hits]), number)
                    for b in sorted({split.num_suffixes for split in splits.values()})
                },
                exact=ratio(summed((step == true).double()), number) if self.oracle else UNKNOWN,
            )
        return kinds, values

    def _recovery(self, failures: Trajectories, true: Tensor, owner: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """By problem, the summed value of prefixes up to the first error, the error included, and their number.

        Those that end there are left out.
        """
        inner = (true < num_thoughts(failures)).nonzero()[:, 0]
        count = len(self.prompts)
        if not len(inner):
            return np.zeros(count), np.zeros(count)
        outcome, _ = self._continue(failures.select(inner), true[inner] + 1, AFTER)
        rows = owner[inner.numpy()]
        hits = np.bincount(rows, outcome.double().mean(1).numpy(), count).astype(np.float64)
        return hits, np.bincount(rows, minlength=count).astype(np.float64)


def _share(hits: Floats, number: Floats) -> float:
    """Σ hits / Σ number, 0 without any."""
    return float(hits.sum() / number.sum()) if number.sum() else 0.0


def _fits(text: str, size: int, most: int) -> bool:
    failures, suffixes = (int(part) for part in text.split("x"))
    return failures * suffixes <= size and size - failures * suffixes + failures <= most
