"""verl's own servers and reward function, for graphs that ask the policy.

Of verl's trainers one has servers that are awake when advantages are computed: that of
`trainer.v1.trainer_mode=separate_async`.
"""

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import place_of, verdicts
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

COLUMNS = ("data_source", "reward_model", "extra_info")
"""of verl's data, which its reward functions read"""
AT_ONCE = 64
"""rows that each server is asked for at a time"""


def attach(credit: CreditGraph, trainer: Any) -> None:
    """Gives a graph that asks the policy the trainer's servers, and verl's rewards unless the settings choose others.

    Raises:
        ConfigError: the trainer's servers sleep, its temperature is another than theirs, or its rewards are a model's.
    """
    if not credit.scores or credit.policy is not None:
        return
    servers = getattr(trainer, "standalone_server_manager", None)
    if servers is None:
        raise ConfigError(
            f"graph '{credit.name}': it asks the policy, but the servers of this trainer sleep when advantages are "
            "computed. Set trainer.v1.trainer_mode=separate_async, or name a server that has its weights by "
            "--endpoint=URL."
        )
    rollout = trainer.config.actor_rollout_ref.rollout
    if rollout.temperature != 1 and not credit.samples:
        raise ConfigError(
            f"graph '{credit.name}': servers give log-probs at temperature 1, but verl samples at "
            f"{rollout.temperature:g}. Set actor_rollout_ref.rollout.temperature=1."
        )
    urls = [f"http://{address}/v1" for address in servers.server_addresses]
    sampling = {"top_p": rollout.top_p, "top_k": rollout.top_k}
    own = credit.chooses_verifier or not credit.samples
    credit.attach(
        EndpointPolicy(urls, sampling=sampling, concurrency=AT_ONCE * len(urls)),
        None if own else VerlRewards(credit, trainer.config),
        temperature=rollout.temperature,
        max_tokens=rollout.response_length,
    )


class VerlRewards(Verifier):
    """verl's reward function, on texts that continue its responses.

    Attributes:
        rows: of each prompt, whose place ends its uid, the columns that reward functions read.
    """

    rows: Sequence[Mapping[str, Any]] = ()

    def __init__(self, credit: CreditGraph, config: Any) -> None:
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        self.credit = credit
        if config.reward.reward_model.enable:
            raise ConfigError(
                f"graph '{credit.name}': verl's rewards are those of a model, which is not asked here. Name a verifier "
                "among the graph's settings, verifier.use=verifier.function for example."
            )
        self.compute_score = get_custom_reward_fn(config) or default_compute_score

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory; invalid where it is no finite number."""
        texts = self.credit.tokenizer.batch_decode(trajectories.response_tokens.to_lists(), skip_special_tokens=True)
        rows = [self.rows[place] for place in place_of(trajectories.prompt_uid).tolist()]
        calls = [
            {
                "data_source": row["data_source"],
                "solution_str": text,
                "ground_truth": row["reward_model"]["ground_truth"],
                "extra_info": dict(row["extra_info"] or {}),
            }
            for row, text in zip(rows, texts, strict=True)
        ]
        found = [score["score"] if isinstance(score, dict) else score for score in self._scores(calls)]
        return verdicts(trajectories.uid, found, self.credit.right_above, "verl's reward is not a finite number")

    def _scores(self, calls: list[dict[str, Any]]) -> list[Any]:
        if not inspect.iscoroutinefunction(self.compute_score):
            with ThreadPoolExecutor() as pool:
                return list(pool.map(lambda call: self.compute_score(**call), calls))

        async def scored() -> list[Any]:
            return await asyncio.gather(*(self.compute_score(**call) for call in calls))

        return asyncio.run(scored())
