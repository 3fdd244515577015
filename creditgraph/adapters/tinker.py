"""Credit graphs in Tinker's cookbook, whose training loop takes no functions of others. In the script that starts it:

    from creditgraph.adapters.tinker import register

    register("gigpo", "advantage.omega=0.5")
    asyncio.run(tinker_cookbook.rl.train.main(config))

The cookbook gives every token of a trajectory one number, its reward minus the mean of its group. A graph gets each
action as a step of an episode: its tokens, its reward, and what the policy read before it.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tinker import Datum, EncodedTextChunk, ModelInput, TensorData, TrainingClient
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, TrajectoryGroup
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from creditgraph.adapters.estimator import Loss, check_version
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged

TESTED = ("0.5", "0.6")
FIELDS = ("logprobs", "advantages", "mask")
# The cookbook's own, so that another graph can be registered in the same process.
ASSEMBLE, PREPARE, REMOVE_MASK = train.assemble_training_data, train.prepare_minibatch, train._remove_mask
FORWARD_BACKWARD = TrainingClient.forward_backward


def register(graph: str, *overrides: str, objective: bool = False) -> None:
    """Puts the advantages of a graph in the place of the cookbook's; its KL penalty is added to them as to its own.

    Args:
        graph, overrides: as of `CreditGraph`.
        objective: take the graph's loss too, in the place of `loss_fn`: the sum over tokens, as Tinker's losses are.
            It costs one more forward pass, because Tinker sends log-probs to the loss and gradients back.

    Raises:
        ConfigError: the graph cannot run here.
    """
    check_version("tinker-cookbook", TESTED)
    credit = CreditGraph(graph, *overrides)
    credit.check_given(values=False)
    credit.check_loss(objective, "Pass objective=True.")
    if objective:
        loss = Loss(graph, *overrides)
        loss.settings  # noqa: B018 - one that cannot run here is refused now

    latest: list[Any] = []

    def assemble_training_data(groups: list[TrajectoryGroup], *rest: Any, **given: Any) -> tuple[list[Datum], Any]:
        data, metadata = ASSEMBLE(groups, *rest, **given)
        rollouts = rollouts_of(groups)
        advantages = credit(rollouts, record=False)
        latest[:] = rollouts, advantages
        fill(data, advantages[rollouts.trained])
        return data, metadata

    async def prepare_minibatch(*given: Any, **named: Any) -> tuple[Any, ...]:
        data, metrics, *rest = await PREPARE(*given, **named)
        credit.record(*latest)  # the minibatch; what came before it was printed
        return data, metrics | {f"credit/{name}": value for name, value in credit.metrics.items()}, *rest

    train.assemble_training_data, train.prepare_minibatch = assemble_training_data, prepare_minibatch
    train._remove_mask = (lambda datum: datum) if objective else REMOVE_MASK  # a loss needs the mask
    TrainingClient.forward_backward = _by(loss) if objective else FORWARD_BACKWARD


def rollouts_of(groups: Sequence[TrajectoryGroup]) -> Rollouts:
    """One row per action, in the order of the cookbook's data; the reward of a group belongs to its last actions.

    An action that the cookbook masks, because it could not be parsed, is not trained on; its reward counts.
    """
    mask, rewards, tokens, logprobs, prompts, group, episode = [], [], [], [], [], [], []
    for g, members in enumerate(groups):
        for e, (trajectory, final) in enumerate(zip(members.trajectories_G, members.final_rewards_G, strict=True)):
            for step in trajectory.transitions:
                trained = [not step.metrics.get(PARSE_ERROR_MASKED_METRIC_KEY)] * len(step.ac.tokens)
                prompts.append(_ids(step.ob))
                # The first token of a datum is no target.
                mask.append(trained if step.ob.length else [False, *trained[1:]][: len(trained)])
                tokens.append(step.ac.tokens)
                logprobs.append(step.ac.logprobs)
                rewards.append(step.reward + (final if step is trajectory.transitions[-1] else 0.0))
                group.append(g)
                episode.append((g, e))
    return Rollouts(
        mask=Jagged.from_rows(mask, torch.bool).to_padded(),
        rewards=torch.tensor(rewards),
        group=group,
        episode=episode,
        tokens=Jagged.from_rows(tokens, torch.int64).to_padded(),
        logprobs=Jagged.from_rows(logprobs, torch.float32).to_padded(),
        prompts=prompts,
    )


def _ids(read: ModelInput) -> list[int]:
    """Token ids; of an image or another chunk a number that tells it from others."""
    texts = [c.tokens if isinstance(c, EncodedTextChunk) else [zlib.crc32(repr(c).encode()) >> 1] for c in read.chunks]
    return [token for tokens in texts for token in tokens]


def fill(data: Sequence[Datum], advantages: Tensor) -> None:
    """Writes advantages [number of trained tokens] where the masks of the data are not 0, one after the other."""
    masks = [datum.loss_fn_inputs["mask"].to_torch() != 0 for datum in data]
    counts = [int(mask.sum()) for mask in masks]
    if sum(counts) != len(advantages):
        raise DataError(
            f"creditgraph.adapters.tinker: the cookbook trains on {sum(counts)} tokens, but the actions of its "
            f"trajectories have {len(advantages)}; it is not a version that this adapter was tested with."
        )
    for datum, mask, values in zip(data, masks, torch.split(advantages, counts), strict=True):
        row = torch.zeros(len(mask))
        row[mask] = values
        datum.loss_fn_inputs["advantages"] = TensorData.from_torch(row)


def _by(loss: Loss) -> Callable[..., Any]:
    """Tinker's request for gradients, of a loss that is computed here."""

    def forward_backward(self: TrainingClient, data: list[Datum], loss_fn: Any, loss_fn_config: Any = None) -> Any:
        if loss_fn == "cross_entropy":  # of supervised training, and by which Tinker applies the gradients
            return FORWARD_BACKWARD(self, data, loss_fn, loss_fn_config)
        fields = [[datum.loss_fn_inputs[name].to_torch().float() for datum in data] for name in FIELDS]
        old, advantages, mask = (pad_sequence(rows, batch_first=True) for rows in fields)

        def losses(_: Sequence[Datum], logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
            of_tokens, metrics = loss(pad_sequence(list(logprobs), batch_first=True), old, advantages, mask)
            return of_tokens.sum(), metrics

        targets = [{"target_tokens": datum.loss_fn_inputs["target_tokens"]} for datum in data]
        sent = [Datum(model_input=d.model_input, loss_fn_inputs=t) for d, t in zip(data, targets, strict=True)]
        return self.forward_backward_custom(sent, losses)

    return forward_backward
