"""Credit graphs in slime, by its hooks; all settings stand in the file that `--custom-config-path` names:

    creditgraph: gigpo
    creditgraph_overrides: [advantage.omega=0.5]
    custom_reward_post_process_path: creditgraph.adapters.slime.credit
    custom_advantage_function_path: creditgraph.adapters.slime.advantages

The first hook sees the whole batch and credits it, the second runs on each rank and passes the rank's part on. A third
one is the graph's loss:

    loss_type: custom_loss
    custom_loss_function_path: creditgraph.adapters.slime.loss

slime passes token ids, loss masks and log-probs, no values. Graphs that ask a model ask slime's router, and what they
sample is rewarded by slime. Samples that share a `rollout_id` and a reward, as slime's
`TrajectoryManager` makes them of a history that was rewritten, are the steps of one response with that reward once;
with rewards of their own they are responses. Run by hand with slime at commit 624b824a8, which no
package index has.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.estimator import Loss, settings_of
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rewards import HostRewards
from creditgraph.adapters.rows import Rollouts, reference_answers
from creditgraph.pipeline.core.errors import ConfigError, DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories


@cache
def _graph(graph: str, *overrides: str) -> CreditGraph:
    credit = CreditGraph(graph, *overrides)
    credit.check_given(values=False, logprobs=True, policy=True, continues=True)
    return credit


@cache
def _loss(graph: str, *overrides: str) -> Loss:
    return Loss(graph, *overrides)


def _attach(credit: CreditGraph, args: Any, samples: list[Any]) -> None:
    """Gives a graph that asks a model slime's servers, and its rewards unless the settings choose a verifier."""
    if any(sample.multimodal_inputs for sample in samples):
        credit.refuse_images()
    if credit.policy is None:
        sampling = {"top_p": args.rollout_top_p, "top_k": args.rollout_top_k, "no_stop_trim": True}
        sampling |= {"stop": args.rollout_stop, "stop_token_ids": args.rollout_stop_token_ids}
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/v1"
        credit.attach(
            EndpointPolicy(url, "default", sampling=sampling, concurrency=args.sglang_server_concurrency),
            SlimeRewards(args, credit) if credit.takes_rewards else None,
            temperature=args.rollout_temperature,
            max_tokens=args.rollout_max_response_len,
        )
    if isinstance(credit.verifier, SlimeRewards):
        credit.verifier.keep([sample.group_index for sample in samples], samples)


class SlimeRewards(HostRewards):
    """slime's own rewards; its rows are samples."""

    def __init__(self, args: Any, credit: CreditGraph) -> None:
        super().__init__(credit)
        self.args = args
        if args.group_rm:
            raise ConfigError(
                f"graph '{credit.name}': with group_rm a reward is that of a whole group, and what the graph samples "
                "is in none. Name a verifier among its settings, verifier.use=verifier.function for example."
            )

    def rewards(self, rows: Sequence[Any], trajectories: Trajectories) -> list[float | None]:
        """See `HostRewards.rewards`."""
        from slime.rollout.rm_hub import async_rm
        from slime.utils.async_utils import run

        tokens = (trajectories.prompt_tokens.to_lists(), trajectories.response_tokens.to_lists())
        skip = self.args.rollout_skip_special_tokens
        copies = [
            replace(
                row,
                tokens=[*before, *ids],
                response=self.credit.tokenizer.decode(ids, skip_special_tokens=skip),
                response_length=len(ids),
                loss_mask=None,
                rollout_log_probs=None,
                reward=None,
            )
            for row, before, ids in zip(rows, *tokens, strict=True)
        ]

        async def rewarded() -> list[Any]:
            return await asyncio.gather(*(async_rm(self.args, copy) for copy in copies))

        for copy, reward in zip(copies, run(rewarded()), strict=True):
            copy.reward = reward
        return [copy.get_reward_value(self.args) for copy in copies]


def _chosen(args: Any) -> tuple[str, ...]:
    if not getattr(args, "creditgraph", None):
        raise ConfigError(
            "slime: no graph is chosen; put `creditgraph: grpo` or another graph into the file of --custom-config-path."
        )
    return args.creditgraph, *settings_of(getattr(args, "creditgraph_overrides", None))


