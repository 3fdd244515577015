"""Sockets of a component class, read from the signature of `run` and the fields of the dataclass it returns."""

from __future__ import annotations

import dataclasses
import inspect
import types
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from creditgraph.pipeline.core.component import Component, Placement, same_rows
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.settings import type_text


@dataclass(frozen=True)
class Socket:
    """One input or output.

    Attributes:
        name: parameter or field name.
        types: accepted (input) or possible (output) classes.
        is_list: whether several wires may end here.
        required: whether it must be wired (always True for outputs).
        same_rows: name of the input whose rows it has, or None.
    """

    name: str
    types: tuple[Any, ...]
    is_list: bool = False
    required: bool = True
    same_rows: str | None = None

    @property
    def type_text(self) -> str:
        """The type as shown to a user."""
        inner = " or ".join(type_text(t) for t in self.types)
        return f"list[{inner}]" if self.is_list else inner

    def carries(self, kind: type | UnionType) -> bool:
        """Whether values of this class, or of a subclass, may travel here."""
        return any(isinstance(t, type) and issubclass(t, kind) for t in self.types)

    def accepts(self, output: Socket) -> bool:
        """Whether a wire from `output` may end here (subclasses may)."""
        return all(any(_fits(possible, accepted) for accepted in self.types) for possible in output.types)


@dataclass(frozen=True)
class Sockets:
    """Inputs and outputs of a component class, by name."""

    inputs: dict[str, Socket]
    outputs: dict[str, Socket]


# Reading annotations is slow, and a class does not change.
@cache
def sockets_of(component: type) -> Sockets:
    """Reads the sockets of a component class; raises ConfigError when `run` does not follow the contract."""
    run = getattr(component, "run", None)
    if run is None:
        raise ConfigError(f"{component.__name__}: no method 'run'; a component defines run(self, *, …) -> Outputs.")
    try:
        hints = get_type_hints(run, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"{component.__name__}.run: its annotations cannot be read ({error}); import the types at module level."
        ) from error
    inputs = {}
    # The first parameter is self.
    for name, parameter in list(inspect.signature(run).parameters.items())[1:]:
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise ConfigError(f"{component.__name__}.run: '{name}' is not keyword-only; write run(self, *, {name}: …).")
        if name not in hints:
            raise ConfigError(f"{component.__name__}.run: input '{name}' has no annotation; write its payload type.")
        inputs[name] = _read(name, hints[name], parameter.default is inspect.Parameter.empty)
    returned = hints.get("return")
    if returned is types.NoneType:
        return Sockets(inputs, {})
    if not (isinstance(returned, type) and dataclasses.is_dataclass(returned)):
        shown = "nothing" if returned is None else type_text(returned)
        raise ConfigError(
            f"{component.__name__}.run: returns {shown}; expected a frozen dataclass with one field per output."
        )
    fields = get_type_hints(returned, include_extras=True)
    outputs = {f.name: _read(f.name, fields[f.name], True) for f in dataclasses.fields(returned)}
    return Sockets(inputs, outputs)


def _read(name: str, hint: Any, required: bool) -> Socket:
    rows: str | None = None
    is_list = False

    def strip(h: Any) -> tuple[Any, ...]:
        nonlocal rows, is_list
        if hasattr(h, "__metadata__"):
            rows = next((m.input for m in h.__metadata__ if isinstance(m, same_rows)), rows)
            return strip(get_args(h)[0])
        if get_origin(h) in (Union, UnionType):
            return tuple(t for member in get_args(h) if member is not types.NoneType for t in strip(member))
        if get_origin(h) is list:
            is_list = True
            return strip(get_args(h)[0])
        return (h,)

    return Socket(name, strip(hint), is_list, required, rows)


def _fits(possible: Any, accepted: Any) -> bool:
    if accepted is Any or possible is Any:
        return True
    if isinstance(possible, type) and isinstance(accepted, type):
        return issubclass(possible, accepted)
    return bool(possible == accepted)


@dataclass(frozen=True)
class Wire:
    """The output `source.output` of `delay` iterations ago; with `newest` the newest one that is not older."""

    source: str
    output: str
    delay: int = 0
    newest: bool = False

    @property
    def age(self) -> str:
        """`@k`, `@<=k` or nothing, as a graph's text has it."""
        return f"@{'<=' if self.newest else ''}{self.delay}" if self.delay else ""

    def __str__(self) -> str:
        return f"{self.source}.{self.output}{self.age}"


@dataclass(frozen=True)
class Node:
    """A node of a checked graph.

    Attributes:
        name: unique in the graph.
        use: registered component or "module:Class", as written.
        cls: the component class.
        config: its checked settings.
        wires: input socket → its wires, one for a single input, any number for a list; unwired optional inputs are
            absent.
        settings: the settings as written.
    """

    name: str
    use: str
    cls: type[Component]
    config: Any
    wires: dict[str, list[Wire]]
    settings: dict[str, Any]

    @property
    def sockets(self) -> Sockets:
        """Inputs and outputs of the class."""
        return sockets_of(self.cls)  # type: ignore[arg-type]  # mypy checks the __hash__ of instances

    @property
    def all_wires(self) -> list[tuple[str, Wire]]:
        """(input socket, wire) of every wire that ends here."""
        return [(socket, wire) for socket, wires in self.wires.items() for wire in wires]

    def outputs_of(self, kind: type | UnionType) -> list[str]:
        """Names of the outputs that carry this class."""
        return [name for name, socket in self.sockets.outputs.items() if socket.carries(kind)]

    @property
    def placement(self) -> Placement:
        """ "replica" or "collective", see `Component`."""
        return self.cls.placement
