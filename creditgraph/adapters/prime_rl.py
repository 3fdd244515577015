"""Credit graphs in prime-rl: their advantages as an algorithm of its orchestrator, their objectives as its loss.

prime-rl takes the class of an algorithm from a table in its code, so a checkout of it gets two lines at the end of
`src/prime_rl/orchestrator/algo/__init__.py`; `type = "grpo"` then names the graph:

    from creditgraph.adapters.prime_rl import algorithm
    ALGORITHM_CLASSES["grpo"] = algorithm("gigpo", "advantage.omega=0.5")

The loss is chosen in the trainer's settings:

    [trainer.loss]
    type = "custom"
    import_path = "creditgraph.adapters.prime_rl.loss"
    kwargs = { graph = "p_trace" }

prime-rl calls an algorithm with one group of episodes at a time, and the loss with one sample, whose log-ratio is that
of trainer and inference. Run by hand with prime-rl 0.8.0 (commit 559b44772), which no package index has.
"""

from functools import cache
from typing import Any

import torch

from creditgraph.adapters.estimator import Loss
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.jagged import Jagged


def algorithm(graph: str, *overrides: str) -> type:
    """A subclass of prime-rl's `Algorithm` that assigns each sampled token the graph's advantage.

    A row is a trace; its turns are its sampled messages, in the order of its nodes, and the state of a turn is what was
    read since the one before. A reward of a trace belongs to its last turn.

    Args:
        graph, overrides: as of `CreditGraph`.
    """
    from prime_rl.orchestrator.algo.base import Algorithm, iter_trainable_traces
    from prime_rl.orchestrator.algo.routing import assign_advantages

    credit = CreditGraph(graph, *overrides)

    class GraphAlgorithm(Algorithm):  # type: ignore[misc]  # its base is Any without prime-rl
        async def score_group(self, episodes: list[Any]) -> None:
            traces = [trace for _, trace in iter_trainable_traces(episodes)]
            if not traces:
                return
            rollouts = rollouts_of(traces)
            advantages = credit(rollouts)
            for trace, row, sampled in zip(traces, advantages, rollouts.trained, strict=True):
                assign_advantages(trace, row[sampled].tolist())

    return GraphAlgorithm


def rollouts_of(traces: list[Any]) -> Rollouts:
    """Traces of one group as rows, in the order of their nodes."""
    rows = []
    for trace in traces:
        row: list[tuple[int, bool, float]] = []
        for node in trace.nodes:
            logprobs = iter(node.logprobs or ())
            for token, sampled in zip(node.token_ids, node.mask, strict=True):
                row.append((token, sampled, next(logprobs, torch.nan) if sampled else torch.nan))
            # Messages sampled one after the other, in two branches say, are two turns.
            row.append((0, False, torch.nan))
        rows.append(row)
    tokens, mask, logprobs = (
        Jagged.from_rows([[entry[i] for entry in row] for row in rows], kind).to_padded()
        for i, kind in enumerate((torch.int64, torch.bool, torch.float32))
    )
    return Rollouts(
        mask=mask,
        rewards=torch.tensor([trace.reward for trace in traces]),
        group=[0] * len(rows),
        tokens=tokens,
        logprobs=logprobs,
    )


@cache
def _loss(graph: str, overrides: tuple[str, ...]) -> Loss:
    return Loss(graph, *overrides)


def loss(inputs: Any, graph: str, overrides: tuple[str, ...] = ()) -> Any:
    """The sum of a sample's token losses, as prime-rl's `LossOutputs`; prime-rl divides by the tokens of the batch."""
    from prime_rl.trainer.rl.loss import LossOutputs

    rows = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    losses, metrics = _loss(graph, tuple(overrides))(*(row.unsqueeze(0) for row in rows))
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    return LossOutputs(loss=losses.sum(), metrics={name: torch.tensor(value) for name, value in metrics.items()})
