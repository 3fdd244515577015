"""Checking a graph without importing torch, which takes longer than everything else that a check does.

A check reads signatures, annotations and settings of component classes; it runs none of them. So while `without_torch` is active,
`import torch` (and numpy, pyarrow and httpx, which are slow too) gives stand-ins: modules whose every attribute is an empty class, good
for annotations, base classes, decorators and tables of dtypes. Whatever needs more than that (a comparison, arithmetic, a truth value)
raises; so may a mistake of the user. Both start the command again, with the real torch, whose word is the last.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

AGAIN = "CREDITGRAPH_CHECK_WITH_TORCH"
ABSENT = ("torch", "numpy", "pyarrow", "httpx")


@contextmanager
def without_torch(again: Callable[[], Any] | None = None) -> Iterator[bool]:
    """Inside, torch is a stand-in, unless this process has it already; says whether it is.

    Modules imported inside keep their stand-ins, so a process that does this must not run components afterwards.

    Args:
        again: called after an exception inside; by default replaces this process by the same command with the real torch.
    """
    if "torch" in sys.modules or os.environ.get(AGAIN):
        yield False
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield True
    except Exception:
        (again or _again)()
        raise
    finally:
        sys.meta_path.remove(finder)


def _again() -> None:
    os.environ[AGAIN] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _Absent(type):
    """A class of which nothing is known: any attribute is another one, a call returns what it would decorate."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Absent(name, (), {"__module__": cls.__module__})
        setattr(cls, name, made)
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type) else cls

    def __bool__(cls) -> bool:
        raise TypeError(f"{cls.__name__} is a stand-in without a truth value")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Absent(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""
