"""Task families: generated problems whose every step can be checked. `TASKS` maps a name to its task.

A new family is one file with a subclass of `components.tasks.base.Task` and one line in `MODULES`. Data sections name
it (``source: NAME``); nothing else knows a family by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module

from components.tasks.base import Task

# Name → "module:Class"; strings, so that listing families imports none.
MODULES: dict[str, str] = {
    "chains": "components.tasks.chains:Chains",
    "chains_reset": "components.tasks.chains_reset:ChainsReset",
    "hanoi": "components.tasks.hanoi:Hanoi",
    "path_star": "components.tasks.path_star:PathStar",
    "jugs": "components.tasks.jugs:Jugs",
    "gsm_symbolic": "components.tasks.gsm_symbolic:GsmSymbolic",
    "mini_sudoku": "components.tasks.mini_sudoku:MiniSudoku",
}


class _Tasks(Mapping[str, Task]):
    """Name → task, imported and made once, when it is first asked for."""

    def __getitem__(self, name: str) -> Task:
        return _load(MODULES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)

    def __contains__(self, name: object) -> bool:
        return name in MODULES


@cache
def _load(target: str) -> Task:
    module, _, name = target.partition(":")
    task = getattr(import_module(module), name)()
    assert isinstance(task, Task)
    return task


TASKS: Mapping[str, Task] = _Tasks()
