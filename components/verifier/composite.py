"""Several verifiers, a format and a length as one reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import regex
import torch

from components.rollouts.rewards import overlong_punishment
from components.verifier.pattern import check_pattern
from pipeline.core.component import Component, Context
from pipeline.core.errors import ConfigError
from pipeline.core.payloads import Prompts, Rewards, Trajectories, Verifier
from pipeline.core.registry import load_class
from pipeline.core.settings import build_config

_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


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


@dataclass(frozen=True, kw_only=True)
class Format:
    """A form that responses should have."""

    pattern: str = ""
    """regular expression that must match somewhere; empty: no such term"""
    weight: float = 0.1
    """added when it matches"""

    def __post_init__(self) -> None:
        if self.pattern:
            check_pattern(self.pattern)


@dataclass(frozen=True, kw_only=True)
class Length:
    """A punishment of long responses, from 0 to −weight, in the form of DAPO (see rewards.overlong)."""

    max_tokens: int = 0
    """response tokens at which the whole punishment is reached; 0: no such term"""
    buffer: int = 0
    """tokens before that over which it grows"""
    weight: float = 0.5
    """size of the punishment"""

    def __post_init__(self) -> None:
        if not 0 <= self.buffer <= max(self.max_tokens, 0):
            raise ValueError(f"buffer is {self.buffer}; wanted 0 to max_tokens ({self.max_tokens}).")


class CompositeVerifier(Verifier):
    """Σ weight × reward of the parts, plus the format term, minus the length term."""

    def __init__(self, parts: list[tuple[Part, Verifier]], form: Format, length: Length) -> None:
        self._parts, self._length, self._weight = parts, length, form.weight
        self._pattern = regex.compile(form.pattern, regex.DOTALL | regex.MULTILINE) if form.pattern else None

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory. A row that one part cannot judge is invalid, with that part's reason."""
        count = len(trajectories)
        value, correct, valid = (
            torch.zeros(count),
            torch.ones(count, dtype=torch.bool),
            torch.ones(count, dtype=torch.bool),
        )
        details: list[list[str]] = [[] for _ in range(count)]
        for part, verifier in self._parts:
            rewards = verifier.verify(prompts, trajectories)
            value += part.weight * rewards.value
            valid &= rewards.valid
            if part.decides:
                correct &= rewards.correct
            for texts, detail in zip(details, rewards.detail, strict=True):
                texts += [f"{part.use.removeprefix('verifier.')}: {detail}"] if detail else []
        if self._pattern is not None:
            matches = [self._matches(text) for text in trajectories.text]
            value += self._weight * torch.tensor(matches, dtype=torch.float32)
            for texts, matched in zip(details, matches, strict=True):
                texts += [] if matched else ["format: the pattern does not match"]
        if self._length.max_tokens:
            lengths = trajectories.response_tokens.lengths
            added = self._length.weight * overlong_punishment(lengths, self._length.max_tokens, self._length.buffer)
            value += added
            for texts, term in zip(details, added.tolist(), strict=True):
                texts += [f"length: {term:.3g}"] if term < 0 else []
        return Rewards(
            uid=trajectories.uid,
            value=value.masked_fill(~valid, 0.0),
            correct=correct & valid,
            valid=valid,
            detail=["; ".join(texts) for texts in details],
        )

    def _matches(self, text: str) -> bool:
        assert self._pattern is not None
        try:
            return self._pattern.search(text, timeout=_SECONDS) is not None
        except TimeoutError:
            return False


class Composite(Component):
    """Adds up several verifiers with weights, a format term and a length term. Correct means that every deciding verifier says so.

    Each verifier works on the whole batch by its own means. A row that one of them cannot judge is invalid, for a sum
    with a term missing is another reward.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The terms."""

        parts: list[Part] = field(default_factory=lambda: [Part()])
        """the verifiers"""
        format: Format = field(default_factory=Format)
        """a form to reward"""
        length: Length = field(default_factory=Length)
        """a length to punish"""

        def __post_init__(self) -> None:
            if not self.parts or not any(part.decides for part in self.parts):
                raise ValueError(
                    "parts: no verifier decides what is correct; wanted at least one part with decides: true."
                )

    config: Config
    _nodes: list[Component] | None = None
    _judge: CompositeVerifier | None = None

    def setup(self, context: Context) -> None:
        """Makes the verifiers and sets them up."""
        super().setup(context)
        self._nodes = []
        for i, part in enumerate(self.config.parts):
            place = f"node '{context.node}': parts[{i}]"
            kind = load_class(part.use)
            settings, problems = build_config(kind.Config, part.config, f"{place}.config")  # type: ignore[attr-defined]
            if problems:
                raise ConfigError("\n".join(problems))
            node = kind(settings)
            node.setup(context)
            self._nodes.append(node)

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration; runs the verifiers, so that they log their numbers."""
        assert self._nodes is not None
        verifiers = []
        for part, node in zip(self.config.parts, self._nodes, strict=True):
            outputs = node.run()  # type: ignore[attr-defined]
            if not isinstance(getattr(outputs, "verifier", None), Verifier):
                raise ConfigError(
                    f"node '{self.context.node}': {part.use} returns no verifier; choose one of `creditgraph components verifier`."
                )
            verifiers.append((part, outputs.verifier))
        if self._judge is None:
            self._judge = CompositeVerifier(verifiers, self.config.format, self.config.length)
        return Outputs(verifier=self._judge)

    def close(self) -> None:
        """Closes the verifiers."""
        for node in self._nodes or []:
            node.close()
