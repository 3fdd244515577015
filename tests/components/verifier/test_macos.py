"""Verifiers with what macOS has of Python's functions. Not a Mac: what it lacks is taken away."""

import os
import subprocess
import sys
from pathlib import Path

from creditgraph.pipeline import ROOT

TESTS = (
    "tests/components/verifier/test_function.py::test_its_number_is_the_reward",
    "tests/components/verifier/test_math.py::test_equal_values_in_other_notation",
    "tests/components/verifier/test_math.py::test_threads_of_torch_do_not_disturb_the_workers",
    "tests/components/sandbox/test_sandbox.py::test_without_isolation_limits_still_hold[right]",
    "tests/components/sandbox/test_sandbox.py::test_without_isolation_limits_still_hold[endless]",
)


def test_answers_are_judged_without_functions_of_linux():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "macos")}
    found = "import os, resource; print(hasattr(os, 'sched_getaffinity'), hasattr(resource, 'prlimit'))"
    done = subprocess.run([sys.executable, "-c", found], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(TESTS)} passed" in done.stdout
