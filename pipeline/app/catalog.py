"""The catalogue of components: inputs, outputs and settings of each."""

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, raised_text
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.registry import load_class
from creditgraph.pipeline.core.settings import setting_docs, type_text
from creditgraph.pipeline.core.sockets import Socket, sockets_of


@dataclass(frozen=True)
class Setting:
    """One documented setting.

    Attributes:
        name: field name; dotted for a field of a nested dataclass.
        type: as shown to a user.
        default: as Python writes it, "" if the setting is required.
        doc: the string below the field.
    """

    name: str
    type: str
    default: str
    doc: str


@dataclass(frozen=True)
class Entry:
    """One component.

    Attributes:
        summary: first line of its docstring.
        doc: the whole docstring.
        takes: input → type as text, for example "Rewards (rows of trajectories)" or "Verifier, optional".
        makes: output → type as text.
        settings: documented settings, nested ones with dotted names.
        metrics: definitions of the numbers that it logs.
        paper: arXiv id or name of the source, "" without one.
        placement: "replica" or "collective".
        problem: why the class cannot be loaded, "" where it can; then only `summary` says something.
    """

    summary: str
    doc: str = ""
    takes: dict[str, str] = field(default_factory=dict)
    makes: dict[str, str] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    metrics: tuple[Metric, ...] = ()
    paper: str = ""
    placement: str = ""
    problem: str = ""


def describe(use: str) -> Entry:
    """Reads one component, by its registered name or "module:Class"; raises ConfigError if it does not exist."""
    cls = load_class(use)
    if not issubclass(cls, Component):
        raise ConfigError(f"{use} is not a component; derive it from creditgraph.Component.")
    sockets = sockets_of(cls)
    doc = inspect.cleandoc(cls.__doc__ or "")
    return Entry(
        summary=doc.partition("\n")[0],
        doc=doc,
        takes={name: _socket_text(socket) for name, socket in sockets.inputs.items()},
        makes={name: _socket_text(socket) for name, socket in sockets.outputs.items()},
        settings=settings_of(cls.Config),
        metrics=cls.metrics,
        paper=cls.paper,
        placement=cls.placement,
    )


def listed(use: str) -> Entry:
    """`describe`, or an entry with the problem: one class that cannot be loaded does not end a listing."""
    try:
        return describe(use)
    except Exception as error:  # importing the code of others may fail in any way
        problem = str(error) if isinstance(error, CreditgraphError) else raised_text(error)
        return Entry(summary=f"cannot be loaded: {problem}", problem=problem)


def settings_of(config_class: type) -> list[Setting]:
    """The documented settings of a dataclass, such as `RunSettings`; nested ones with dotted names."""
    return list(_settings(config_class))


def _socket_text(socket: Socket) -> str:
    rows = f" (rows of {socket.same_rows})" if socket.same_rows else ""
    return socket.type_text + rows + ("" if socket.required else ", optional")


def _settings(config_class: Any, prefix: str = "") -> Iterator[Setting]:
    hints = get_type_hints(config_class, include_extras=True)
    docs = setting_docs(config_class)
    for f in dataclasses.fields(config_class):
        hint = hints[f.name]
        # A user sets the fields of a nested class, so they are listed instead of the class.
        if dataclasses.is_dataclass(hint):
            yield from _settings(hint, f"{prefix}{f.name}.")
            continue
        if f.name == "config" and (choices := getattr(config_class, "choices", None)):
            for use, target in choices.items():
                for setting in _settings(load_class(target).Config, f"{prefix}config."):
                    yield dataclasses.replace(setting, name=f"{setting.name} ({use})")
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        text = "" if default is dataclasses.MISSING else repr(default)
        yield Setting(prefix + f.name, type_text(hint), text, docs.get(f.name, ""))
