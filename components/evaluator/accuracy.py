"""Accuracy on held-out problems: greedy, pass@k and mean@n."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from creditgraph.components.data.card import LOADING_METRICS
from creditgraph.components.evaluator.held_out import HeldOut, HeldOutSettings
from creditgraph.components.rollouts.requests import keyed_seeds, sample_groups
from creditgraph.components.rollouts.second_turn import retries
from creditgraph.pipeline.core.component import Count
from creditgraph.pipeline.core.handles import Policy, Sampling, Verifier
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Rewards, TrainReport, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Metrics of this evaluation; empty when this iteration does not evaluate."""

    report: TrainReport


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct, given num_correct of num_samples.

    1 − C(n − c, k) / C(n, k), as the product 1 − Π_{i=n−c+1}^{n} (1 − k/i), which overflows for no n. Source:
    2107.03374.

    >>> round(pass_at_k(4, 1, 2), 6)
    0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass_at_k: expected 1 ≤ k ≤ n and 0 ≤ c ≤ n, got n={num_samples}, c={num_correct}, k={k}.")
    if num_samples - num_correct < k:
        return 1.0
    missed = 1.0
    for i in range(num_samples - num_correct + 1, num_samples + 1):
        missed *= 1.0 - k / i
    return 1.0 - missed


def sample_metrics(correct_counts: Sequence[int], num_samples: int) -> dict[str, float]:
    """mean@n, and pass@k for k = 2, 4, 8 … up to n and for n itself, averaged over problems."""
    count = max(len(correct_counts), 1)
    powers = [2**i for i in range(1, num_samples.bit_length())]
    ks = sorted({k for k in (*powers, num_samples) if 1 < k <= num_samples})
    passes = {f"pass_at_{k}": sum(pass_at_k(num_samples, c, k) for c in correct_counts) / count for k in ks}
    return {f"mean_at_{num_samples}": sum(correct_counts) / (num_samples * count), **passes}


class Accuracy(HeldOut):
    """Evaluates the policy on fixed held-out problems before training, every `every` iterations, and after training.

    Problems and random numbers are the same at every evaluation, so two evaluations differ only by the policy. With
    several replicas each evaluates its share of the problems, and counts are summed. With `attempt: 2` the accuracy is
    that of self-correction (SCoRe, 2409.12917); one without room in the context is not correct.
    """

    paper = "2107.03374"
    metrics = (
        Metric("accuracy", "share", "held-out problems solved by greedy decoding, in the attempt that is judged"),
        Metric("problems", "problems", "held-out problems"),
        Metric("first_accuracy", "share", "with `attempt: 2`: problems solved in the first attempt"),
        Metric("turned_right", "share", "with `attempt: 2`: problems solved in the second attempt alone"),
        Metric("turned_wrong", "share", "with `attempt: 2`: problems solved in the first attempt alone"),
        Metric("sampled_tokens", "tokens", "tokens of the responses, which are not training"),
        Metric("prefill_tokens", "tokens", "tokens of the prompts, each once for all samples of it"),
        *LOADING_METRICS,
        Metric("mean_at_<n>", "share", "correct responses among n samples per problem"),
        Metric(
            "pass_at_<k>", "share", "unbiased estimate of the probability that at least one of k samples is correct"
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOutSettings):
        """When, on how many problems, and how samples for pass@k are drawn (the greedy pass uses temperature 0)."""

        samples: int = 0
        """further samples per problem for pass@k and mean@n; 0 gives greedy accuracy only"""
        attempt: int = 1
        """attempt that `accuracy` judges; 2 shows the first one as sampler.retry does, and asks again"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.samples < 0:
                raise ValueError(f"expected samples ≥ 0, got {self.samples}.")
            if self.samples and self.temperature == 0:
                raise ValueError(
                    f"expected temperature > 0 with samples {self.samples}, got 0, at which all samples are equal."
                )
            if self.attempt not in (1, 2):
                raise ValueError(f"attempt: expected 1 or 2, got {self.attempt}.")

    config: Config

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The first attempt, when the second is judged."""
        return int(config.attempt == 2)

    def run(self, *, policy: Policy, verifier: Verifier) -> Outputs:
        """Evaluates when due."""
        if not self.due():
            return Outputs(report=TrainReport(metrics={}, seconds={}))
        start = time.perf_counter()
        samples = self.config.samples
        sampling = self.config.sampling()
        self._sampled = self._prefilled = 0
        metrics = self._greedy(policy, verifier, dataclasses.replace(sampling, temperature=0.0))
        metrics["problems"] = float(self.count)
        if samples:
            verdicts = self._verdicts(verifier, self._sample(policy, sampling, samples))
            # How many problems have 0, 1 … `samples` correct responses, over all replicas.
            histogram = torch.bincount(verdicts.correct.view(-1, samples).sum(1), minlength=samples + 1)
            counts = torch.arange(samples + 1).repeat_interleave(self.context.all_sum(histogram))
            metrics |= sample_metrics(counts.tolist(), samples)
        self.context.log(**metrics, sampled_tokens=Count(self._sampled), prefill_tokens=Count(self._prefilled))
        return Outputs(report=TrainReport(metrics=metrics, seconds={"evaluation": time.perf_counter() - start}))

    def _greedy(self, policy: Policy, verifier: Verifier, sampling: Sampling) -> dict[str, float]:
        """Shares of the problems: accuracy, and what a second attempt changed."""
        firsts = self._sample(policy, sampling, 1)
        right = self._verdicts(verifier, firsts).correct
        counts = {"accuracy": right}
        if self.config.attempt == 2:
            seed = keyed_seeds(self.stream(), self.prompts.uid, 1, 1).reshape(-1)
            uid = self.context.uids(len(firsts))
            seconds = retries(policy, self.prompts, firsts, self.config.mode, seed, sampling, uid)
            later = self._verdicts(verifier, seconds).correct & (seconds.response_tokens.lengths > 0)
            counts = {
                "accuracy": later,
                "first_accuracy": right,
                "turned_right": later & ~right,
                "turned_wrong": right & ~later,
            }
        summed = self.context.all_sum(torch.stack([c.sum().double() for c in counts.values()]))
        return {name: float(c) / max(self.count, 1) for name, c in zip(counts, summed, strict=True)}

    def _sample(self, policy: Policy, sampling: Sampling, samples: int) -> Trajectories:
        return sample_groups(self.context, policy, self.prompts, samples, sampling, stream=self.stream())

    def _verdicts(self, verifier: Verifier, responses: Trajectories) -> Rewards:
        self._sampled += len(responses.response_tokens.values)
        self._prefilled += len(responses.prompt_tokens.values) * len(self.prompts) // max(len(responses), 1)
        return verifier.verify(self.prompts, responses)
