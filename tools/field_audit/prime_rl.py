"""prime-rl: group algorithms that stamp advantages on traces, and per-sample losses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .entry import Config, Function, Table
from .source import Source

LOSS = "prime_rl.trainer.rl.loss"
ALGO = "prime_rl.orchestrator.algo"
table = Table(
    "prime_rl",
    "PrimeIntellect-ai/prime-rl",
    folder="src",
    left_out={
        "RAEAlgorithm": "its baseline is an average over past batches, so no batch alone says what is right",
        "ref_kl_loss_fn, ce_loss_fn": "distillation and fine-tuning; they read no advantages",
    },
)


def _traces(rewards: list[float], lengths: list[int]) -> list[Any]:
    made = []
    for reward, length in zip(rewards, lengths, strict=True):
        node = SimpleNamespace(mask=[True] * length, token_ids=[0] * length, advantages=None)
        made.append(
            SimpleNamespace(
                reward=reward,
                nodes=[node],
                has_error=False,
                agent=SimpleNamespace(trainable=True, name="solver"),
                num_output_tokens=length,
                num_total_tokens=length + 2,
                num_turns=1,
                id="trace",
            )
        )
    return made


def _algorithm(cls: str, label: str = "", **options: Any) -> None:
    @table.add(f"{ALGO}.{cls}", label=label)
    def make(found: Function) -> Function:
        def call(rewards: list[float], groups: list[int], lengths: list[int]) -> Any:
            out: list[Any] = [None] * len(rewards)
            for group in dict.fromkeys(groups):  # one call for each prompt, as the orchestrator does
                rows = [i for i, g in enumerate(groups) if g == group]
                traces = _traces([rewards[i] for i in rows], [lengths[i] for i in rows])
                algorithm = found(Config({"length_penalty": None, "episode_agents": [], **options}), None)
                episodes = [SimpleNamespace(traces=[trace], id=str(i)) for i, trace in enumerate(traces)]
                asyncio.run(algorithm.score_group(episodes))
                for i, trace in zip(rows, traces, strict=True):
                    out[i] = trace.nodes[0].advantages[0]
            return out

        return call


_algorithm("grpo:GRPOAlgorithm")
_algorithm("max_rl:MaxRLAlgorithm")
_algorithm("hierarchical_grpo:HierarchicalGRPOAlgorithm", "roles compared across the group")
_PENALTY = SimpleNamespace(num_output_tokens_weight=0.1, num_input_tokens_weight=0.0, num_turns_weight=0.0)
_algorithm("grpo:GRPOAlgorithm", "length_penalty 0.1", length_penalty=_PENALTY)


def _loss(name: str, **settings: float) -> None:
    @table.add(f"{LOSS}:compute_loss", loss=True, label=name, **settings)
    def make(found: Function, source: Source) -> Function:
        function = source.get(f"{LOSS}:{name}")

        def loss(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: Config) -> Any:
            rows = [list(x) for x in (logprobs, old, advantages, mask)]
            return found(
                trainer_logprobs=rows[0],
                inference_logprobs=rows[1],
                ref_logprobs=None,
                advantages=rows[2],
                loss_mask=rows[3],
                rl_weights=None,
                ce_weights=None,
                ref_kl_weights=None,
                rl_loss_fn=lambda inputs: function(inputs, options),
                rl_scale=int(mask.sum()),
                ce_scale=1,
                ref_kl_scale=1,
            )[0]

        def default(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            dppo_mask_low: float = 0.2,
            dppo_mask_high: float = 0.2,
            kl_tau: float = 1e-3,
            adv_tau: float = 1.0,
        ) -> Any:
            options = Config(
                dppo_mask_low=dppo_mask_low, dppo_mask_high=dppo_mask_high, kl_tau=kl_tau, adv_tau=adv_tau
            )
            return loss(logprobs, old_logprobs, advantages, mask, options)

        def ipo(
            logprobs: Tensor,
            old_logprobs: Tensor,
            advantages: Tensor,
            mask: Tensor,
            ipo_threshold: float = 0.1,
            kl_tau: float = 1e-3,
            adv_tau: float = 1.0,
        ) -> Any:
            options = Config(ipo_threshold=ipo_threshold, kl_tau=kl_tau, adv_tau=adv_tau)
            return loss(logprobs, old_logprobs, advantages, mask, options)

        return default if name == "default_loss_fn" else ipo


_loss("default_loss_fn")
_loss("ipo_loss_fn")
