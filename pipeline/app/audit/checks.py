"""Checks and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["pass", "fail", "declared", "not applicable"]
Layer = Literal["contract", "metamorphic", "gradient", "loss", "records"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: "declared" is a failure that the user or the author of the target wants.
        message: with numbers; for "not applicable" the reason.
        likely: the fault that this failure most likely comes from, as a sentence; "" if none is known.
        example: the smallest counter-example found, as JSON values.
        size: of the failure, in the check's unit; 0 without one.
    """

    verdict: Verdict
    message: str = ""
    likely: str = ""
    example: Mapping[str, Any] = field(default_factory=dict)
    size: float = 0.0


def passed(message: str = "") -> Finding:
    """The check holds."""
    return Finding(verdict="pass", message=message)


def skipped(reason: str) -> Finding:
    """The check says nothing about this target."""
    return Finding(verdict="not applicable", message=reason)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A property of right credit.

    Attributes:
        name: for `--declare`.
        layer: what kind of check it is.
        title: the property, as a sentence.
        run: the check of a target.
    """

    name: str
    layer: Layer
    title: str
    run: Callable[[Any], Finding]
