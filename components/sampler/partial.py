"""Partial rollouts: a rollout stops after some tokens and continues in the next iteration."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from components.rollouts.in_flight import InFlight, begin, continued, rescored
from components.rollouts.requests import LENGTH_METRICS, GroupSettings, keyed_seeds, length_metrics
from components.text.stops import decode_rows
from pipeline.core.component import Component, Context, Count
from pipeline.core.errors import CreditgraphError
from pipeline.core.handles import Policy
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Trajectories

logger = logging.getLogger("creditgraph")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The complete groups in the order in which they began, and their prompts; some began in earlier iterations."""

    trajectories: Trajectories
    prompts: Prompts


@dataclass(frozen=True, kw_only=True)
class Carry:
    """When a rollout waits for the next iteration, and when it is finished or dropped."""

    tokens: int = 0
    """new tokens of a rollout per iteration; one that needs more continues in the next. 0 carries nothing"""
    max_staleness: int = 4
    """versions between the weights and the oldest token of a rollout, at which it is no longer carried"""
    on_stale: Literal["finish", "drop"] = "finish"
    """at that age, finish the rollout in this iteration, or drop its whole group (which favours short responses)"""
    on_continue: Literal["keep", "rescore"] = "keep"
    """log-probs of tokens of older weights: keep those recorded, or score them again under the present weights"""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"expected carry.tokens ≥ 0 (0 carries nothing), got {self.tokens}.")
        if self.max_staleness < 1:
            raise ValueError(
                f"expected carry.max_staleness ≥ 1, got {self.max_staleness}. To carry nothing, set carry.tokens to 0."
            )


