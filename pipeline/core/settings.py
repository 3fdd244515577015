"""Typed settings: a plain dictionary from YAML becomes a component's `Config`, or a list of problems."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import types
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from creditgraph.pipeline.core.errors import did_you_mean, nearest
from creditgraph.pipeline.core.foreign import ours

_FAILED = object()


class SettingsError(ValueError):
    """Raised by `__post_init__` of settings that build further settings, such as an objective's `config`.

    Args:
        problems: sentences from `build_config`, whose places are relative to the settings that raise.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


def build_config(config_class: type, values: Mapping[str, Any] | None, place: str) -> tuple[Any, list[str]]:
    """Builds a settings dataclass from plain values.

    Unknown and missing keys, wrong types at any depth and errors of `__post_init__` are all collected; a user's mistake
    never raises.

    Args:
        config_class: a dataclass, possibly with nested dataclasses.
        values: setting → value, as read from YAML; None means no settings.
        place: what the sentences start with, such as the node's name.

    Returns:
        (config, []) or (None, problems).
    """
    problems: list[str] = []
    config = _build(config_class, {} if values is None else values, place, problems)
    return (None, problems) if problems else (config, [])


def check_fields(config_class: type, values: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """Checks names and types of some fields of a dataclass, of another package perhaps, without building it.

    Returns:
        (converted values, problems as those of `build_config`).
    """
    problems: list[str] = []
    hints = {f.name: _hints(config_class)[f.name] for f in dataclasses.fields(config_class) if f.init}
    converted = {}
    for name, value in values.items():
        if name not in hints:
            problems.append(f"{place}.{name}: unknown setting.{did_you_mean(str(name), hints)}")
        else:
            converted[name] = _convert(hints[name], value, f"{place}.{name}", problems)
    return converted, problems


def type_text(hint: Any) -> str:
    """A type as it is shown to a user.

    >>> type_text(Literal["std", "mean"]), type_text(tuple[int, ...]), type_text(float | None)
    ("'std' or 'mean'", 'tuple[int, ...]', 'float or None')
    """
    origin = get_origin(hint)
    args = get_args(hint)
    if hasattr(hint, "__metadata__"):
        return type_text(args[0])
    if origin is Literal:
        return " or ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(a) for a in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_text(a) for a in args)}]"
    if hint is Ellipsis:
        return "..."
    if hint is types.NoneType or hint is None:
        return "None"
    return getattr(hint, "__name__", str(hint))


def _build(config_class: type, values: Any, place: str, problems: list[str]) -> Any:
    if isinstance(values, config_class):
        return values
    if not isinstance(values, Mapping):
        step = _first(config_class, values, place)
        problems.append(f"{place}: expected settings as 'name: value' pairs, got {_shown(values)}.{step}")
        return _FAILED
    if not dataclasses.is_dataclass(config_class):
        problems.append(
            f"{place}: the component's Config is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it."
        )
        return _FAILED
    try:
        hints = _hints(config_class)
    except (NameError, TypeError) as error:
        problems.append(
            f"{place}: the types of {config_class.__qualname__} cannot be read ({error}); define them at module level."
        )
        return _FAILED
    fields = {f.name: f for f in dataclasses.fields(config_class) if f.init}
    # A class is built only when all of its settings are valid, so __post_init__ sees no wrong types.
    count = len(problems)
    unknown = [str(key) for key in values if key not in fields]
    problems += [f"{place}.{key}: unknown setting.{_meant(config_class, key, place)}" for key in unknown]
    arguments = {}
    for name, f in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], f"{place}.{name}", problems)
        elif f.default is MISSING and f.default_factory is MISSING:
            problems.append(f"{place}.{name}: missing; expected {type_text(hints[name])}.")
    if len(problems) > count:
        return _FAILED
    try:
        return config_class(**arguments)
    except SettingsError as error:
        problems += [f"{place}.{problem}" for problem in error.problems]
        return _FAILED
    except ValueError as error:
        problems.append(f"{place}: {error}")
        return _FAILED


def _meant(config_class: Any, key: str, place: str) -> str:
    """What a user who gives an unknown setting may mean: one deeper down, one that others call so, or the nearest."""
    deeper = settings_named(config_class, key)
    if deeper:
        return f" Did you mean {' or '.join(f'{place}.{name}' for name in deeper[:3])}?"
    known = [f.name for f in dataclasses.fields(config_class) if f.init]
    return ours(key) or (did_you_mean(key, known) if known else " There are no settings here.")


def _first(config_class: Any, value: Any, place: str) -> str:
    """How one value for a group of settings is written: as its choice by name, or as its first setting."""
    if isinstance(value, str) and value in getattr(config_class, "choices", ()):
        return f" Write {place}.use={value}."
    known: Any = config_class if dataclasses.is_dataclass(config_class) else object
    names = [
        f"{place}.{name} ({type_text(hint)})"
        for name, hint in _hints(known).items()
        if get_origin(hint) is not ClassVar
    ]
    return f" Its settings begin with {names[0]}." if names else ""


