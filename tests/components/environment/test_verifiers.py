"""Environments of the library verifiers, and what is said without it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.components.environment.verifiers import Verifiers
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError

HERE = importlib.util.find_spec("verifiers") is not None
ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(sys.executable) if HERE else ROOT / ".venv-verifiers/bin/python"


@pytest.mark.skipif(
    not PYTHON.exists(), reason="verifiers' environment is missing; make it with tools/other_environment verifiers"
)
def test_with_the_library():
    file = Path(__file__).with_name("with_verifiers.py")
    # Without the conftest files, which leave out files of this name.
    command = [PYTHON, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 passed in" in result.stdout  # none is skipped


def test_without_a_taskset():
    with pytest.raises(
        ConfigError, match=r"node 'environment': no taskset; set environment.taskset to its id or module"
    ):
        Verifiers(Verifiers.Config()).setup(Context(node="environment"))


@pytest.mark.skipif(HERE, reason="verifiers is installed")
def test_without_the_library():
    with pytest.raises(ConfigError, match=r"Install it with: pip install 'creditgraph\[verifiers\]'"):
        Verifiers(Verifiers.Config(taskset="sums")).setup(Context(node="environment"))
