"""`creditgraph.py`: the public names, and whose `components` and `pipeline` they come from."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import creditgraph

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
