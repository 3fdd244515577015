"""Hostile servers, reward functions and answers, secrets in settings, long runs: attacks that are tests of the project.

A case is one test, by its name in pytest.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
# What is attacked → file, and which of its tests are attacks (a regular expression).
FILES = {
    "verifier.external": ("tests/components/verifier/test_external.py", r"hostile|cannot_be_used|no_numbers|hangs"),
    "verifier.function": (
        "tests/components/verifier/test_function.py",
        r"fails|hangs|bad_prompt|cannot_be_used|leaves_behind|odd_results|dies|never_gives",
    ),
    "verifier.math": (
        "tests/components/verifier/test_math.py",
        r"in_time|poison|bad_item|cannot_be_read|labelled|missing",
    ),
    "values of formulas": ("tests/components/verifier/test_math_value.py", r"test_"),
    "secrets": ("tests/pipeline/run/test_secrets.py", r"test_"),
    "feedback of environment.code": ("tests/components/environment/test_environments.py", r"private"),
    "records of long runs": ("tests/pipeline/run/test_packing.py", r"test_"),
    "names of settings files": ("tests/pipeline/run/test_compose.py", r"broken_file|beside"),
    "claims of interrupted runs": ("tests/pipeline/app/test_results.py", r"interrupted"),
}


@dataclass(frozen=True)
class Case:
    """A test."""

    attacked: str
    test: str

    def __str__(self) -> str:
        return f"{self.attacked}: {self.test}"


def cases() -> list[Case]:
    found = []
    for line in _pytest("--collect-only", "-q", *(file for file, _ in FILES.values())).stdout.splitlines():
        for attacked, (file, which) in FILES.items():
            path, _, test = line.partition("::")
            if path == file and re.search(which, test):
                found.append(Case(attacked, test))
    return found


def quick() -> list[Case]:
    return [case for case in cases() if case.attacked in ("secrets", "claims of interrupted runs")]


def run(case: Case) -> tuple[bool, str]:
    outcome = _outcomes(FILES[case.attacked][0]).get(case.test, "was not run")
    return not outcome, outcome or "passed"


@functools.cache
def _outcomes(file: str) -> dict[str, str]:
    """Test of a file → why it did not pass, "" if it did."""
    with tempfile.TemporaryDirectory() as folder:
        _pytest("-q", "-n", "0", f"--junitxml={folder}/x.xml", file)
        tests = ElementTree.parse(f"{folder}/x.xml").iter("testcase")
        return {test.get("name", ""): " ".join((child.get("message") or "")[:200] for child in test) for test in tests}


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
