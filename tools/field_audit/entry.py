"""An entry of the table: one function of a trainer, and how the audit calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .source import Source

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table.

    Attributes:
        function: "package.module:name".
        make: from the source to the function that the audit calls, whose parameters have the audit's names.
        loss: whether it gives a loss.
        label: what tells it from other rows of the same function, such as a setting.
        bind: parameter → column, as `--bind`.
        settings: parameter → value, as `-o`.
    """

    function: str
    make: Callable[[Source], Function]
    loss: bool
    label: str = ""
    bind: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The function's name with the label."""
        own = self.function.partition(":")[2]
        return f"{own} ({self.label})" if self.label else own


class Table:
    """The entries of one trainer.

    Attributes:
        package: its top-level package.
        folder: where the package lies in a checkout.
        repository: of its source.
        left_out: function → why it is not judged.
    """

    def __init__(
        self, package: str, repository: str, folder: str = ".", left_out: Mapping[str, str] | None = None
    ) -> None:
        self.package, self.repository, self.folder = package, repository, folder
        self.left_out = dict(left_out or {})
        self.entries: list[Entry] = []

    def direct(self, function: str, loss: bool = False, label: str = "", **settings: Any) -> None:
        """A function that is called as it is; its parameters have names that the audit knows."""
        self.entries.append(
            Entry(function=function, make=lambda source: source.get(function), loss=loss, label=label,
                  settings=settings)
        )  # fmt: skip

    def add(self, function: str, loss: bool = False, label: str = "", **settings: Any) -> Callable[[Function], None]:
        """A decorator of an adapter, `make(found)` or `make(found, source)`, that gives what the audit calls."""

        def register(make: Function) -> None:
            takes_source = make.__code__.co_argcount > 1

            def build(source: Source) -> Function:
                found = source.get(function)
                made: Function = make(found, source) if takes_source else make(found)
                return made

            self.entries.append(Entry(function=function, make=build, loss=loss, label=label, settings=settings))

        return register


def critic(values: Tensor, lengths: Tensor) -> Tensor:
    """float32 [N, T]: the values of a critic, which gives a number in padding too."""
    inside = torch.arange(values.shape[1]) < lengths[:, None]
    return torch.where(inside, values.float(), torch.full_like(values, 3.0).float())


def per_row(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The rows of [N, T] without padding."""
    return [row[: int(n)] for row, n in zip(values, lengths, strict=True)]


def padded(rows: list[Tensor], width: int) -> Tensor:
    """[N, width] of rows, with zeros after them."""
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def with_critic(advantages_of: Function) -> Function:
    """The audit's columns for a critic, of a function of all of them."""

    def call(
        rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int, values: Tensor, gamma: float, lam: float
    ) -> Any:
        return advantages_of(rewards, mask, lengths, group_size, values, gamma, lam)

    return call


def without_critic(advantages_of: Function) -> Function:
    """The same function for estimators that read no values."""

    def call(rewards: Tensor, mask: Tensor, lengths: Tensor, group_size: int) -> Any:
        return advantages_of(rewards, mask, lengths, group_size, torch.zeros(mask.shape), 1.0, 1.0)

    return call


def with_bounds(loss_of: Function) -> Function:
    """The audit's columns and clip settings, of a loss of log-probs, old ones, advantages, mask and both bounds."""

    def call(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        epsilon_low: float,
        epsilon_high: float,
    ) -> Any:
        return loss_of(logprobs, old_logprobs, advantages, mask, epsilon_low, epsilon_high)

    return call


def without_bounds(loss_of: Function, high: float = 0.28) -> Function:
    """The same loss at fixed bounds, for kinds that do not clip."""

    def call(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Any:
        return loss_of(logprobs, old_logprobs, advantages, mask, 0.2, high)

    return call


class Config(dict):  # type: ignore[type-arg]
    """A configuration that is read by attribute, by key and by `get`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    __setattr__ = dict.__setitem__
