"""Resets: new responses from the thoughts before a failure's first error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from creditgraph.components.rollouts.carry import CARRY_METRICS, Carrier, CarrySettings
from creditgraph.components.rollouts.requests import (
    LENGTH_METRICS,
    SAMPLING_NAMES,
    SamplingSettings,
    keyed_seeds,
    sample_from_prefix,
)
from creditgraph.components.text.templates import Mode
from creditgraph.pipeline.core.component import Count, same_rows
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, StepErrors, Trajectories, check_aligned
from creditgraph.pipeline.core.streams import keys_within


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """`suffixes` rows per failure, whose group is the failure.

    `prompts`, `parents` (the failures) and `steps` (their errors) are the inputs, less those of prompts that wait for
    the next iteration, and with those that waited for this one.
    """

    trajectories: Trajectories
    prompts: Prompts
    parents: Trajectories
    steps: Annotated[StepErrors, same_rows("parents")]


def reset_length(thought_ends: Jagged, step: Tensor) -> Tensor:
    """int64 [N]: tokens in thoughts 1 … step − 1 of each row; `step` [N] is clamped to [1, number of thoughts].

    Step 1 and rows without thoughts give 0: the reset state is then the prompt.
    """
    before = torch.minimum(step, thought_ends.lengths).clamp(min=1) - 1
    length = torch.zeros_like(before)
    cut = before > 0
    length[cut] = thought_ends.values[thought_ends.offsets[:-1][cut] + before[cut] - 1].to(torch.int64)
    return length


class Reset(Carrier):
    """Continues each failure `suffixes` times from the thoughts before its localised step h*.

    The prefix is thoughts 1 … h*−1 as exact token ids, without any information about the error. h* = 1 has an empty
    prefix: fresh responses that still form their own group. Settings that differ from those of the sampler of the
    failures are refused. With `carry.tokens`, a prompt with an unfinished suffix waits with all its failures.
    """

    paper = "2605.25507"
    same_settings: ClassVar[Mapping[str, tuple[str, ...]]] = {"failures": (*SAMPLING_NAMES, "suffixes")}
    metrics = (
        *LENGTH_METRICS,
        *CARRY_METRICS,
        Metric("inherited_tokens", "tokens", "tokens taken over from failures"),
        Metric("prefix_share", "share", "kept part of a failure, mean"),
        Metric(
            "empty_prefix_share",
            "share",
            "failures of which nothing is kept",
            alarm="every reset began at the prompt, so the suffixes are only more responses. Either responses have one "
            "thought (prompts must ask for </thought>, or set mode=line), or the localizer names step 1 every time.",
        ),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(CarrySettings, SamplingSettings):
        """Sampling settings, the number of suffixes, and the long tail."""

        mode: Mode = "thought"
        """thought by thought, as the failures were sampled"""
        temperature: float = 0.7
        """sampling temperature; use the sampler's"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability; use the sampler's"""
        suffixes: int = 4
        """continuations per failure: B of the sampler's split AxB"""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.suffixes < 1:
                raise ValueError(f"expected suffixes ≥ 1, got {self.suffixes}.")

    config: Config

    @classmethod
    def needs_of(cls, config: Any) -> frozenset[str]:
        """Thoughts."""
        return frozenset({"thoughts"})

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self._waiting: tuple[Trajectories, StepErrors] | None = None

    def run(
        self,
        *,
        prompts: Prompts,
        failures: Trajectories,
        errors: Annotated[StepErrors, same_rows("failures")],
        policy: Policy,
    ) -> Outputs:
        """Samples all suffixes in one request batch; equal prefixes share their prefill."""
        check_aligned(failures, errors)
        carried = self.begin(prompts, policy)
        if self._waiting is not None:
            failures = Trajectories.concat([self._waiting[0], failures])
            errors = StepErrors.concat([self._waiting[1], errors])
        suffixes = self.config.suffixes
        rows = torch.arange(len(failures)).repeat_interleave(suffixes)
        length = reset_length(failures.thought_ends, errors.step)
        seed = keyed_seeds(carried.stream, keys_within(failures.prompt_uid), 0, suffixes).reshape(-1)
        uid = self.context.uids(len(rows))
        continued = sample_from_prefix(
            carried.policy, failures.select(rows), length[rows], seed, self.config.sampling(), uid
        )
        trajectories, complete = self.end(carried, continued)
        done = carried.complete(failures.prompt_uid)
        waits = torch.isin(failures.prompt_uid, self.in_flight)
        self._waiting = (failures.select(waits), errors.select(waits)) if bool(waits.any()) else None
        failures, errors, length = failures.select(done), errors.select(done), length[done]
        count = max(len(failures), 1)
        # An empty failure has no tokens to share.
        whole = failures.response_tokens.lengths.clamp(min=1)
        self.context.log(
            inherited_tokens=Count(trajectories.inherited.sum()),
            prefix_share=float((length / whole).sum()) / count,
            empty_prefix_share=float((length == 0).sum()) / count,
        )
        return Outputs(trajectories=trajectories, prompts=complete, parents=failures, steps=errors)

    def state_dict(self) -> dict[str, Any]:
        """The prompts in flight, with their failures and errors."""
        more = {} if self._waiting is None else {"failures": self._waiting[0], "errors": self._waiting[1]}
        return super().state_dict() | more

    @classmethod
    def state_for(cls, states: Sequence[dict[str, Any]], replica: int, replicas: int) -> dict[str, Any]:
        """Failures and errors go with their prompts."""
        state = super().state_for(states, replica, replicas)
        held = [s for s in states if "failures" in s]
        if len(states) == replicas or not held or "prompts" not in state:
            return state
        failures = Trajectories.concat([s["failures"] for s in held])
        mine = torch.isin(failures.prompt_uid, state["prompts"].uid)
        errors = StepErrors.concat([s["errors"] for s in held])
        return state | {"failures": failures.select(mine), "errors": errors.select(mine)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores all of them."""
        super().load_state_dict(state)
        self._waiting = (state["failures"], state["errors"]) if "failures" in state else None
