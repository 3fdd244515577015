"""tools/task_rows writes the shipped rows again, whatever the hash seed of the shell."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from creditgraph.lab.tasks.library import ROWS

pytestmark = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="no reasoning_gym: pip install 'creditgraph[tasks]'"
)
TOOL = Path(__file__).parents[3] / "tools" / "task_rows"


def test_the_shipped_rows_are_what_the_tool_writes(tmp_path):
    done = subprocess.run(
        [sys.executable, TOOL, "--out", tmp_path, "mini_sudoku"],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert "3357 rows" in done.stdout
    assert "left out: 1 fewer empty cells than asked for, 2 repeated" in done.stdout
    written, shipped = (pq.read_table(folder / "mini_sudoku.parquet") for folder in (tmp_path, ROWS))
    assert written.equals(shipped)


def test_an_unknown_family_is_refused():
    done = subprocess.run([sys.executable, TOOL, "sokoban"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sokoban: expected some of gsm_symbolic, mini_sudoku" in done.stderr
