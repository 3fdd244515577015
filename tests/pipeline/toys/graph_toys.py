"""Toy components, shaped like the real ones, for tests of graphs, contract and pictures. They compute nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.payloads import (
    Batch,
    Credit,
    Prompts,
    Rewards,
    StepErrors,
    TrainReport,
    Trajectories,
    Weights,
)


@dataclass(frozen=True, kw_only=True)
class PromptsOut:
    batch: Prompts


class Source(Component):
    """Makes prompts."""

    def run(self) -> PromptsOut: ...


@dataclass(frozen=True, kw_only=True)
class EngineOut:
    policy: Policy


class Engine(Component):
    """Loads weights."""

    def run(self, *, weights: Weights) -> EngineOut: ...


@dataclass(frozen=True, kw_only=True)
class JudgeOut:
    verifier: Verifier


class Exact(Component):
    """Verifies."""

    def run(self) -> JudgeOut: ...


@dataclass(frozen=True, kw_only=True)
class SamplerOut:
    trajectories: Trajectories
    failures: Trajectories


class Sampler(Component):
    """Samples a group per prompt <&>."""

    paper = "2402.03300"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Attributes:
        group_size: responses per prompt
        """

        group_size: int = 8

    config: Config

    def run(self, *, prompts: Prompts, policy: Policy, verifier: Verifier | None = None) -> SamplerOut: ...


@dataclass(frozen=True, kw_only=True)
class LocalizerOut:
    errors: Annotated[StepErrors, same_rows("failures")]


class Localizer(Component):
    """Names the first wrong step."""

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy) -> LocalizerOut: ...


@dataclass(frozen=True, kw_only=True)
class TrajectoriesOut:
    trajectories: Trajectories


class Expander(Component):
    """Resets."""

    def run(
        self, *, failures: Trajectories, errors: Annotated[StepErrors, same_rows("failures")], policy: Policy
    ) -> TrajectoriesOut: ...


class Merge(Component):
    """Stacks."""

    def run(self, *, trajectories: list[Trajectories]) -> TrajectoriesOut: ...


@dataclass(frozen=True, kw_only=True)
class StackedOut:
    trajectories: Annotated[Trajectories, same_rows("trajectories")]


class Stack(Component):
    """Stacks, and says that the rows are those of its inputs."""

    def run(self, *, trajectories: list[Trajectories]) -> StackedOut: ...


@dataclass(frozen=True, kw_only=True)
class RewardsOut:
    rewards: Annotated[Rewards, same_rows("trajectories")]


class Outcome(Component):
    """Rewards."""

    def run(self, *, trajectories: Trajectories, prompts: Prompts, verifier: Verifier) -> RewardsOut: ...


class StackOutcome(Component):
    """Rewards of several parts."""

    def run(self, *, trajectories: list[Trajectories]) -> RewardsOut: ...


@dataclass(frozen=True, kw_only=True)
class CreditOut:
    credit: Annotated[Credit, same_rows("trajectories")]


class Advantage(Component):
    """Credit."""

    def run(
        self, *, trajectories: Trajectories, rewards: Annotated[Rewards, same_rows("trajectories")]
    ) -> CreditOut: ...


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Adam."""

    lr: float = 1e-6
    """step size, per update"""
    betas: tuple[float, float] = (0.9, 0.95)
    """decay of the two moments"""


@dataclass(frozen=True, kw_only=True)
class LearnerOut:
    report: TrainReport
    weights: Weights


class Learner(Component):
    """Trains."""

    placement = "collective"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings."""

        objective: Literal["reinforce", "token"] = "token"
        """which ratio objective"""
        optimizer: Optimizer = field(default_factory=Optimizer)
        """of the parameters"""
        kl: float = 0.0
        """coefficient of the KL term, 0 for none"""

        def __post_init__(self) -> None:
            if self.kl and self.objective == "reinforce":
                raise ValueError("a KL term needs objective 'token'; set kl: 0.")

    config: Config

    def initial(self) -> dict[str, Any]:
        return {"weights": Weights(version=0, path="tiny")}

    def run(
        self, *, trajectories: Trajectories, credit: Annotated[Credit, same_rows("trajectories")]
    ) -> LearnerOut: ...


class Watch(Component):
    """Looks at rewards and errors."""

    def run(
        self,
        *,
        policy: Policy,
        errors: StepErrors | None = None,
        report: TrainReport | None = None,
        anything: Any = None,
    ) -> None: ...


class AnyBatch(Component):
    """Takes every batch."""

    def run(self, *, batch: Batch) -> None: ...


class Positional(Component):
    """Breaks the contract."""

    def run(self, batch: Batch) -> PromptsOut: ...


class NotAComponent:
    """No base class."""
