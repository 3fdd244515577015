"""Credit graphs in prime-rl: their advantages as an algorithm of its orchestrator, their objectives as its loss.

prime-rl takes the class of an algorithm from a table in its code, so a checkout of it gets two lines at the end of
`src/prime_rl/orchestrator/algo/__init__.py`; `type = "grpo"` then names the graph, and so "hierarchical_grpo" can:

    from creditgraph.adapters.prime_rl import algorithm
    ALGORITHM_CLASSES["grpo"] = algorithm("gigpo", "advantage.omega=0.5")

The loss is chosen in the trainer's settings:

    [trainer.loss]
    type = "custom"
    import_path = "creditgraph.adapters.prime_rl.loss"
    kwargs = { graph = "p_trace" }

prime-rl calls an algorithm with one group of episodes at a time, and the loss with one sample, whose log-ratio is that
of trainer and inference. Graphs that ask a model ask prime-rl's inference servers. Run by hand with prime-rl 0.8.0
(commit 559b44772), which no package index has.
"""

import asyncio
import os
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.estimator import Loss, settings_of
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts, reference_answers
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged

AT_ONCE = 512
"""rows that the servers are asked for at a time"""


def algorithm(graph: str, *overrides: str) -> type:
    """A subclass of prime-rl's `Algorithm` that assigns each sampled token the graph's advantage.

    A row is a trace; its turns are its sampled messages, in the order of its nodes, and the state of a turn is what was
    read since the one before. A reward of a trace belongs to its last turn. In the place of "hierarchical_grpo" its
    groups are that algorithm's: traces of one agent, those of `episode_agents` within one episode.

    Args:
        graph, overrides: as of `CreditGraph`.
    """
    from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
    from prime_rl.orchestrator.algo.routing import assign_advantages

    credit = CreditGraph(graph, *overrides)
    credit.check_given(values=False, logprobs=True, policy=True, continues=True)
    of_pool = credit.scores and credit.policy is None
    one_at_a_time = asyncio.Lock()

    class GraphAlgorithm(Algorithm):  # type: ignore[misc]  # its base is Any without prime-rl
        def __init__(self, config: Any, policy_pool: Any) -> None:
            super().__init__(config, policy_pool)
            if getattr(config, "length_penalty", None) is not None:
                raise ConfigError(
                    f"graph '{credit.name}': its credit has no part for prime-rl's length_penalty; leave that out, or "
                    "make the length a part of the reward."
                )
            self.episode_agents = getattr(config, "episode_agents", None)
            if of_pool:
                server = policy_pool.train_client
                key = os.environ.get(server.api_key_var, "")
                self.server = EndpointPolicy(server.base_url, policy_pool.model_name, key=key, concurrency=AT_ONCE)
                credit.attach(self.server)

        async def score_group(self, episodes: list[Any]) -> None:
            found = list(iter_trainable_traces(episodes))
            if not found:
                return
            traces = [trace for _, trace in found]
            group: list[Hashable] = [0] * len(traces)
            if self.episode_agents is not None:
                names = [(episode.id, trace.agent.name) for episode, trace in found]
                group = [(name, episode if name in self.episode_agents else None) for episode, name in names]
            rollouts = rollouts_of(traces, group)
            if credit.scores and any(trace.num_branches > 1 for trace in traces):
                raise DataError(
                    f"graph '{credit.name}': it reads texts, and a trace has several branches, which are none in one "
                    "piece. Choose a graph that reads rewards alone."
                )
            if credit.scores and any(branch.mm_token_type_ids for trace in traces for branch in trace.branches):
                credit.refuse_images()
            async with one_at_a_time:
                if of_pool:  # another adapter has another name
                    self.server.model = self.policy_pool.model_name
                    credit.policy = self.server
                # Requests take long, and the orchestrator has more to do.
                advantages = await asyncio.to_thread(credit, rollouts)
            for trace, row, sampled in zip(traces, advantages, rollouts.trained, strict=True):
                assign_advantages(trace, row[sampled].tolist())

    return GraphAlgorithm


def rollouts_of(traces: list[Any], group: list[Hashable]) -> Rollouts:
    """Traces as rows, in the order of their nodes, from the first sampled token on."""
    rows: dict[str, list[list[Any]]] = {"tokens": [], "mask": [], "logprobs": [], "prompts": []}
    for trace in traces:
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for node in trace.nodes:
            # Messages that were sampled one after the other, in two branches say, are two turns.
            gap = mask[-1:] + node.mask[:1] == [True, True]
            known = iter(node.logprobs)
            tokens += [*[0] * gap, *node.token_ids]
            mask += [*[False] * gap, *node.mask]
            logprobs += [
                *[torch.nan] * gap,
                *(next(known, torch.nan) if sampled else torch.nan for sampled in node.mask),
            ]
        begin = mask.index(True)
        for name, row in (("tokens", tokens), ("mask", mask), ("logprobs", logprobs)):
            rows[name].append(row[begin:])
        rows["prompts"].append(tokens[:begin])
    return Rollouts(
        mask=Jagged.from_rows(rows["mask"], torch.bool).to_padded(),
        rewards=torch.tensor([trace.reward for trace in traces]),
        group=group,
        tokens=Jagged.from_rows(rows["tokens"], torch.int64).to_padded(),
        logprobs=Jagged.from_rows(rows["logprobs"], torch.float32).to_padded(),
        prompts=rows["prompts"],
        texts=[trace.task.data.prompt_text for trace in traces],
        answers=reference_answers(getattr(trace.task.data, "answer", None) for trace in traces),
    )


@cache
def _loss(graph: str, overrides: tuple[str, ...]) -> Loss:
    return Loss(graph, *overrides)


def loss(inputs: Any, graph: str, overrides: Sequence[str] | str = ()) -> Any:
    """The sum of a sample's token losses, as prime-rl's `LossOutputs`; prime-rl divides by the tokens of the batch."""
    from prime_rl.trainer.rl.loss import LossOutputs

    rows = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    losses, metrics = _loss(graph, settings_of(overrides))(*(row.unsqueeze(0) for row in rows))
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    return LossOutputs(loss=losses.sum(), metrics={name: torch.tensor(value) for name, value in metrics.items()})
