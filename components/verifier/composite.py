"""Several verifiers as one reward."""

from dataclasses import dataclass, field
from typing import Any

import torch

from creditgraph.components.verifier.base import Outputs, verifier_of
from creditgraph.pipeline.core.component import Component, Context, set_up
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories
from creditgraph.pipeline.core.registry import build_component


@dataclass(frozen=True, kw_only=True)
class Part:
    """One verifier of the sum."""

    use: str = "verifier.math"
    """component that returns a verifier"""
    weight: float = 1.0
    """factor of its reward"""
    decides: bool = True
    """whether a response must satisfy it to be correct"""
    config: dict[str, Any] = field(default_factory=dict)
    """its settings"""


class Composite(Component, Verifier):
    """Combines several verifiers: the reward is Σ weight × reward, and correct means that all deciding parts agree.

    Each part verifies the whole batch. A row that any of them cannot decide is invalid, because a sum with a missing
    term is a different reward. For a format, add a part verifier.regex with compare and decides off. Long
    responses are punished by rewards.overlong.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The terms."""

        parts: list[Part] = field(default_factory=lambda: [Part()])
        """the verifiers"""

        def __post_init__(self) -> None:
            if not self.parts or not any(part.decides for part in self.parts):
                raise ValueError("parts: expected at least one part with decides: true, got none.")

    config: Config

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Kinds that all of its parts read."""
        parts = [build_component(part.use, part.config, f"part {part.use}") for part in config.parts]
        known = [kinds for kinds in (part.references_of(part.config) for part in parts) if kinds is not None]
        return frozenset.intersection(*known) if known else None

    def setup(self, context: Context) -> None:
        """Builds the parts and sets them up."""
        super().setup(context)
        self._components: list[Component] = []
        self._verifiers: list[Verifier] = []
        for i, part in enumerate(self.config.parts):
            component = build_component(part.use, part.config, f"node '{context.node}': parts[{i}].config")
            self._components.append(set_up(component, context))

    def run(self) -> Outputs:
        """Returns the verifier, the same object in every iteration; runs the parts, so that they log their numbers."""
        place = f"node '{self.context.node}': "
        self._verifiers = [
            verifier_of(component, place + part.use)
            for part, component in zip(self.config.parts, self._components, strict=True)
        ]
        return Outputs(verifier=self)

    def close(self) -> None:
        """Closes the parts."""
        for component in self._components:
            component.close()

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory. A row on which one part cannot decide is invalid, with that part's reason."""
        count = len(trajectories)
        value = torch.zeros(count)
        correct = torch.ones(count, dtype=torch.bool)
        valid = torch.ones(count, dtype=torch.bool)
        details: list[list[str]] = [[] for _ in range(count)]
        for part, verifier in zip(self.config.parts, self._verifiers, strict=True):
            rewards = verifier.verify(prompts, trajectories)
            value += part.weight * rewards.value
            valid &= rewards.valid
            if part.decides:
                correct &= rewards.correct
            for texts, detail in zip(details, rewards.detail, strict=True):
                texts += [f"{part.use.removeprefix('verifier.')}: {detail}"] if detail else []
        return Rewards(
            uid=trajectories.uid,
            value=value.masked_fill(~valid, 0.0),
            correct=correct & valid,
            valid=valid,
            detail=["; ".join(texts) for texts in details],
        )
