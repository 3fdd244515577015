"""`creditgraph.py`: the public names, and whose `components` and `pipeline` they come from."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import creditgraph
from pipeline.app.cli import main

FOLDERS = ("pipeline", "components", "configs", "slurm", "LICENSE")
ROOT = Path(creditgraph.__file__).parent
PYTHON = [sys.executable]
SCRIPT = str(Path(sys.executable).with_name("creditgraph"))


def run(command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def strangers(tmp_path):
    """A folder with packages of both names that are not ours."""
    for name in ("components", "pipeline"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    return tmp_path


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "1"]


@pytest.mark.parametrize(
    ("start", "command"),
    [
        ([SCRIPT], ["graph", "recipe=toy_grpo"]),  # imports classes of components, and torch with them
        ([*PYTHON, "-m", "creditgraph"], ["components", "advantage.group"]),
        ([*PYTHON, *TORCHRUN, "--no-python", "creditgraph"], ["components", "advantage.group"]),
        ([*PYTHON, *TORCHRUN, "-m", "creditgraph"], ["components", "advantage.group"]),
    ],
    ids=["script", "python -m", "torchrun --no-python", "torchrun -m"],
)
def test_every_way_to_start_takes_our_packages(strangers, start, command):
    done = run([*start, *command], strangers)
    assert done.returncode == 0, done.stderr
    assert "advantage.group" in done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.toml", "*.md", *FOLDERS]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
        if (ROOT / name).is_file() and name.split("/")[0] not in ("tests", "docs", "tools"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    build = [*PYTHON, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(folder / "source")]
    done = run(build, folder)
    if done.returncode:
        pytest.skip(f"no wheel can be built here: {done.stderr.splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def run_installed(site, folder, *command):
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return subprocess.run([*PYTHON, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packages", "modules"])
def test_an_installed_creditgraph_takes_its_own_packages(site, tmp_path, kind):
    """`components` and `pipeline` of the folder it is started in are the user's; what it names there is found."""
    for name in ("components", "pipeline"):
        if kind == "packages":
            (tmp_path / name).mkdir()
        place = tmp_path / name / "__init__.py" if kind == "packages" else tmp_path / f"{name}.py"
        place.write_text("raise RuntimeError('not of creditgraph')\n")
    (tmp_path / "ideas.py").write_text(
        "from components.advantage.group import GroupAdvantage\n\n\nclass Mine(GroupAdvantage):\n"
        '    """Group advantage."""\n'
    )
    where = run_installed(site, tmp_path, "-c", "import creditgraph; print(creditgraph.ROOT)")
    assert where.stdout.strip() == str(site), where.stderr
    short = ["run.iterations=1", "prompts.batch=2", "evaluator.num_problems=2"]
    for command in (
        ["graph", "recipe=toy_grpo"],
        ["components", "advantage.group"],
        ["submit", "recipe=toy_srpo", "cluster=one_node", "--dry-run"],
        ["check", "ideas:Mine"],
        ["train", "recipe=toy_grpo", "advantage.use=ideas:Mine", *short],
    ):
        done = run_installed(site, tmp_path, "-m", "creditgraph", *command)
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


def test_a_package_that_was_imported_before_is_named(strangers):
    done = run([*PYTHON, "-c", "import components, creditgraph"], strangers)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: creditgraph: 'components' is {strangers / 'components' / '__init__.py'}, not part of "
        f"creditgraph; expected {ROOT / 'components' / '__init__.py'} of creditgraph."
    )
    assert last.endswith("or install creditgraph in an environment without the other one.")


def test_a_distribution_that_has_overwritten_ours_is_named(tmp_path):
    """What a wheel with a top-level `components` does to site-packages."""
    shutil.copy(ROOT / "creditgraph.py", tmp_path)
    for name in ("components", "pipeline"):
        (tmp_path / name).mkdir()
        shutil.copy(ROOT / name / "__init__.py", tmp_path / name)
    assert run([*PYTHON, "-c", "import creditgraph; print(creditgraph.ROOT)"], tmp_path).stdout == f"{tmp_path}\n"
    (tmp_path / "components" / "__init__.py").write_text("")
    about = tmp_path / "other_ui-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-ui\nVersion: 1.0\n")
    (about / "top_level.txt").write_text("components\n")
    done = run([*PYTHON, "-c", "import creditgraph"], tmp_path)
    assert (
        f"ImportError: creditgraph: 'components' is {tmp_path / 'components' / '__init__.py'}, installed by other-ui; "
        in done.stderr
    )


def declared_names():
    """(module, name) of every import in the TYPE_CHECKING block."""
    tree = ast.parse((ROOT / "creditgraph.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    return [(line.module, alias.name) for line in block.body for alias in line.names]


@pytest.mark.parametrize(("module", "name"), declared_names())
def test_a_public_name_is_that_of_its_module(module, name):
    assert getattr(creditgraph, name) is getattr(importlib.import_module(module), name)


def test_the_names_are_those_declared_for_type_checkers():
    assert [(module, name) for module, names in creditgraph._NAMES.items() for name in names] == declared_names()


@pytest.mark.parametrize("name", ["torch", "Tensor", "dataclass", "_NAME"])
def test_what_a_module_imports_is_not_a_public_name(name):
    with pytest.raises(AttributeError, match=f"module 'creditgraph' has no attribute '{name}'"):
        getattr(creditgraph, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'creditgraph' has no attribute 'Componet'"):
        _ = creditgraph.Componet


def test_importing_it_imports_no_torch(tmp_path):
    done = run([*PYTHON, "-c", "import creditgraph, sys; print('torch' in sys.modules)"], tmp_path)
    assert done.stdout == "False\n", done.stderr
