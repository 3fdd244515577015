"""Held-out episodes: how often the policy succeeds in an environment."""

import time
from dataclasses import dataclass, replace

import torch

from creditgraph.components.data.card import LOADING_METRICS
from creditgraph.components.evaluator.held_out import HeldOut, HeldOutSettings
from creditgraph.components.rollouts.episodes import EpisodePlayer, EpisodeSettings
from creditgraph.components.rollouts.requests import keyed_seeds, length_metrics
from creditgraph.components.rollouts.turn_rows import episode_returns
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import TrainReport


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Metrics of this evaluation; empty when this iteration does not evaluate."""

    report: TrainReport


class EpisodeAccuracy(EpisodePlayer, HeldOut):
    """Plays a greedy episode per held-out problem before training, every `every` iterations, and after training.

    Problems and random numbers are the same at every evaluation. An episode with a fault fails.
    """

    metrics = (
        Metric("accuracy", "share", "held-out episodes whose return is `threshold` or more"),
        Metric("return", "reward", "return of a held-out episode, mean, 0 for one with a fault"),
        Metric("faults", "episodes", "held-out episodes that a fault cut off"),
        Metric("problems", "problems", "held-out problems"),
        Metric("sampled_tokens", "tokens", "tokens of the responses, which are not training"),
        *LOADING_METRICS,
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(HeldOutSettings, EpisodeSettings):
        """When, on how many problems, and the limits of an episode."""

        threshold: float = 1.0
        """returns from here on are a success"""
        greedy: bool = True
        """whether the most probable token is taken; false samples at `temperature`"""

    config: Config

    def run(self, *, policy: Policy, environments: Environments) -> Outputs:
        """Evaluates when due."""
        if not self.due():
            return Outputs(report=TrainReport(metrics={}, seconds={}))
        start = time.perf_counter()
        settings = self.config
        sampling = settings.sampling()
        if settings.greedy:
            sampling = replace(sampling, temperature=0.0)
        table = self.table(self.prompts, policy, environments, sampling)
        seed = keyed_seeds(self.stream(), self.prompts.uid, 0, 1).reshape(-1)
        played = table.play(torch.arange(len(self.prompts)), seed)
        turns = played.turns
        value, first = episode_returns(turns)
        whole = first & torch.tensor([not fault for fault in turns.fault], dtype=torch.bool)
        sums = torch.stack(
            [
                (whole & (value >= settings.threshold - 1e-6)).sum().double(),
                value[whole].sum(),
                torch.tensor(len(self.prompts) - int(whole.sum())).double(),
            ]
        )
        right, returns, faults = (float(x) for x in self.context.all_sum(sums))
        count = max(self.count, 1)
        metrics = {"accuracy": right / count, "return": returns / count, "problems": float(self.count)}
        # Summed already, so no Count.
        metrics["faults"] = faults
        self.context.log(**metrics, sampled_tokens=length_metrics(played.trajectories)["sampled_tokens"])
        return Outputs(report=TrainReport(metrics=metrics, seconds={"evaluation": time.perf_counter() - start}))
