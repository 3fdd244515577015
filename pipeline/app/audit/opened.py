"""Functions as targets with the checks of their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from creditgraph.pipeline.app.audit.audit import of_advantages
from creditgraph.pipeline.app.audit.checks import Check
from creditgraph.pipeline.app.audit.installed import installed
from creditgraph.pipeline.app.audit.loss import LOSS
from creditgraph.pipeline.app.audit.loss_target import loss_function
from creditgraph.pipeline.app.audit.targets import advantage_function, instance, is_loss, load_function

Opened = tuple[Any, Sequence[Check]]


def function_target(
    function: Callable[..., Any],
    name: str,
    bind: Mapping[str, str],
    settings: Mapping[str, Any],
    *,
    kind: str | None = None,
    accumulate: str | None = None,
) -> Opened:
    """The target of a function, or of a class that is called, with its checks.

    Args:
        function: the function; of a class, an instance made of `settings` is called.
        name: as results name it.
        bind: parameter → column.
        settings: parameter → value.
        kind: "advantage" or "loss"; None to read it from the parameters.
        accumulate: how the trainer weights micro-batches, as of `LossTarget`.
    """
    if isinstance(function, type):
        function, settings = instance(function, name, settings), {}
    if kind == "loss" or (kind is None and is_loss(function, bind)):
        return loss_function(function, name, bind, settings, accumulate), LOSS
    return advantage_function(function, name, bind, settings), of_advantages()


def named_target(
    name: str,
    bind: Mapping[str, str],
    settings: Mapping[str, Any],
    *,
    kind: str | None = None,
    accumulate: str | None = None,
) -> Opened:
    """The target of "package.module:name", "file.py:name" or a short name of an installed trainer."""
    function = installed(name, kind) or load_function(name)
    return function_target(function, name, bind, settings, kind=kind, accumulate=accumulate)