def credit(args: Any, samples: list[Any]) -> tuple[list[Any], list[Tensor]]:
    """slime's rewards, and in place of its normalised rewards the advantages of each sample's response [tokens]."""
    raw = [sample.get_reward_value(args) for sample in samples]
    if any(sample.group_index is None for sample in samples):
        raise DataError("slime: a sample has no group_index, so what it is compared with is unknown; set it.")
    lengths = [sample.response_length for sample in samples]
    masks = [
        [0] * n if s.remove_sample else [1] * n if s.loss_mask is None else s.loss_mask
        for s, n in zip(samples, lengths, strict=True)
    ]
    begins = [len(sample.tokens) - n for sample, n in zip(samples, lengths, strict=True)]
    shared = [getattr(sample, "rollout_id", None) for sample in samples]
    siblings: dict[Any, set[Any]] = {}
    for rollout, reward in zip(shared, raw, strict=True):
        siblings.setdefault(rollout, set()).add(reward)
    alone = [rollout is None or len(siblings[rollout]) > 1 for rollout in shared]
    episode = [("sample", i) if alone[i] else rollout for i, rollout in enumerate(shared)]
    rewards = torch.tensor([torch.nan if reward is None else float(reward) for reward in raw])
    last = torch.tensor([one != other for one, other in pairwise([*episode, None])])
    graph = _graph(*_chosen(args))
    graph.check_loss(
        args.loss_type == "custom_loss",
        "Set loss_type: custom_loss and custom_loss_function_path: creditgraph.adapters.slime.loss.",
    )
    if graph.scores:
        _attach(graph, args, samples)
    known = [sample.rollout_log_probs for sample in samples]
    rollouts = Rollouts(
        mask=Jagged.from_rows(masks, torch.int64).to_padded(),
        rewards=rewards.where(last | rewards.isnan(), 0.0),
        group=[sample.group_index for sample in samples],
        episode=episode,
        tokens=Jagged.from_rows([s.tokens[b:] for s, b in zip(samples, begins, strict=True)], torch.int64).to_padded(),
        prompts=[s.tokens[:b] for s, b in zip(samples, begins, strict=True)],
        logprobs=None if None in known else Jagged.from_rows(known, torch.float32).to_padded(),
        answers=reference_answers(sample.label for sample in samples),
        temperature=args.rollout_temperature,
    )
    by_response = args.advantage_estimator == "gspo" and args.loss_type == "policy_loss"
    rows = graph(rollouts, by_response="advantage_estimator=gspo" if by_response else "")
    return raw, [row[:n] for row, n in zip(rows, lengths, strict=True)]


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Sets a rank's "advantages" and "returns" from what `credit` put in the place of rewards."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    rows = rollout_data["rewards"]
    if not all(isinstance(row, Tensor) for row in rows):
        raise ConfigError(
            "slime: the rewards are no advantages of tokens; set custom_reward_post_process_path: "
            "creditgraph.adapters.slime.credit in the file of --custom-config-path too."
        )
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    parts = [
        slice_log_prob_with_cp(row.to(kl.device), *both)
        for row, kl, both in zip(rows, rollout_data["kl"], lengths, strict=True)
    ]
    rollout_data["advantages"], rollout_data["returns"] = parts, parts


def loss(args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The graph's objective on a micro-batch, with slime's aggregation."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs

    extra = [name for name in ("use_kl_loss", "entropy_coef", "use_tis", "use_opsm") if getattr(args, name)]
    if args.context_parallel_size > 1:
        extra.append("context_parallel_size")
    if extra:
        raise ConfigError(f"slime: the loss of a graph has no part for {', '.join(extra)}; leave it off.")
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    new = Jagged.from_rows(found["log_probs"])
    given = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    old = Jagged.from_rows(given) if given else new.with_values(new.values.detach())
    rows = (new, old, Jagged.from_rows(batch["advantages"]), Jagged.from_rows(batch["loss_masks"]))
    padded, metrics = _loss(*_chosen(args))(*(row.to_padded() for row in rows))
    losses = padded[torch.arange(padded.shape[1], device=padded.device) < new.lengths.unsqueeze(1)]
    total = sum_of_sample_mean(losses)
    # slime adds up what it logs over micro-batches, as sums over samples.
    logged = {name: sum_of_sample_mean(torch.full_like(losses.detach(), value)) for name, value in metrics.items()}
    return total, {"loss": total.detach()} | logged
