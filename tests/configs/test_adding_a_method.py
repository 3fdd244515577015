"""docs/adding-a-method.md: its parts, an error that it quotes, and shipping; tests/installed runs its commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import working_in

from creditgraph.pipeline.app.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
OWN, SHIPPING = PAGE.split("## Shipping it here")
FILES = dict(re.findall(r"^\*\*(\S+)\*\*\n```\w+\n(.*?)^```$", OWN, re.M | re.S))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def inside(folder):
    with working_in(folder):
        yield folder


def run(command, cwd, modules, **environment):
    """A command with the Python of this test, which takes modules of `modules` before installed ones."""
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(modules),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_page_has_the_parts_it_names():
    assert list(FILES) == [
        "pass_at_k.py",
        "configs/recipe/pass_at_k.yaml",
        "turn_rloo.py",
        "configs/recipe/turn_rloo.yaml",
        "sapo.py",
        "configs/recipe/sapo.yaml",
        "test_pass_at_k.py",
        "test_sapo.py",
    ]
    assert all(len(FILES[name].splitlines()) < 60 for name in ("pass_at_k.py", "turn_rloo.py", "sapo.py"))


@pytest.mark.parametrize("command", ["graph", "train"])
def test_a_wrong_wire_is_named(command, inside, capfd):
    (wire,) = re.findall(r"A wrong wire, such as `(\S+)`, stops both commands", PAGE)
    assert main([command, "recipe=pass_at_k", wire]) == 2
    assert "rewards (rewards.outcome) has no output 'reward'. Did you mean 'rewards'?" in capfd.readouterr().err


@pytest.fixture
def clone(tmp_path):
    """This checkout's files without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


def apply(diff, clone):
    """Adds each "+" line after the line above it; returns the number of added lines."""
    added = 0
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            file = clone / line[6:]
        elif line.startswith(" "):
            before = line[1:] + "\n"
        elif line.startswith("+"):
            text = file.read_text(encoding="utf-8")
            assert text.count(before) == 1
            file.write_text(text.replace(before, f"{before}{line[1:]}\n"), encoding="utf-8")
            added += 1
    return added


@pytest.mark.slow
def test_shipping(folder, clone):
    """One new file, one registry line and one YAML: each block of the last section, in its order, in a clone."""
    for language, block in re.findall(r"^```(bash|diff)\n(.*?)^```$", SHIPPING, re.M | re.S):
        if language == "diff":
            assert apply(block, clone) == 2
        else:
            printed = run(block, clone, clone, MINE=str(folder))
    assert printed.count("held-out accuracy") == 2
    assert "`advantage.pass_at_k`" in (clone / "docs" / "reference.md").read_text()
    assert "logs largest [" in run("creditgraph components advantage.pass_at_k", clone, clone)
    new = "components/advantage/pass_at_k.py components/learner/objective/sapo.py tests/components/*/test_pass_at_k.py"
    run(f"tools/update_docs --check; ruff check {new}; ruff format --check {new}", clone, clone)
