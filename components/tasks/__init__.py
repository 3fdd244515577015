"""Task families: generated problems whose every step can be checked. `TASKS` maps a name to its task.

A new family is one file with a subclass of `creditgraph.components.tasks.base.Task` and one line in `BUILTIN`, or an
entry point of the group ``creditgraph.tasks`` in another package, as `creditgraph.lab` has. Data sections name it
(``source: NAME``); nothing else knows a family by its name.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from creditgraph.components.tasks.base import Task

ENTRY_POINT_GROUP = "creditgraph.tasks"

# Name → "module:Class"; strings, so that listing families imports none.
BUILTIN: dict[str, str] = {"chains": "creditgraph.components.tasks.chains:Chains"}


@cache
def known_tasks() -> dict[str, str]:
    """Name → "module:Class" of every family, built-in and from entry points."""
    added = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    return BUILTIN | {entry.name: entry.value for entry in added if entry.name not in BUILTIN}


class _Tasks(Mapping[str, Task]):
    """Name → task, imported and made once, when it is first asked for."""

    def __getitem__(self, name: str) -> Task:
        return _load(known_tasks()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(known_tasks())

    def __len__(self) -> int:
        return len(known_tasks())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in known_tasks()


@cache
def _load(target: str) -> Task:
    module, _, name = target.partition(":")
    task = getattr(import_module(module), name)()
    assert isinstance(task, Task)
    return task


TASKS: Mapping[str, Task] = _Tasks()
