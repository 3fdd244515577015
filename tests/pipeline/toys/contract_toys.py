"""Components that each break one clause of the contract; `Good` breaks none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Weights


@dataclass(frozen=True, kw_only=True)
class Out:
    rewards: Annotated[Rewards, same_rows("prompts")]


@dataclass
class MeltedOut:
    prompts: Prompts


class Good(Component):
    """Counts, and remembers the count."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        start: int = 0
        """first number"""

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        super().__init__(config)
        self.count = torch.tensor(self.config.start)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "names": ["a"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def run(self, *, prompts: Prompts) -> Out: ...


class Silent(Component):
    def run(self, *, prompts: Prompts) -> Out: ...


@dataclass(frozen=True, kw_only=True)
class Nested:
    depth: int = 1


class Settings(Component):
    """Has settings without words."""

    @dataclass
    class Config:
        quiet: int = 0
        nested: Nested = field(default_factory=Nested)
        """told"""

    def run(self, *, prompts: Prompts) -> Out: ...


class Plain(Component):
    """Has a Config that is no dataclass."""

    class Config:
        x = 1

    def run(self, *, prompts: Prompts) -> Out: ...


class Melted(Component):
    """Returns a dataclass that is not frozen."""

    def run(self) -> MeltedOut: ...


class NoRun(Component):
    """Has no run."""


class Unannotated(Component):
    """Has an input without a type."""

    def run(self, *, prompts) -> Out: ...  # type: ignore[no-untyped-def]


class ReturnsNumber(Component):
    """Returns no dataclass."""

    def run(self, *, prompts: Prompts) -> int: ...


class Rows(Component):
    """Names rows of an input it does not have."""

    def run(self, *, prompt: Prompts, rewards: Annotated[Rewards, same_rows("promt")]) -> Out: ...


class Number(Component):
    """Takes what is no payload, with a default that is not None."""

    def run(self, *, prompts: Prompts, size: int = 3) -> Out: ...


class HalfState(Component):
    """Saves and never loads."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def run(self, *, prompts: Prompts) -> Out: ...


class Forgets(Good):
    """Does not take its state back."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.count = torch.rand(3)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Unstorable(Good):
    """Puts objects and number keys into its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"made": object(), "by_row": {3: 1}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Slow(Component):
    """Sleeps while it is built."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        time.sleep(0.15)

    def run(self, *, prompts: Prompts) -> Out: ...


class Crashes(Component):
    """Cannot be built."""

    def __init__(self, config: Any = None) -> None:
        raise OSError("no model at /models")

    def run(self, *, prompts: Prompts) -> Out: ...


@dataclass(frozen=True, kw_only=True)
class WeightsOut:
    weights: Weights
    policy: Policy


class Initial(Component):
    """Promises an output it does not have, and one of another type."""

    placement = "somewhere"  # type: ignore[assignment]

    def initial(self) -> dict[str, Any]:
        return {"wieghts": Weights(version=0), "policy": 3}

    def run(self, *, prompts: Prompts) -> WeightsOut: ...
