"""tools/wheels: what a machine with torch, numpy and transformers alone lacks, installed there without a network."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def tool():
    loader = SourceFileLoader("wheels", str(ROOT / "tools" / "wheels"))
    module = module_from_spec(spec_from_loader("wheels", loader))
    loader.exec_module(module)
    return module


def closure(names):
    """Names of installed packages and of all that they need."""
    found, left = set(), list(names)
    while left:
        name = left.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            left += [r.name for r in map(Requirement, needs) if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def bare(folder):
    """A Python that has torch, numpy and transformers, and what they need, of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in closure(("torch", "numpy", "transformers")):
        of = distribution(name)
        for top in {Path(f).parts[0] for f in of.files or () if not str(f).startswith("..")} - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(of.locate_file(top))
            if sys.pycache_prefix:  # kept by path: torch would be compiled once more
                compiled, here = (sys.pycache_prefix + str(Path(p) / top) for p in (of.locate_file(""), packages))
                if os.path.isdir(compiled) and not os.path.exists(here):
                    os.makedirs(os.path.dirname(here), exist_ok=True)
                    os.symlink(compiled, here)
    return folder / "bin" / "python"


def accept(python, checkout, out, scratch, stage):
    command = [python, checkout / "tools/gpu_acceptance", "--device", "cpu", "--small", "--out", out]
    command += ["--scratch", scratch, "--stage", stage]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"OMP_NUM_THREADS": "1"}, check=False
    )
    return done.stdout.splitlines()[0].split()[:2], done.stdout + done.stderr


@pytest.mark.slow
def test_a_bare_machine_trains_with_what_was_collected(tmp_path):
    checkout, wheels, scratch = tmp_path / "copy", tmp_path / "wheels", tmp_path / "scratch"
    # A copy without .venv, as a machine has it.
    ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "__pycache__", ".*_cache", "shared")
    shutil.copytree(ROOT, checkout, ignore=ignored, symlinks=True)
    python = bare(tmp_path / "bare")
    status, said = accept(python, checkout, tmp_path / "before", scratch, "toys")
    assert status == ["toys", "not"], said  # not run: a package is missing

    made = subprocess.run(
        [sys.executable, ROOT / "tools/wheels", wheels, "--python", PYTHON, "--extra", "train"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    names = {line.partition("==")[0] for line in (wheels / "requirements.txt").read_text().splitlines()}
    assert {"hydra-core", "omegaconf", "antlr4-python3-runtime", "pydantic", "pydantic-core", "pytest"} <= names
    assert not names & {"torch", "numpy", "transformers", "tokenizers", "triton", "networkx"}
    assert len(list(wheels.glob("*.whl"))) == len(names)
    offline = [
        "install",
        "-q",
        "--no-compile",
        "--no-index",
        "--no-deps",
        "--find-links",
        wheels,
        "-r",
        wheels / "requirements.txt",
    ]
    target = ["--target", tmp_path / "added", "--no-warn-conflicts"]
    subprocess.run([sys.executable, "-m", "pip", *offline, *target], check=True)
    (packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    (packages / "added.pth").write_text(f"import sys; sys.path.insert(1, {str(tmp_path / 'added')!r})\n")
    status, said = accept(python, checkout, tmp_path / "after", scratch, "toys")
    assert status == ["toys", "passed"], said


def test_what_is_there_is_left_out_with_what_it_alone_needs():
    def package(name, *needs):
        return {"metadata": {"name": name, "version": "1", "requires_dist": list(needs)}}

    report = {
        "install": [
            package("torch", "triton", "shared"),
            package("triton"),
            package("shared"),
            package("A_b", "torch", "shared>=1", 'extra-of-c; extra == "more"', 'windows; sys_platform == "win32"'),
            package("c", "deep", 'extra-of-c; extra == "more"'),
            package("deep"),
            package("extra-of-c"),
            package("windows"),
        ]
    }
    environment = {"sys_platform": "linux"}
    pins = tool().kept(report, ["a-b", "torch", "c[more]"], environment)
    assert pins == ["a-b==1", "c==1", "deep==1", "extra-of-c==1", "shared==1"]
    assert tool().kept(report, ["c"], environment) == ["c==1", "deep==1"]


def test_what_is_wanted_is_what_the_project_declares():
    texts = tool().wanted(["megatron"])
    names = {Requirement(t).name for t in texts}
    assert {"megatron-core", "mbridge", "transformers", "hydra-core"} <= names  # megatron needs train
    assert "creditgraph" not in names
