"""tools/bench_answers runs, and columns cost a fraction of vLLM's own objects."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_answers"


def test_columns_cost_a_fraction_of_objects():
    command = [sys.executable, str(TOOL), "--rows", "4", "--tokens", "1024", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    nanoseconds = [float(found) for found in re.findall(r"read +([\d.]+) ns/token", done.stdout)]
    columns, objects, sglang = nanoseconds
    assert columns < objects / 10
    assert columns < sglang
    assert "rows" in done.stdout.splitlines()[-1]
