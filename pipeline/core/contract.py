"""Checks one class against the component contract, on which graphs, recordings and restarts rely.

`creditgraph check package.module:Class` prints the findings; a component that follows the contract has none.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, get_type_hints

import torch

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.payloads import Payload
from creditgraph.pipeline.core.registry import OF_FILE
from creditgraph.pipeline.core.settings import setting_docs, type_text
from creditgraph.pipeline.core.sockets import Socket, sockets_of

# Components import these in `setup` and not at module level, so that a graph can be checked in milliseconds.
LATE_IMPORTS = ("transformers", "datasets", "vllm", "sglang", "megatron")
MAX_INIT_SECONDS = 0.1
IMPORT_SECONDS = 120.0  # of a fresh interpreter; torch alone takes ten on a busy host
MAX_SUMMARY = 120  # characters; the line is a cell of a table


def check_component(cls: type) -> list[str]:
    """Returns a sentence for each violation of the contract, with the fix; [] for a class that follows it.

    The class is built when its settings all have defaults, but `setup` is not called and no model is loaded.
    """
    if not (isinstance(cls, type) and issubclass(cls, Component)):
        return [f"{getattr(cls, '__name__', cls)} is not a component; derive it from creditgraph.Component."]
    checks = (_docstring, _settings, _sockets, _state_methods, _imports, _built)
    return [f"{cls.__name__}{sentence}" for check in checks for sentence in check(cls)]


def _docstring(cls: Any) -> Iterator[str]:
    doc = inspect.cleandoc(cls.__dict__.get("__doc__") or "")
    first = doc.partition("\n")[0]
    if not doc:
        yield " has no docstring; its first line is shown by 'creditgraph components'."
    elif len(first) > MAX_SUMMARY:
        yield f": the first line of its docstring has {len(first)} characters; keep it to one line of {MAX_SUMMARY}."
    if cls.placement not in ("replica", "collective"):
        yield f".placement is {cls.placement!r}; expected 'replica' or 'collective'."
    if not isinstance(cls.paper, str):
        yield f".paper is {cls.paper!r}; expected an arXiv id or a name as a string."


def _settings(cls: Any) -> Iterator[str]:
    yield from _settings_class(f".{cls.Config.__name__}", cls.Config, set())


def _settings_class(place: str, config: Any, seen: set[Any]) -> Iterator[str]:
    if config in seen:  # settings may contain their own class
        return
    seen.add(config)
    if not dataclasses.is_dataclass(config):
        yield f"{place} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above it."
        return
    if not _frozen(config):
        yield f"{place} is not frozen, but settings never change; write @dataclass(frozen=True, kw_only=True)."
    positional = [f.name for f in dataclasses.fields(config) if f.init and not f.kw_only]
    if positional:
        yield f"{place} takes {', '.join(positional)} by position; write @dataclass(frozen=True, kw_only=True)."
    if not dataclasses.fields(config):
        return
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError) as error:
        yield f"{place}: its types cannot be read ({error}); define them at module level."
        return
    documented = setting_docs(config)
    for f in dataclasses.fields(config):
        if f.init and not documented.get(f.name):
            yield f"{place}.{f.name} has no docstring; write a string below it that says its unit and what it changes."
        for nested in (hints[f.name], *getattr(hints[f.name], "__args__", ())):
            if isinstance(nested, type) and dataclasses.is_dataclass(nested):
                yield from _settings_class(f"{place}.{f.name}", nested, seen)


def _frozen(cls: Any) -> bool:
    return bool(cls.__dataclass_params__.frozen)


def _sockets(cls: Any) -> Iterator[str]:
    try:
        sockets = sockets_of(cls)
    except ConfigError as error:
        yield str(error).removeprefix(cls.__name__)
        return
    returned = get_type_hints(cls.run).get("return")
    if dataclasses.is_dataclass(returned) and not _frozen(returned):
        yield f".run returns {type_text(returned)}, which is not frozen; write @dataclass(frozen=True, kw_only=True)."
    for kind, group in (("input", sockets.inputs), ("output", sockets.outputs)):
        for name, socket in group.items():
            # An output may also have the rows of another output.
            others = {} if kind == "input" else {n: s for n, s in sockets.outputs.items() if n != name}
            yield from _socket(kind, name, socket, others | sockets.inputs)
    for name, parameter in inspect.signature(cls.run).parameters.items():
        if parameter.default not in (inspect.Parameter.empty, None):
            yield f".run: input '{name}' defaults to {parameter.default!r}; an optional input is 'T | None = None'."


def _socket(kind: str, name: str, socket: Socket, named: dict[str, Socket]) -> Iterator[str]:
    for member in socket.types:
        if not (isinstance(member, type) and issubclass(member, Payload)):
            yield f".run: {kind} '{name}' is {type_text(member)}; expected a payload, subclass creditgraph.Payload."
    if kind == "output" and socket.is_list:
        yield f".run: output '{name}' is a list; expected one payload per output."
    if socket.same_rows == name and kind == "input":
        yield f".run: input '{name}' is annotated with its own rows; name another input."
    elif socket.same_rows is not None and socket.same_rows not in named:
        hint = did_you_mean(socket.same_rows, named)
        yield f".run: {kind} '{name}' has same_rows('{socket.same_rows}'), but there is no such input.{hint}"


def _state_methods(cls: Any) -> Iterator[str]:
    saves, loads = (getattr(cls, n) is not getattr(Component, n) for n in ("state_dict", "load_state_dict"))
    if saves != loads:
        has, misses = ("state_dict", "load_state_dict") if saves else ("load_state_dict", "state_dict")
        yield f" defines {has} but not {misses}; a restart needs both."


def _imports(cls: Any) -> Iterator[str]:
    """Imports the module in a fresh interpreter, as other modules may have loaded the heavy ones here already."""
    loaded = f"[m for m in {LATE_IMPORTS!r} if m in sys.modules]"
    load = f"import {cls.__module__}"
    if cls.__module__.startswith(OF_FILE):  # only this process has the module of a file
        load = f"import runpy; runpy.run_path({sys.modules[cls.__module__].__file__!r})"
    code = f"import sys; sys.path[:] = {sys.path!r}; {load}; print(*{loaded})"
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        where = "a script" if cls.__module__ == "__main__" else "a function"
        yield f" is defined in {where}; move it to a module so that a graph can name it."
        return
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield f": importing {cls.__module__} alone took more than {IMPORT_SECONDS:g} s; do less on import."
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield f": importing {cls.__module__} alone fails with {last}"
    elif done.stdout.split():
        names = ", ".join(done.stdout.split())
        yield f": importing {cls.__module__} loads {names}; import them inside setup or where they are used."


def _built(cls: Any) -> Iterator[str]:
    """Checks that need an instance: it is cheap to build, initial outputs are declared, the state can be restored."""
    source = _own_init(cls)
    if source is not None and "config" not in [a.arg for a in source.args.args]:
        yield (
            ".__init__ takes no 'config'; write def __init__(self, config: Config | None = None) and call "
            "super().__init__(config)."
        )
    try:
        config = cls.Config()
    except (TypeError, ValueError):
        return  # a setting is required, so no instance can be built here; the component's own tests check the rest
    started = time.perf_counter()
    try:
        component = cls(config)
    except Exception as error:
        yield f"(Config()) raises {type(error).__name__}: {error}; the default settings must build."
        return
    seconds = time.perf_counter() - started
    if seconds > MAX_INIT_SECONDS:
        yield f".__init__ took {seconds:.1f} s; load models and files in setup(context)."
    yield from _initial(cls, component)
    yield from _state(cls, component)


def _own_init(cls: Any) -> ast.FunctionDef | None:
    if "__init__" not in cls.__dict__:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    except (OSError, TypeError, SyntaxError):
        return None
    return tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else None


def _initial(cls: Any, component: Component) -> Iterator[str]:
    if cls.initial is Component.initial:
        return
    try:
        values = component.initial()
        outputs = sockets_of(cls).outputs
    except Exception:
        return  # it may need what setup loads
    for name, value in values.items():
        if name not in outputs:
            yield f".initial returns '{name}', which is not an output.{did_you_mean(name, outputs)}"
        elif not any(isinstance(value, t) for t in outputs[name].types if isinstance(t, type)):
            yield f".initial: '{name}' is {type(value).__name__}; expected {outputs[name].type_text}."


def _state(cls: Any, component: Component) -> Iterator[str]:
    if cls.state_dict is Component.state_dict or cls.load_state_dict is Component.load_state_dict:
        return
    try:
        before = component.state_dict()
        again = cls(component.config)
    except Exception:
        return  # it may need what setup loads
    bad = list(_unstorable("", before))
    yield from (f".state_dict: {place}; expected a nested dict of tensors, numbers, strings, lists." for place in bad)
    try:
        again.load_state_dict(before)
        after = again.state_dict()
    except Exception as error:
        yield f".load_state_dict does not accept the result of state_dict: {type(error).__name__}: {error}"
        return
    if not bad and not _same(before, after):
        yield ".state_dict after load_state_dict differs from what was loaded; a restart would not continue the run."


def _unstorable(place: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"key {key!r}{f' in {place}' if place else ''} is {type(key).__name__}, not str"
            yield from _unstorable(f"{place}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _unstorable(f"{place}[{index}]", item)
    elif not isinstance(value, torch.Tensor | int | float | str | bool | None):
        yield f"'{place}' is {type(value).__name__}"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)
