"""Loads single functions of a trainer from a folder with its source, without the trainer's dependencies.

The statements of a module run one by one. An import that fails, or is not of a few libraries, leaves a stand-in; any other
statement that fails is left out. A stand-in that is called raises, so a function that needs one is not judged.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Libraries that are imported, beside Python's own and the trainer's; the others take seconds, or fail.
IMPORTED = {"einops", "loguru", "numpy", "omegaconf", "packaging", "pandas", "pydantic", "torch", "typing_extensions"}


class StandIn:
    """What an import left out is bound to: names, subscripts and bases of it are stand-ins; a call raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.name}.{name}")

    def __getitem__(self, _: Any) -> StandIn:
        return self

    def __or__(self, _: Any) -> StandIn:
        return self

    __ror__ = __or__
    __iter__ = None  # otherwise subscripts would make an endless loop

    def __mro_entries__(self, _: Any) -> tuple[()]:
        return ()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{self.name} was left out; the function needs it")


class _Loader(importlib.abc.Loader):
    def __init__(self, file: Path) -> None:
        self.file = file

    def exec_module(self, module: ModuleType) -> None:
        space = vars(module)
        space["logger"] = space["LOGGER"] = logging.getLogger("field")
        if not self.file.exists():  # a folder without __init__.py
            return
        for statement in ast.parse(self.file.read_text(encoding="utf-8")).body:
            try:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    self._refuse_others(statement, module.__name__)
                exec(compile(ast.Module([statement], []), str(self.file), "exec"), space)
            except Exception:  # a module from outside may fail in any way
                _leave_out(statement, space, str(self.file))


    def _refuse_others(self, statement: ast.Import | ast.ImportFrom, own: str) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.level:
            return
        name = statement.module if isinstance(statement, ast.ImportFrom) else statement.names[0].name
        top = str(name).partition(".")[0]
        if top not in {*IMPORTED, *sys.stdlib_module_names, own.partition(".")[0]}:
            raise ImportError(top)


def _leave_out(statement: ast.stmt, space: dict[str, Any], file: str) -> None:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.decorator_list:
        statement.decorator_list = []  # a registry that needs a cluster, an actor's decorator
        try:
            exec(compile(ast.Module([statement], []), file, "exec"), space)
        except Exception:  # it stays left out
            return
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            space.setdefault(name, StandIn(alias.name))
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                space.setdefault(target.id, StandIn(target.id))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path, package: str) -> None:
        self.folder, self.package = folder, package

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        place = self.folder.joinpath(*name.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not place.is_dir() and not file.exists():
            return None
        spec = importlib.machinery.ModuleSpec(name, _Loader(file), origin=str(file), is_package=place.is_dir())
        spec.submodule_search_locations = [str(place)] if place.is_dir() else None
        return spec


class Source:
    """A trainer's source: a folder that holds its package, or what this Python imports.

    Args:
        folder: the folder, None for an installed package.
        package: its top-level package.
    """

    def __init__(self, folder: Path | None, package: str) -> None:
        if folder is not None:
            sys.meta_path.insert(0, _Finder(folder, package))

    def module(self, name: str) -> ModuleType:
        """A module by its dotted name."""
        return importlib.import_module(name)

    def one_process(self) -> None:
        """A process group of this process alone, for functions that reduce over ranks."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def get(self, place: str) -> Any:
        """What "package.module:name" or "package.module:Class.method" names."""
        module, _, names = place.partition(":")
        found: Any = self.module(module)
        for name in names.split("."):
            if not hasattr(found, name):
                raise AttributeError(f"{place}: {name} is not there, or its definition was left out")
            found = getattr(found, name)
        return found

    def lines(self, place: str, first: str, last: str, result: str) -> Any:
        """A function of keyword arguments that runs some statements of a function, for what has none of its own.

        Args:
            place: the function they are in.
            first, last: text that the first and the last statement contain; they are in the same block.
            result: the name whose value is returned.
        """
        module = self.module(place.partition(":")[0])
        file = str(getattr(module, "__file__", None) or (module.__spec__ and module.__spec__.origin))
        names = place.partition(":")[2].split(".")
        tree: Any = ast.parse(Path(file).read_text(encoding="utf-8"))
        for name in names:
            tree = next(n for n in ast.walk(tree) if getattr(n, "name", None) == name)
        for node in ast.walk(tree):
            for block in (getattr(node, part, None) for part in ("body", "orelse")):
                texts = [ast.unparse(statement) for statement in block] if isinstance(block, list) else []
                begin = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
                end = next((i for i, text in enumerate(texts) if last in text and i >= (begin or 0)), None)
                if begin is None or end is None:
                    continue
                code = compile(ast.Module(block[begin : end + 1], []), file, "exec")

                def run(**given: Any) -> Any:
                    space = {**vars(module), **given}
                    exec(code, space)
                    return space[result]

                return run
        raise AttributeError(f"{place}: no block from {first!r} to {last!r}")
