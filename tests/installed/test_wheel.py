"""The installed package: its one name, its public names, and that it runs from a wheel."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import creditgraph
from creditgraph.pipeline.app.cli import main

CHECKOUT = creditgraph.ROOT.parent
FOLDERS = {"pipeline", "components", "configs", "slurm"}
PYTHON = [sys.executable]

pytestmark = pytest.mark.xdist_group("installed")


def run_installed(site, folder, *command):
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run([*PYTHON, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_installs_one_name(site):
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"creditgraph"}
    assert {path.name for path in (site / "creditgraph").iterdir()} >= {*FOLDERS, "lab", "__init__.pyi"}
    assert not [path for path in site.rglob("*") if path.is_symlink()]


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packages", "modules"])
def test_an_installed_creditgraph_leaves_other_names_to_the_user(site, tmp_path, kind):
    """`components` and `pipeline` of the folder it is started in are the user's; what it names there is found."""
    for name in ("components", "pipeline"):
        if kind == "packages":
            (tmp_path / name).mkdir()
        file = tmp_path / name / "__init__.py" if kind == "packages" else tmp_path / f"{name}.py"
        file.write_text("raise RuntimeError('not of creditgraph')\n")
    (tmp_path / "ideas.py").write_text(
        "from creditgraph.components.advantage.group import GroupAdvantage\n\n\nclass Mine(GroupAdvantage):\n"
        '    """Group advantage."""\n'
    )
    where = run_installed(site, tmp_path, "-c", "import creditgraph; print(creditgraph.ROOT)")
    assert where.stdout.strip() == str(site / "creditgraph"), where.stderr
    short = ["run.iterations=1", "prompts.batch=2", "evaluator.num_problems=2"]
    commands = [
        ["-m", "creditgraph", "graph", "recipe=toy_grpo"],
        ["-m", "creditgraph", "submit", "recipe=toy_srpo", "cluster=one_node", "--dry-run"],
        ["-m", "creditgraph", "check", "ideas:Mine"],
        ["-m", "creditgraph", "train", "recipe=toy_grpo", "advantage.use=ideas:Mine", *short],
        ["-m", "creditgraph", "train", "recipe=toy_grpo", "advantage.use=./ideas.py:Mine", "run.name=file", *short],
        [*TORCHRUN, "-m", "creditgraph", "components", "advantage.group"],
    ]
    # Python finds modules as it finds packages: one command in one process, one below torchrun.
    for command in commands if kind == "packages" else commands[-2:]:
        done = run_installed(site, tmp_path, *command)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def test_the_users_folder_is_the_last_place_of_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    assert main(["graph", "--list"]) == 0
    assert sys.path[-1] == str(tmp_path)
    assert not {"", str(tmp_path)} & set(sys.path[:-1])


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert re.fullmatch(r"creditgraph \d+\.\d+\.\d+(, commit [0-9a-f]+)?\n", capsys.readouterr().out)


def declared_names():
    """(module, name) of every import in the stub file."""
    tree = ast.parse((Path(creditgraph.__file__).with_suffix(".pyi")).read_text())
    lines = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [(f"creditgraph.{line.module}" if line.module else "", a.name) for line in lines for a in line.names]


@pytest.mark.parametrize(("module", "name"), declared_names())
def test_a_public_name_is_that_of_its_module(module, name):
    found = getattr(importlib.import_module(module), name) if module else importlib.import_module(f"creditgraph.{name}")
    assert getattr(creditgraph, name) is found


def test_a_notebook_completes_the_public_names():
    assert set(dir(creditgraph)) == {name for _, name in declared_names()}


@pytest.mark.parametrize("name", ["torch", "Tensor", "dataclass", "_NAME", "Componet"])
def test_what_is_not_public_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=name):
        getattr(creditgraph, name)


def test_importing_it_imports_no_torch(tmp_path):
    done = run_installed(CHECKOUT, tmp_path, "-c", "import creditgraph, sys; print('torch' in sys.modules)")
    assert done.stdout == "False\n", done.stderr
