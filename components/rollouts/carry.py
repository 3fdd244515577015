"""Rollouts over several iterations: a request stops after some tokens, and goes on in the next iteration.

A node that carries runs its whole algorithm again in every iteration for the prompts that wait. Its requests are keyed
by the prompt alone, so those that have ended are answered from memory, those that were paused go on where they were,
and the algorithm is at the point where it was: after some waves, levels of a tree or resets. A prompt is delivered in
the iteration in which none of its requests is paused.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.rollouts.continuing import Begun, Continuing, rescored
from creditgraph.components.rollouts.requests import length_metrics
from creditgraph.pipeline.core.component import Component, Context, Count
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.streams import Stream

logger = logging.getLogger("creditgraph")

CARRY_METRICS = (
    Metric(
        "decode_steps", "steps", "most new tokens of a prompt's requests in turn: decoding steps if all prompts fit"
    ),
    Metric("delivered_prompts", "prompts", "prompts that are complete, which are trained on"),
    Metric("carried_prompts", "prompts", "prompts in flight, which continue in the next iteration"),
    Metric("carried_rollouts", "responses", "rollouts in flight that have not ended"),
    Metric("carried_tokens", "tokens", "tokens of prompts in flight, those of ended rollouts included"),
    Metric("token_staleness", "versions", "sampler's version minus that of the token, mean over delivered tokens"),
    Metric("rollout_staleness", "versions", "sampler's version minus that of the oldest token, mean over rows"),
    Metric("staleness_max", "versions", "largest `rollout_staleness` of a row"),
    Metric("dropped_prompts", "prompts", "prompts dropped because they were unfinished at `carry.max_staleness`"),
    Metric("dropped_tokens", "tokens", "tokens sampled for dropped prompts"),
    Metric("rescored_tokens", "tokens", "tokens of older weights scored again, with `carry.on_continue: rescore`"),
)


@dataclass(frozen=True, kw_only=True)
class Carry:
    """When a rollout waits for the next iteration, and when it is finished or dropped."""

    tokens: int = 0
    """new tokens of a rollout per iteration; one that needs more continues in the next. Requests that wait for others
    of their prompt (waves, levels of a tree) share them. 0 carries nothing"""
    max_staleness: int = 4
    """versions between the weights and the oldest token of a prompt, at which it is no longer carried"""
    on_stale: Literal["finish", "drop"] = "finish"
    """at that age, finish the prompt in this iteration, or drop it whole (which favours short responses)"""
    on_continue: Literal["keep", "rescore"] = "keep"
    """log-probs of tokens of older weights: keep those recorded, or score them again under the present weights"""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"expected carry.tokens ≥ 0 (0 carries nothing), got {self.tokens}.")
        if self.max_staleness < 1:
            raise ValueError(
                f"expected carry.max_staleness ≥ 1, got {self.max_staleness}. To carry nothing, set carry.tokens to 0."
            )


@dataclass(frozen=True, kw_only=True)
class CarrySettings:
    """The settings of a node that carries, to be inherited beside those of sampling."""

    carry: Carry = field(default_factory=Carry)
    """which rollouts wait for the next iteration"""


@dataclass(frozen=True, eq=False, kw_only=True)
class CarriedBatch:
    """What a node samples in one iteration.

    Attributes:
        prompts: those in flight, in the order in which they began, and the new ones.
        policy: to sample with.
        stream: keys of its requests.
        stale: int64, uids of prompts that may not be carried any further.
    """

    prompts: Prompts
    policy: Policy
    stream: Stream
    stale: Tensor

    @property
    def carries(self) -> bool:
        """Whether requests may be paused, or were in an earlier iteration."""
        return isinstance(self.policy, Continuing)

    def complete(self, prompt_uid: Tensor) -> Tensor:
        """bool [N]: rows of these prompts are complete so far; no request of their prompt is paused."""
        if not isinstance(self.policy, Continuing):
            return torch.ones_like(prompt_uid, dtype=torch.bool)
        return ~torch.isin(prompt_uid, self.policy.waiting)


class Carrier(Component):
    """Base of nodes that carry rollouts: `begin`, then the algorithm with `CarriedBatch`, then `end`.

    Its settings inherit `CarrySettings` and have `max_tokens`.
    """

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._prompts: Prompts | None = None
        self._begun: Begun | None = None

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

    @property
    def in_flight(self) -> Tensor:
        """int64: uids of the prompts that wait for the next iteration."""
        return torch.zeros(0, dtype=torch.int64) if self._prompts is None else self._prompts.uid

    def begin(self, prompts: Prompts, policy: Policy) -> CarriedBatch:
        """The prompts in flight and these, and a policy that remembers."""
        carry = self.config.carry
        nobody = torch.zeros(0, dtype=torch.int64)
        if not carry.tokens and self._begun is None:
            return CarriedBatch(prompts=prompts, policy=policy, stream=self.context.rng(), stale=nobody)
        if not policy.continues:
            raise CreditgraphError(
                f"node '{self.context.node}': carry.tokens is {carry.tokens}, but {type(policy).__name__} cannot "
                "continue a rollout of an earlier iteration. Use engine.local, engine.vllm or engine.sglang, or set "
                "carry.tokens to 0."
            )
        begun = Begun.blank(nobody, nobody) if self._begun is None else self._begun
        # One key for all iterations: a prompt's uid is its own, and its draws are the same whenever they are made.
        stream = Stream(self.context.seed, self.context.node, "carried")
        if self._prompts is not None:
            prompts = Prompts.concat([self._prompts, prompts])
        oldest = begun.token_versions.to(torch.int64)
        old = oldest.with_values((policy.version - oldest.values >= carry.max_staleness).to(torch.int64)).sum() > 0
        stale = torch.unique(begun.prompt_uid[old]) if carry.tokens else prompts.uid
        finish = stale if carry.on_stale == "finish" or not carry.tokens else nobody
        continuing = Continuing(policy, begun, carry.tokens, finish)
        return CarriedBatch(prompts=prompts, policy=continuing, stream=stream, stale=stale)

    def end(
        self, carried: CarriedBatch, rows: Trajectories, sampled: Trajectories | None = None
    ) -> tuple[Trajectories, Prompts]:
        """Keeps what waits; returns the complete rows and their prompts, and logs both.

        Args:
            carried: that of `begin`.
            rows: all rows of the algorithm, those of waiting prompts included.
            sampled: the rows that were sampled for them, if others.
        """
        policy = carried.policy
        sampled = rows if sampled is None else sampled
        if not isinstance(policy, Continuing):
            self.context.log(**length_metrics(sampled))
            return rows, carried.prompts
        done = carried.complete(carried.prompts.uid)
        dropped = ~done & torch.isin(carried.prompts.uid, carried.stale)
        self._log_dropped(carried.prompts.select(dropped), policy.begun)
        still = carried.prompts.select(~done & ~dropped)
        held = policy.begun.select(torch.isin(policy.begun.prompt_uid, still.uid))
        self._prompts = still if len(still) else None
        self._begun = held if len(still) else None
        rows = rows.select(carried.complete(rows.prompt_uid))
        rows = rows.replace(policy_version=_oldest(rows))
        if self.config.carry.on_continue == "rescore":
            rows, scored = rescored(rows, policy)
            self.context.log(rescored_tokens=Count(scored))
        self._log(carried, rows, sampled.select(carried.complete(sampled.prompt_uid)), held)
        return rows, carried.prompts.select(done)

    def _log_dropped(self, prompts: Prompts, begun: Begun) -> None:
        """Writes dropped prompts to rejected.jsonl, and counts them and their tokens."""
        total = 0
        for uid, text in zip(prompts.uid.tolist(), prompts.text, strict=True):
            tokens = int(begun.tokens.lengths[begun.prompt_uid == uid].sum())
            total += tokens
            self.context.reject(
                {"prompt_uid": uid, "prompt": text, "tokens": tokens},
                f"unfinished at carry.max_staleness {self.config.carry.max_staleness}; the prompt is dropped",
            )
        self.context.log(dropped_prompts=Count(len(prompts)), dropped_tokens=Count(total))

    def _log(self, carried: CarriedBatch, rows: Trajectories, sampled: Trajectories, held: Begun) -> None:
        policy = carried.policy
        assert isinstance(policy, Continuing)
        age = (policy.version - rows.versions_by_token().values).double()
        oldest = (policy.version - rows.policy_version).double()
        self.context.log(
            **length_metrics(sampled) | {"sampled_tokens": Count(policy.sampled)},
            decode_steps=float(policy.steps),
            delivered_prompts=Count(carried.complete(carried.prompts.uid).sum()),
            carried_prompts=Count(len(torch.unique(held.prompt_uid))),
            carried_rollouts=Count(held.paused.sum()),
            carried_tokens=Count(len(held.tokens.values)),
            token_staleness=float(age.mean()) if len(age) else 0.0,
            rollout_staleness=float(oldest.mean()) if len(oldest) else 0.0,
            staleness_max=float(oldest.max()) if len(oldest) else 0.0,
        )

    def state_dict(self) -> dict[str, Any]:
        """The prompts in flight."""
        if self._prompts is None:
            # Never empty, so that a replayed node gets its state back.
            return {"prompts_in_flight": 0} if self.config.carry.tokens else {}
        return {"prompts_in_flight": len(self._prompts), "prompts": self._prompts, "begun": self._begun}

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Deals out the prompts in flight, in the order in which they began, to another number of replicas."""
        held = [state for state in states if state.get("prompts_in_flight")]
        if len(states) == replicas or not held:
            return states[min(replica, len(states) - 1)]
        prompts = Prompts.concat([state["prompts"] for state in held])
        prompts = prompts.select(torch.argsort(prompts.uid)[replica::replicas])
        begun = Begun.concat([state["begun"] for state in held])
        begun = begun.select(torch.isin(begun.prompt_uid, prompts.uid))
        count = len(prompts)
        return {"prompts_in_flight": count, **({"prompts": prompts, "begun": begun} if count else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the prompts in flight; with carry off they are finished in the first iteration."""
        self._prompts = state.get("prompts")
        self._begun = state.get("begun")
        if self._prompts is not None and not self.config.carry.tokens:
            logger.warning(
                "node '%s': the checkpoint holds %d prompts in flight, but carry.tokens is 0; the next iteration "
                "finishes them.",
                self.context.node,
                len(self._prompts),
            )


def _oldest(rows: Trajectories) -> Tensor:
    """int64 [N]: version of each row's oldest token; `policy_version` for a row without tokens."""
    versions = rows.versions_by_token()
    oldest = rows.policy_version.clone()
    return oldest.scatter_reduce(0, versions.row_ids, versions.values.to(torch.int64), "amin")