class Partial(Component):
    """Samples groups as sampler.chains does, but gives each rollout at most `carry.tokens` tokens per iteration.

    A group with an unfinished rollout waits with all its rollouts, and continues in the next iteration with the
    weights of that iteration. Every iteration begins the groups of all its prompts and returns the complete ones, so
    batches differ in size; their mean size is the batch of prompts. Wire every reader of `trajectories` to `prompts`
    of this node. Groups keep their uids, and rollouts their random streams: where a rollout was paused changes its
    tokens only through the weights. Groups in flight are part of the checkpoint. `token_versions` is the version that
    sampled each token, `policy_version` the oldest of a row. With `carry.tokens: 0` this is sampler.chains.
    """

    paper = "2501.12599"
    metrics = (
        *LENGTH_METRICS,
        Metric(
            "decode_steps", "steps", "most new tokens of a rollout: decoding steps when all rollouts fit the engine"
        ),
        Metric("delivered_groups", "groups", "complete groups, which are trained on"),
        Metric("carried_groups", "groups", "groups in flight, which continue in the next iteration"),
        Metric("carried_rollouts", "responses", "rollouts in flight that have not ended"),
        Metric("carried_tokens", "tokens", "tokens of groups in flight, those of ended rollouts included"),
        Metric("token_staleness", "versions", "sampler's version minus that of the token, mean over delivered tokens"),
        Metric("rollout_staleness", "versions", "sampler's version minus that of the oldest token, mean over rows"),
        Metric("staleness_max", "versions", "largest `rollout_staleness` of a row"),
        Metric("dropped_groups", "groups", "groups dropped because a rollout was unfinished at `carry.max_staleness`"),
        Metric("dropped_tokens", "tokens", "tokens sampled for dropped groups"),
        Metric("rescored_tokens", "tokens", "tokens of older weights scored again, with `carry.on_continue: rescore`"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(GroupSettings):
        """Sampling settings, the group size, and the long tail."""

        carry: Carry = field(default_factory=Carry)
        """which rollouts wait for the next iteration"""

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._flight: InFlight | None = None

    def setup(self, context: Context) -> None:
        """Warns of a limit that no rollout reaches."""
        super().setup(context)
        if self.config.carry.tokens >= self.config.max_tokens:
            logger.warning(
                "node '%s': carry.tokens (%d) is not below max_tokens (%d), so every rollout ends in its own iteration "
                "and nothing is carried.",
                context.node,
                self.config.carry.tokens,
                self.config.max_tokens,
            )

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Continues the groups in flight, begins those of `prompts`, and returns the complete ones."""
        size = self.config.group_size
        rows = torch.arange(len(prompts)).repeat_interleave(size)
        seed = keyed_seeds(self.context.rng(), prompts.uid, 0, size).reshape(-1)
        uid = self.context.uids(len(rows))
        flight = begin(prompts, rows, seed, uid, policy.version, self.config.temperature)
        carrying = self.config.carry.tokens > 0 or self._flight is not None
        if carrying and not policy.continues:
            raise CreditgraphError(
                f"node '{self.context.node}': carry.tokens is {self.config.carry.tokens}, but {type(policy).__name__} "
                "cannot continue a rollout of an earlier iteration. Use engine.local, engine.vllm or engine.sglang, or "
                "set carry.tokens to 0."
            )
        if self._flight is not None:
            flight = InFlight.concat([self._flight, flight])
        at_limit = self._at_limit(flight, policy.version)
        flight, steps = continued(flight, policy, self.config.sampling(), self._pause(at_limit) if carrying else None)
        waiting = flight.any_of_prompt(flight.unfinished)
        dropped = waiting & flight.any_of_prompt(at_limit)
        self._log_dropped(flight.select(dropped))
        complete = flight.select(~waiting)
        # A dropped group is neither complete nor carried.
        still = flight.select(waiting & ~dropped)
        self._flight = still if len(still.prompts) else None
        trajectories = (
            self._delivered(complete.rows, policy) if carrying else complete.rows.replace(token_versions=None)
        )
        self._log(trajectories, still, steps, policy.version)
        return Outputs(trajectories=trajectories, prompts=complete.prompts)

    def _at_limit(self, flight: InFlight, version: int) -> Tensor:
        """bool [N]: rollouts that may not be carried again, because they would be too old in the next iteration."""
        carry = self.config.carry
        return (version - flight.rows.policy_version >= carry.max_staleness) | (carry.tokens == 0)

    def _pause(self, at_limit: Tensor) -> Tensor:
        """int64 [N]: new tokens after which each rollout is paused."""
        carry = self.config.carry
        finish = at_limit & (carry.on_stale == "finish" or carry.tokens == 0)
        return torch.where(finish, self.config.max_tokens, carry.tokens)

    def _delivered(self, rows: Trajectories, policy: Policy) -> Trajectories:
        # Decoded as a whole: two decoded parts need not join to the decoding of their tokens.
        late = [i for i, text in enumerate(rows.text) if not text]
        tokens = rows.response_tokens.select(torch.tensor(late, dtype=torch.int64))
        text = list(rows.text)
        for i, whole in zip(late, decode_rows(policy.tokenizer, tokens.to_lists()), strict=True):
            text[i] = whole
        rows = rows.replace(text=text)
        if self.config.carry.on_continue == "rescore":
            rows, scored = rescored(rows, policy)
            self.context.log(rescored_tokens=Count(scored))
        return rows

    def _log_dropped(self, dropped: InFlight) -> None:
        """Writes dropped groups to rejected.jsonl, and counts them and their tokens."""
        for uid, text in zip(dropped.prompts.uid.tolist(), dropped.prompts.text, strict=True):
            tokens = int(dropped.rows.response_tokens.lengths[dropped.rows.prompt_uid == uid].sum())
            self.context.reject(
                {"prompt_uid": uid, "prompt": text, "tokens": tokens},
                f"unfinished at carry.max_staleness {self.config.carry.max_staleness}; the group is dropped",
            )
        self.context.log(
            dropped_groups=Count(len(dropped.prompts)),
            dropped_tokens=Count(len(dropped.rows.response_tokens.values)),
        )

    def _log(self, rows: Trajectories, still: InFlight, steps: Tensor, version: int) -> None:
        age = (version - rows.versions_by_token().values).double()
        oldest = (version - rows.policy_version).double()
        self.context.log(
            **length_metrics(rows) | {"sampled_tokens": Count(steps.sum())},
            decode_steps=float(steps.max()) if len(steps) else 0.0,
            delivered_groups=Count(len(torch.unique(rows.group))),
            carried_groups=Count(len(still.prompts)),
            carried_rollouts=Count(int(still.unfinished.sum())),
            carried_tokens=Count(len(still.rows.response_tokens.values)),
            token_staleness=float(age.mean()) if len(age) else 0.0,
            rollout_staleness=float(oldest.mean()) if len(oldest) else 0.0,
            staleness_max=float(oldest.max()) if len(oldest) else 0.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """The groups in flight."""
        if self._flight is None:
            # Never empty, so that a replayed node gets its state back.
            return {"groups": 0} if self.config.carry.tokens else {}
        return {"groups": len(self._flight.prompts), **vars(self._flight)}

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Deals out the groups in the order in which they began, when the number of replicas has changed."""
        held = [_flight_of(state) for state in states if state.get("groups")]
        if len(states) == replicas or not held:
            return states[min(replica, len(states) - 1)]
        whole = InFlight.concat(held).in_order()
        mine = whole.select(torch.arange(len(whole.prompts)) % replicas == replica)
        return {"groups": len(mine.prompts), **(vars(mine) if len(mine.prompts) else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the groups in flight; with carry off they are finished in the first iteration."""
        self._flight = _flight_of(state) if state.get("groups") else None
        if self._flight is not None and not self.config.carry.tokens:
            logger.warning(
                "node '%s': the checkpoint holds %d groups in flight, but carry.tokens is 0; the next iteration "
                "finishes them.",
                self.context.node,
                len(self._flight.prompts),
            )


def _flight_of(state: dict[str, Any]) -> InFlight:
    return InFlight(prompts=state["prompts"], rows=state["rows"], seed=state["seed"])
