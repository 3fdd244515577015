"""The wheel, and environments that pip made for it: of the core alone, and of what tools/quickstart installs."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import creditgraph

CHECKOUT = creditgraph.ROOT.parent
FOLDERS = ("creditgraph", "pipeline", "components", "configs", "slurm")
CONSTRAINTS = CHECKOUT / "tools" / "constraints.txt"
VARIABLES = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    listed += ["pyproject.toml", "README.md", "LICENSE"]
    for name in subprocess.run(listed, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout.split():
        if (CHECKOUT / name).exists():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(CHECKOUT / name, folder / "source" / name, follow_symlinks=False)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([*build, str(folder / "source")], cwd=folder, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel):
    """A folder with what the wheel installs."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(wheel.parent / "site")
    return wheel.parent / "site"


class Environment:
    """A Python of its own. `below` is one whose packages it has too, so that torch is installed once."""

    def __init__(self, folder, below=None):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.python = folder / "bin" / "python"
        self.packages = next(folder.glob("lib/python*/site-packages"))
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n")

    def install(self, *wanted):
        """Installs with the pinned versions; skips the test where packages cannot be downloaded."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-compile"]
        pip += ["--constraint", CONSTRAINTS]
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            missing = re.search("No matching distribution|Could not find a version|onnection", done.stderr)
            skip = pytest.skip if missing and not os.environ.get("CREDITGRAPH_CI") else pytest.fail
            skip(f"pip install {' '.join(map(str, wanted))}: {done.stderr[-800:]}")

    def run(self, folder, *command):
        """The output of `python command`, and its exit code."""
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | VARIABLES
        variables["PATH"] = f"{self.python.parent}:{variables['PATH']}"
        return subprocess.run(
            [self.python, *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
        )

    def creditgraph(self, folder, *arguments):
        """What a command prints; it must succeed."""
        done = self.run(folder, self.python.parent / "creditgraph", *arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def core(wheel, tmp_path_factory):
    """`pip install creditgraph`, and nothing else."""
    environment = Environment(tmp_path_factory.mktemp("core"))
    # Pinned first, so that pip takes a local CPU build where there is one.
    environment.install(next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch==")))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="session")
def default(wheel, core, tmp_path_factory):
    """What tools/quickstart installs."""
    (extras,) = re.findall(r"^make_environment (\S+)$", (CHECKOUT / "tools" / "quickstart").read_text(), re.MULTILINE)
    environment = Environment(tmp_path_factory.mktemp("default"), below=core)
    # Its own copy of the wheel, so that it has the command too.
    environment.install("--no-deps", "--ignore-installed", wheel)
    environment.install(f"{wheel}[{extras}]")
    return environment
