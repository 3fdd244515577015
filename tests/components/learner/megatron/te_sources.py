"""TransformerEngine from its Python sources alone, for hosts without CUDA.

The wheel `transformer-engine` (about 1 MB, any platform) holds all its Python modules; the compiled library is another
package of hundreds of MB. `load` imports these sources with a stand-in for that library: classes, signatures, recipes
and the constructors of layers are the real ones, and only what computes is replaced, by plain torch (`te_torch.py`).
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import os
import pickle
import re
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
FOLDER = Path(sys.prefix) / "transformer-engine"
REASON = f"needs TransformerEngine's Python sources in {FOLDER}: tools/test downloads them once (1 MB)"
# The compiled library, and packages that only its exporters and debugging tools need.
ABSENT = ("transformer_engine_torch", "onnx", "onnxscript", "nvdlfw_inspect", "cudnn", "einops")


def run(jobs: list[tuple[str, tuple[Any, ...]]], folder: Path, size: int = 2) -> list[list[Any]]:
    """The results by rank of functions named "file.function", run where TransformerEngine's sources are imported.

    Skips the test where the sources are missing, except in CI.
    """
    if not FOLDER.is_dir():
        (pytest.fail if os.environ.get("CREDITGRAPH_CI") else pytest.skip)(REASON)
    (folder / "jobs").write_bytes(pickle.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", HERE / "te_rank.py", str(rank), str(size), str(port), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=900)[1] for process in started]
    assert [process.returncode for process in started] == [0] * size, "\n".join(errors)[-4000:]
    return [pickle.loads((folder / f"answers{rank}").read_bytes()) for rank in range(size)]


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, sources: Path) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__ = []
        for name, members in _enums(self.sources).items():
            setattr(module, name, enum.IntEnum(name, members, start=0))
        return module

    def exec_module(self, module: Any) -> None:
        """The stand-in is complete."""


def _enums(sources: Path) -> dict[str, list[str]]:
    """The compiled library's enums, with the members that the Python sources name."""
    found: dict[str, dict[str, None]] = {}
    for file in (sources / "transformer_engine" / "pytorch").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for name, member in re.findall(r"\b(?:tex\.)?([A-Z]\w+)\.((?:NVTE_|k[A-Z])\w+)", text):
            found.setdefault(name, {}).setdefault(member)
    constants = (sources / "transformer_engine" / "pytorch" / "constants.py").read_text(encoding="utf-8")
    # Where the sources have a copy of an enum it must have exactly these members.
    mirrored = re.findall(r"^    (k\w+) = ", constants, re.M)
    if mirrored:
        found["DType"] = dict.fromkeys(mirrored)
    return {name: list(members) for name, members in found.items()}


def load(sources: Path) -> Any:
    """Imports transformer_engine; before megatron, in a process of its own."""
    assert "megatron.core" not in sys.modules
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # loads no library
    sys.meta_path.append(_Absent(sources))
    version = next(sources.glob("transformer_engine-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    root: Any = types.ModuleType("transformer_engine")
    root.__path__ = [str(sources / "transformer_engine")]
    root.__version__ = version
    root.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    sys.modules["transformer_engine"] = root
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root.common = importlib.import_module("transformer_engine.common")
        root.common.load_framework_extension = lambda framework: None
        root.pytorch = importlib.import_module("transformer_engine.pytorch")
    return root