def _convert(hint: Any, value: Any, place: str, problems: list[str]) -> Any:
    """Walks dataclasses and containers, so that unknown keys are reported at any depth; pydantic converts leaves."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        for member in args:
            nested = dataclasses.is_dataclass(member) and isinstance(value, Mapping | member)
            listed = get_origin(member) in (list, tuple, dict) and isinstance(value, list | tuple | dict)
            if nested or listed:
                return _convert(member, value, place, problems)
    elif dataclasses.is_dataclass(hint):
        return _build(hint, value, place, problems)  # type: ignore[arg-type]
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        return _convert_sequence(hint, value, place, problems)
    elif origin is dict and isinstance(value, Mapping):
        keys = [_convert(args[0], k, place, problems) for k in value]
        return dict(zip(keys, [_convert(args[1], v, f"{place}.{k}", problems) for k, v in value.items()], strict=True))
    return _convert_leaf(hint, value, place, problems)


def _convert_sequence(hint: Any, value: list[Any] | tuple[Any, ...], place: str, problems: list[str]) -> Any:
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is list or args[-1] is Ellipsis:
        members = [args[0]] * len(value)
    elif len(args) == len(value):
        members = list(args)
    else:
        problems.append(f"{place}: expected {len(args)} values ({type_text(hint)}), got {len(value)}.")
        return _FAILED
    return origin(
        _convert(m, v, f"{place}[{i}]", problems) for i, (m, v) in enumerate(zip(members, value, strict=True))
    )


def _convert_leaf(hint: Any, value: Any, place: str, problems: list[str]) -> Any:
    # pydantic converts true to 1, but a user who writes true for a number has made a mistake.
    if isinstance(value, bool) and not _takes_bool(hint):
        problems.append(f"{place}: expected {type_text(hint)}, got {_shown(value)}.")
        return _FAILED
    from pydantic import ValidationError  # 0.2 s, and only needed once there are settings to check

    try:
        converted = _adapter(hint).validate_python(value)
        if isinstance(converted, float) and not math.isfinite(converted):
            problems.append(f"{place}: expected a finite number, got {converted}.")
            return _FAILED
        return converted
    except ValidationError as error:
        reason = ""
        if error.errors()[0]["type"] in (
            "value_error",
            "greater_than",
            "greater_than_equal",
            "less_than",
            "less_than_equal",
        ):
            reason = f" ({error.errors()[0]['msg'].lower()})"
        # The nearest literal, such as "mean" for "maen".
        choices = [
            a for h in (hint, *get_args(hint)) if get_origin(h) is Literal for a in get_args(h) if isinstance(a, str)
        ]
        near = nearest(value, choices) if isinstance(value, str) else ""
        problems.append(f"{place}: expected {type_text(hint)}, got {_shown(value)}{reason}.{near}")
        return _FAILED


def _takes_bool(hint: Any) -> bool:
    args = get_args(hint)
    if get_origin(hint) is Literal:
        return any(isinstance(a, bool) for a in args)
    return hint in (bool, Any, object) or any(_takes_bool(a) for a in args)


@cache
def _hints(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class, include_extras=True)


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"


def place_settings(config_class: Any) -> list[str]:
    """Dotted names of settings that determine where something runs, not what is computed; they may change on a resume.

    They are the fields with ``field(metadata={"place": True})``; a marked field covers everything below it.
    """
    names = []
    hints = _hints(config_class)
    for f in dataclasses.fields(config_class):
        if f.metadata.get("place"):
            names.append(f.name)
        elif dataclasses.is_dataclass(hints[f.name]):
            names += [f"{f.name}.{below}" for below in place_settings(hints[f.name])]
    return names


def settings_named(config_class: Any, name: str) -> list[str]:
    """Dotted names of the settings called `name`, at any depth."""
    found = []
    hints = _hints(config_class)
    for f in dataclasses.fields(config_class):
        if f.name == name:
            found.append(name)
        elif dataclasses.is_dataclass(hints[f.name]):
            found += [f"{f.name}.{below}" for below in settings_named(hints[f.name], name)]
    return found


def setting_docs(config_class: Any) -> dict[str, str]:
    """Setting → the string below its field, or its line under "Attributes:" in the docstring, read from the source.

    Settings without either are omitted, and so are classes whose source is not available.
    """
    docs: dict[str, str] = {}
    bases: list[Any] = [base for base in reversed(config_class.__mro__) if dataclasses.is_dataclass(base)]
    for base in bases:
        # Python keeps no docstring of a field, so the source is parsed.
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        docs |= _docs_in(next(n for n in tree.body if isinstance(n, ast.ClassDef)))
    return docs


def _docs_in(node: ast.ClassDef) -> dict[str, str]:
    attributes = (ast.get_docstring(node) or "").partition("Attributes:")[2]
    lines = re.findall(r"^ *([\w, ]+): (.+)$", attributes, re.MULTILINE)
    docs = {name.strip(): text for names, text in lines for name in names.split(",")}
    for item, after in pairwise(node.body):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(text, str):
            docs[item.target.id] = " ".join(text.split())
    return docs
