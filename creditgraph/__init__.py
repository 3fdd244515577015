"""creditgraph: the public names, for plug-ins and for notebooks.

    from creditgraph import Component, Credit, Trajectories, same_rows
    run = creditgraph.train("toy_srpo", iterations=20)

`__init__.pyi` lists the names. One is imported on first use, so `creditgraph --help` does not wait for torch.

In a checkout the folders `pipeline`, `components`, `configs` and `slurm` of this package are links to those beside it;
an installed package holds them.
"""

import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

if sys.platform == "win32":
    raise ImportError("creditgraph runs on Linux, and not on Windows itself; install it in WSL (wsl --install).")


@cache
def _modules() -> dict[str, str]:
    """Public name → its module, as the stub file lists them for type checkers."""
    lines = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {alias.name: f"creditgraph.{line.module or ''}" for line in imports for alias in line.names}


def __getattr__(name: str) -> Any:
    if name not in _modules():
        raise AttributeError(f"module 'creditgraph' has no attribute '{name}'")
    module = _modules()[name]
    return import_module(f"{module}{name}") if module.endswith(".") else getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(_modules())
