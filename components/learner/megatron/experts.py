"""Mixtures of experts: settings of megatron-core's expert layers, names of their weights, ranks that share them.

Attention is sharded over tensor x context x data parallel ranks, the experts over the same ranks of a pipeline stage:
each of `expert_parallel` neighbours holds whole experts, and tokens travel to the experts they are routed to. So
experts may be spread over the ranks of one replica, over several replicas, or both.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

# Without TransformerEngine megatron-core 0.16 reads this name all the same, and does not define it.
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None

# Of SequentialMLP, and of TransformerEngine's grouped experts.
_LOCAL = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12]\.weight)(\d+)$")


def has_experts(config: Any) -> bool:
    """Whether a transformers configuration has layers with experts."""
    return bool(getattr(config, "num_experts", 0)) and any(expert_layers(config))


def expert_layers(config: Any) -> list[int]:
    """1 for each layer with experts, 0 for a dense one."""
    dense = set(config.mlp_only_layers)
    return [
        int(layer not in dense and (layer + 1) % config.decoder_sparse_step == 0)
        for layer in range(config.num_hidden_layers)
    ]


def expert_settings(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig: the router of transformers' Qwen3-MoE, no token dropped, no balancing loss."""
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": expert_layers(config),
        "moe_router_topk": config.num_experts_per_tok,
        # Softmax over the chosen experts is softmax over all, normalised among the chosen.
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_score_function": "softmax",
        # In bfloat16 near experts would change places between two passes.
        "moe_router_dtype": "fp32",
        # With policy gradients a balancing loss is a second objective; megatron-core's own is off.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "qk_layernorm": True,
    }


# --- names ---


def local_expert(name: str) -> tuple[str, int] | None:
    """Of the weight of an expert, its name without the number ("….mlp.experts.linear_fc1.weight") and its place here.

    >>> local_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight")
    ('decoder.layers.0.mlp.experts.linear_fc1.weight', 3)
    >>> local_expert("decoder.layers.0.mlp.experts.linear_fc2.weight7")
    ('decoder.layers.0.mlp.experts.linear_fc2.weight', 7)
    >>> local_expert("decoder.layers.0.mlp.router.weight") is None
    True
    """
    found = _LOCAL.match(name)
    if found:
        return f"{found[1]}.{found[3]}", int(found[2])
    found = _GROUPED.match(name)
    return (f"{found[1]}.{found[2]}", int(found[3])) if found else None


# --- router replay ---


class Replay:
    """Chooses given experts in the place of a router; megatron-core calls it where a router has a `router_replay`.

    megatron-core's own class tells forward from recomputing passes by a state of the process, which a pipeline, whose
    passes alternate, would have to switch at each of them. Here a pass for which nothing was given is recomputed, and
    micro-batches are in their order.
    """

    def __init__(self) -> None:
        self._given: list[Tensor | None] = []
        self._again: deque[Tensor | None] = deque()

    def give(self, experts: Tensor | None, recomputed: bool) -> None:
        """The experts [tokens, experts per token] of the next pass, −1 where the router chooses.

        `recomputed`: whether another pass of it follows in the backward pass.
        """
        self._given = [experts]
        if recomputed:
            self._again.append(experts)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers of the chosen experts, both [tokens, topk]; called by megatron-core."""
        experts = self._given.pop() if self._given else self._again.popleft()
        values, chosen = default(scores, topk, num_groups, group_topk)
        if experts is None:
            return values, chosen
        chosen = torch.where(experts < 0, chosen, experts.to(chosen.dtype))
        return scores.gather(1, chosen), chosen


def attach_replays(chunk: Any) -> dict[int, Replay]:
    """A `Replay` for each router of a model chunk, by the number of its layer from 0."""
    replays = {}
    for layer in chunk.decoder.layers:
        if hasattr(layer.mlp, "router"):
            replays[layer.layer_number - 1] = layer.mlp.router.router_replay = Replay()
    return replays


# --- ranks ---


@contextmanager
def neighbouring_replicas(replica_ranks: int) -> Iterator[None]:
    """While megatron-core makes groups in its order tp-cp-ep-dp-pp, ranks of a replica are neighbours all the same.

    In that order alone it can spread experts over more ranks than tensor x context parallel; but there a pipeline's
    stages are the outermost, and a replica's ranks far apart.

    Args:
        replica_ranks: ranks of one stage of one replica, tensor x context parallel.
    """
    own = parallel_state.RankGenerator

    class Neighbours(own):  # type: ignore[misc, valid-type]
        def get_ranks(self, token: str) -> list[list[int]]:
            width = self.world_size // self.pp

            def place(rank: int) -> int:
                stage, in_stage = divmod(rank, width)
                replica, inside = divmod(in_stage, replica_ranks)
                return int((replica * self.pp + stage) * replica_ranks + inside)

            return [[place(rank) for rank in group] for group in super().get_ranks(token)]

    parallel_state.RankGenerator = Neighbours
    try:
        yield
    finally:
        parallel_state.RankGenerator = own


def most_of_sharing(count: int, device: str) -> int:
    """The largest count among replicas that share experts: all of them must make as many passes."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1:
        return count
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def of_all_experts(shard: Tensor) -> list[Tensor]:
    """The shards of an expert's weight of all expert-parallel ranks, in the order of the experts."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return shards
