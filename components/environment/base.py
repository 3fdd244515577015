"""The base of environments: a component that makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.handles import Environments


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What makes the environments of episodes."""

    environments: Environments


class EnvironmentComponent(Component, Environments):
    """A component that makes environments: `run` returns the component itself. Subclasses implement `make`."""

    @classmethod
    def states_of(cls, config: Any) -> bool:
        """Whether environments with these settings may say in which state they are."""
        return True

    def run(self) -> Outputs:
        """Returns itself, the same object in every iteration."""
        return Outputs(environments=self)
