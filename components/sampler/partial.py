"""Groups that may take several iterations: a rollout stops after some tokens and goes on in the next iteration (partial rollouts)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from components.rollouts.in_flight import InFlight, begin, grown, rescored
from components.rollouts.requests import LENGTH_METRICS, SamplingSettings, keyed_seeds, length_metrics
from components.text.stops import decode_rows
from pipeline.core.component import Component, Context, Count
from pipeline.core.errors import CreditgraphError
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Trajectories

logger = logging.getLogger("creditgraph")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The groups that are complete, those begun first in front, and their prompts (some began in earlier iterations)."""

    trajectories: Trajectories
    prompts: Prompts


@dataclass(frozen=True, kw_only=True)
class Carry:
    """When a rollout waits for the next iteration, and what becomes of it."""

    tokens: int = 0
    """new tokens that a rollout gets per iteration; one that needs more goes on in the next. 0 carries nothing"""
    max_staleness: int = 4
    """versions by which the oldest token of a trajectory may be behind the weights; a rollout that old is not carried
    again"""
    on_stale: Literal["finish", "drop"] = "finish"
    """a rollout that may not be carried again: finish it in this iteration, or drop its whole group (which favours
    short responses)"""
    on_continue: Literal["keep", "rescore"] = "keep"
    """log-probs of tokens that older weights sampled: keep those recorded then, or score them again under the present
    weights"""

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"carry.tokens is {self.tokens}; wanted tokens per iteration, or 0 to carry nothing.")
        if self.max_staleness < 1:
            raise ValueError(
                f"carry.max_staleness is {self.max_staleness}, so that nothing could be carried; wanted at least 1 "
                "version. "
                "To carry nothing, set carry.tokens to 0."
            )


