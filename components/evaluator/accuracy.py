"""Accuracy on held-out problems: greedy, pass@k and mean@n."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from components.data.card import LOADING_METRICS
from components.evaluator.held_out import HeldOut, HeldOutSettings
from components.rollouts.requests import sample_groups
from pipeline.core.component import Count
from pipeline.core.handles import Policy, Sampling, Verifier
from pipeline.core.metric import Metric
from pipeline.core.payloads import Rewards, TrainReport


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
    several replicas each evaluates its share of the problems, and counts are summed.
    """

    paper = "2107.03374"
    metrics = (
        Metric("accuracy", "share", "held-out problems solved by greedy decoding"),
        Metric("problems", "problems", "held-out problems"),
        Metric("sampled_tokens", "tokens", "tokens of the responses, which are not training"),
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

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.samples < 0:
                raise ValueError(f"expected samples ≥ 0, got {self.samples}.")
            if self.samples and self.temperature == 0:
                raise ValueError(
                    f"expected temperature > 0 with samples {self.samples}, got 0, at which all samples are equal."
                )

    config: Config

    def run(self, *, policy: Policy, verifier: Verifier) -> Outputs:
        """Evaluates when due."""
        if not self.due():
            return Outputs(report=TrainReport(metrics={}, seconds={}))
        start = time.perf_counter()
        samples = self.config.samples
        sampling = self.config.sampling()
        self._sampled = 0
        greedy = self._verdicts(policy, verifier, dataclasses.replace(sampling, temperature=0.0), 1)
        num_correct = self.context.all_sum(greedy.correct.sum().double())
        metrics = {"accuracy": float(num_correct) / max(self.count, 1), "problems": float(self.count)}
        if samples:
            verdicts = self._verdicts(policy, verifier, sampling, samples)
            # How many problems have 0, 1 … `samples` correct responses, over all replicas.
            histogram = torch.bincount(verdicts.correct.view(-1, samples).sum(1), minlength=samples + 1)
            counts = torch.arange(samples + 1).repeat_interleave(self.context.all_sum(histogram))
            metrics |= sample_metrics(counts.tolist(), samples)
        self.context.log(**metrics, sampled_tokens=Count(self._sampled))
        return Outputs(report=TrainReport(metrics=metrics, seconds={"evaluation": time.perf_counter() - start}))

    def _verdicts(self, policy: Policy, verifier: Verifier, sampling: Sampling, samples: int) -> Rewards:
        responses = sample_groups(self.context, policy, self.prompts, samples, sampling, stream=self.stream())
        self._sampled += len(responses.response_tokens.values)
        return verifier.verify(self.prompts, responses)
