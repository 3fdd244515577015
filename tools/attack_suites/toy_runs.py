"""The run that the suites kill and damage: components without models, from the tests."""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "pipeline" / "toys" / "toy_graph.py"
ITERATIONS = 11
SEGMENT = 3  # iterations per archive of records
TIMES = ("seconds/", "utilisation/")

sys.path.insert(0, str(TOY.parent))

import toy_graph as toy

FOLDER = Path()


def use(folder: Path) -> None:
    """Names the folder of all runs."""
    global FOLDER
    FOLDER = folder


@cache
def finished(iterations: int, delay: int = 2, segment: int = 100) -> Path:
    """The run directory of an undisturbed run without overlap; `segment` is the number of iterations per archive."""
    path = FOLDER / f"whole-{iterations}-{delay}-{segment}"
    toy.train(path, iterations, delay=delay, overlap=False, segment=segment)
    return path


def metrics(path: Path) -> list[dict]:
    """The rows of a metrics file that can be read, without times."""
    rows = []
    for line in (path / "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            rows.append({k: v for k, v in row.items() if not k.startswith(TIMES)})
        except (ValueError, AttributeError):
            continue
    return rows


def state(path: Path) -> dict[str, str]:
    """SHA-256 of the files of the final state."""
    newest = path / "checkpoints" / f"{ITERATIONS - 1:06d}"
    return {name: _sum(newest / name) for name in ("tensors.safetensors", "state.json")}


def records(path: Path) -> dict[str, str]:
    """SHA-256 of all that was recorded."""
    folder = path / "record"
    return {str(p.relative_to(folder)): _sum(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
