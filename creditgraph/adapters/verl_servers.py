"""verl's own workers, servers and reward function, for graphs that ask the policy.

Workers score texts in every trainer. Servers, which continue them, are awake when advantages are computed in one: that
of `trainer.v1.trainer_mode=separate_async`.
"""

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.estimator import Estimator
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rewards import HostRewards
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.payloads import Trajectories

COLUMNS = ("data_source", "reward_model", "extra_info")
"""of verl's data, which its reward functions read"""
AT_ONCE = 64
"""rows that each server is asked for at a time"""


def attach(estimator: Estimator, trainer: Any) -> None:
    """Gives a graph that asks the policy the trainer's workers or, where it continues responses, its servers.

    verl's rewards verify what is sampled, unless the settings choose others.

    Raises:
        ConfigError: the trainer's servers sleep, its temperature is another than that of a server of the user's, or its
            rewards are a model's.
    """
    credit, rollout = estimator.credit, trainer.config.actor_rollout_ref.rollout
    if credit.policy is not None:
        if isinstance(credit.policy, EndpointPolicy):
            credit.sampled_at(rollout.temperature)
        return
    if not credit.scores:
        return
    if not credit.samples:
        from creditgraph.adapters.verl_workers import VerlPolicy

        estimator.temperature = rollout.temperature
        credit.attach(VerlPolicy(trainer))
        return
    servers = getattr(trainer, "standalone_server_manager", None)
    if servers is None:
        raise ConfigError(
            f"graph '{credit.name}': it continues responses, but the servers of this trainer sleep when advantages are "
            "computed. Set trainer.v1.trainer_mode=separate_async, or name a server that has its weights by "
            "--endpoint=URL."
        )
    urls = [f"http://{address}/v1" for address in servers.server_addresses]
    sampling = {"top_p": rollout.top_p, "top_k": rollout.top_k}
    credit.attach(
        EndpointPolicy(urls, sampling=sampling, concurrency=AT_ONCE * len(urls)),
        VerlRewards(credit, trainer.config) if credit.takes_rewards else None,
        temperature=rollout.temperature,
        max_tokens=rollout.response_length,
    )


class VerlRewards(HostRewards):
    """verl's reward function; its rows are the columns that reward functions read."""

    def __init__(self, credit: CreditGraph, config: Any) -> None:
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        super().__init__(credit)
        if config.reward.reward_model.enable:
            raise ConfigError(
                f"graph '{credit.name}': verl's rewards are those of a model, which is not asked here. Name a verifier "
                "among the graph's settings, verifier.use=verifier.function for example."
            )
        self.compute_score = get_custom_reward_fn(config) or default_compute_score

    def rewards(self, rows: Sequence[Any], trajectories: Trajectories) -> list[float | None]:
        """See `HostRewards.rewards`."""
        calls = [
            {
                "data_source": row["data_source"],
                "solution_str": text,
                "ground_truth": row["reward_model"]["ground_truth"],
                "extra_info": dict(row["extra_info"] or {}),
            }
            for row, text in zip(rows, self.texts(trajectories), strict=True)
        ]
        return [score["score"] if isinstance(score, dict) else score for score in self._scores(calls)]

    def _scores(self, calls: list[dict[str, Any]]) -> list[Any]:
        if not inspect.iscoroutinefunction(self.compute_score):
            with ThreadPoolExecutor() as pool:
                return list(pool.map(lambda call: self.compute_score(**call), calls))

        async def scored() -> list[Any]:
            return await asyncio.gather(*(self.compute_score(**call) for call in calls))

        return asyncio.run(scored())