class Partial(Component):
    """Samples groups as sampler.chains does, but gives each rollout at most `carry.tokens` tokens per iteration.

    A group with an unfinished rollout waits with all its rollouts, and goes on in the next iteration under the weights
    of then. Every iteration begins the groups of all its prompts and delivers those that are complete, so batches
    differ in size, and in the long run are as large as the batch of prompts. Wire every reader of `trajectories` to
    `prompts` of this node. Groups keep their uids, and rollouts their random streams: the tokens of a rollout depend on
    how it was cut only through the weights. Groups in flight are part of the checkpoint. Which version sampled each
    token is in `token_versions`, `policy_version` is the oldest of them. With `carry.tokens: 0` this is sampler.chains.
    """

    paper = "2501.12599"
    metrics = (
        *LENGTH_METRICS,
        Metric(
            "decode_steps",
            "steps",
            "most tokens a rollout got in this iteration: decoding steps when all rollouts fit the engine",
        ),
        Metric("delivered_groups", "groups", "complete groups handed on"),
        Metric("carried_groups", "groups", "groups in flight, which go on in the next iteration"),
        Metric("carried_rollouts", "responses", "rollouts in flight that have not ended"),
        Metric("carried_tokens", "tokens", "tokens held by groups in flight, those of ended rollouts included"),
        Metric(
            "token_staleness",
            "versions",
            "sampler's version minus the one that sampled the token, mean over delivered tokens",
        ),
        Metric(
            "rollout_staleness",
            "versions",
            "sampler's version minus that of the oldest token, mean over delivered trajectories",
        ),
        Metric("staleness_max", "versions", "largest of these"),
        Metric("dropped_groups", "groups", "groups dropped because a rollout was unfinished at `carry.max_staleness`"),
        Metric("dropped_tokens", "tokens", "tokens sampled for dropped groups"),
        Metric(
            "rescored_tokens",
            "tokens",
            "tokens of older weights whose log-probs were scored again, with `carry.on_continue: rescore`",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(SamplingSettings):
        """Sampling settings, the group size, and the long tail."""

        group_size: int = 8
        """responses per prompt"""
        carry: Carry = field(default_factory=Carry)
        """which rollouts wait for the next iteration"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.group_size < 1:
                raise ValueError(f"group_size is {self.group_size}; wanted at least 1.")

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._flight: InFlight | None = None

    def setup(self, context: Context) -> None:
        """Warns of a limit that no rollout reaches."""
        super().setup(context)
        if self.config.carry.tokens >= self.config.max_tokens:
            logger.warning(
                "node '%s': carry.tokens is %d and max_tokens %d, so every rollout ends in its own iteration and carry has no effect.",
                context.node, self.config.carry.tokens, self.config.max_tokens,
            )  # fmt: skip

    def run(self, *, prompts: Prompts, policy: Policy) -> Outputs:
        """Goes on with the groups in flight, begins those of `prompts`, and delivers the complete ones."""
        carry, size, count = self.config.carry, self.config.group_size, len(prompts)
        row = torch.arange(count).repeat_interleave(size)
        seed = keyed_seeds(self.context.rng(), prompts.uid, 0, size).reshape(-1)
        flight = begin(prompts, row, seed, self.context.uids(len(row)), policy.version, self.config.temperature or 1.0)
        carrying = carry.tokens > 0 or self._flight is not None
        if carrying:
            self._check_continues(policy)
        if self._flight is not None:
            flight = InFlight.concat([self._flight, flight])
        # What is at its limit now may not be older in the next iteration.
        last = (policy.version - flight.rows.policy_version >= carry.max_staleness) | (carry.tokens == 0)
        pause = None
        if carrying:
            pause = torch.where(
                last & (carry.on_stale == "finish" or carry.tokens == 0), self.config.max_tokens, carry.tokens
            )
        flight, steps = grown(flight, policy, self.config.sampling(), pause)
        waiting = flight.waiting()
        dropped = waiting & flight.any_of_prompt(last)
        self._drop(flight, dropped)
        delivered = flight.select(~waiting)
        still = flight.select(waiting & ~dropped)
        self._flight = still if len(still.prompts) else None
        trajectories = self._delivered(delivered, policy, carrying)
        self._log(trajectories, still, int(steps.sum()), int(steps.max()) if len(steps) else 0, policy.version)
        return Outputs(trajectories=trajectories, prompts=delivered.prompts)

    def _delivered(self, flight: InFlight, policy: Policy, carrying: bool) -> Trajectories:
        rows = flight.rows
        if not carrying:
            return rows.replace(token_versions=None)
        # Decoded as a whole: two decoded parts need not join to the decoding of their tokens.
        late = [i for i, text in enumerate(rows.text) if not text]
        texts = decode_rows(
            policy.tokenizer, rows.response_tokens.select(torch.tensor(late, dtype=torch.int64)).to_lists()
        )
        text = list(rows.text)
        for i, whole in zip(late, texts, strict=True):
            text[i] = whole
        rows = rows.replace(text=text)
        if self.config.carry.on_continue == "rescore":
            rows, scored = rescored(rows, policy)
            self.context.log(rescored_tokens=Count(scored))
        return rows

    def _drop(self, flight: InFlight, dropped: Tensor) -> None:
        """Writes down the groups of these prompts, bool [P], and counts them and their tokens."""
        gone = flight.select(dropped)
        for uid, text in zip(gone.prompts.uid.tolist(), gone.prompts.text, strict=True):
            tokens = int(gone.rows.response_tokens.lengths[gone.rows.prompt_uid == uid].sum())
            self.context.reject(
                {"prompt_uid": uid, "prompt": text, "tokens": tokens},
                f"unfinished at carry.max_staleness {self.config.carry.max_staleness}; the group is dropped",
            )
        self.context.log(
            dropped_groups=Count(len(gone.prompts)), dropped_tokens=Count(len(gone.rows.response_tokens.values))
        )

    def _log(self, rows: Trajectories, still: InFlight, sampled: int, steps: int, version: int) -> None:
        age = (version - rows.versions_by_token().values).double()
        oldest = (version - rows.policy_version).double()
        self.context.log(
            **length_metrics(rows) | {"sampled_tokens": Count(sampled)},
            decode_steps=steps,
            delivered_groups=Count(len(torch.unique(rows.group))),
            carried_groups=Count(len(still.prompts)),
            carried_rollouts=Count(int(still.unfinished.sum())),
            carried_tokens=Count(len(still.rows.response_tokens.values)),
            token_staleness=float(age.mean()) if len(age) else 0.0,
            rollout_staleness=float(oldest.mean()) if len(oldest) else 0.0,
            staleness_max=float(oldest.max()) if len(oldest) else 0.0,
        )

    def _check_continues(self, policy: Policy) -> None:
        if not policy.continues:
            raise CreditgraphError(
                f"node '{self.context.node}': carry.tokens is {self.config.carry.tokens}, but {type(policy).__name__} "
                "cannot go on with a "
                "rollout that was begun before; wanted engine.local, engine.vllm or engine.sglang. Use one of them, or "
                "carry.tokens=0."
            )

    def state_dict(self) -> dict[str, Any]:
        """The groups in flight."""
        if self._flight is None:
            # Not empty, so that a replayed node gets its state back.
            return {"groups": 0} if self.config.carry.tokens else {}
        return {"groups": len(self._flight.prompts), **vars(self._flight)}

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Another number of replicas than made the checkpoint shares out its groups, those begun first in front."""
        held = [_flight_of(state) for state in states if state.get("groups")]
        if len(states) == replicas or not held:
            return states[min(replica, len(states) - 1)]
        whole = InFlight.concat(held).in_order()
        mine = whole.select(torch.arange(len(whole.prompts)) % replicas == replica)
        return {"groups": len(mine.prompts), **(vars(mine) if len(mine.prompts) else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the groups in flight back; with carry off they are finished in the first iteration."""
        self._flight = _flight_of(state) if state.get("groups") else None
        if self._flight is not None and not self.config.carry.tokens:
            logger.warning(
                "node '%s': the checkpoint holds %d groups in flight, but carry.tokens is 0; the next iteration finishes them.",
                self.context.node, len(self._flight.prompts),
            )  # fmt: skip


def _flight_of(state: dict[str, Any]) -> InFlight:
    return InFlight(prompts=state["prompts"], rows=state["rows"], seed=state["seed"])
