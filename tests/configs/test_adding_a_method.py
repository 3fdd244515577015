"""docs/adding-a-method.md is true: its files are written to an empty folder and its commands run there."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from pipeline.app.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\*\*(\S+)\*\*\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def inside(folder, monkeypatch):
    """The folder as working folder; what commands add to the module path and imports is taken back."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in ("maxrl", "cispo", "test_mine"):
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)


def test_the_page_has_the_parts_it_names():
    assert list(FILES) == [
        "maxrl.py",
        "configs/graph/maxrl.yaml",
        "configs/recipe/maxrl.yaml",
        "cispo.py",
        "configs/recipe/cispo.yaml",
        "test_mine.py",
    ]
    assert 30 <= len(FILES["maxrl.py"].splitlines()) <= 130


def test_every_command_of_the_page(inside, capfd, undocumented_metrics):
    said = []
    for line in COMMANDS:
        words = shlex.split(line)
        if words[0] != "creditgraph":
            assert line == "python -m pytest -q test_mine.py"  # run by the next test
            continue
        assert main(words[1:]) == 0, f"{line}: {capfd.readouterr().err}"
        said.append(capfd.readouterr().out)
    assert not undocumented_metrics
    assert "follows the component contract" in said[0]
    assert "maxrl:MaxRL" in (inside / "maxrl.mmd").read_text()
    assert "held-out accuracy" in said[2]
    assert "held-out accuracy" in said[4]
    assert "largest = 2" in said[5]


def test_the_tests_of_the_page(inside):
    sys.path.insert(0, str(inside))
    module = importlib.import_module("test_mine")
    tests = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_a_wrong_wire_is_named(inside, capfd):
    graph = inside / "configs" / "graph" / "maxrl.yaml"
    text = graph.read_text()
    graph.write_text(text.replace("rewards.rewards}}", "rewards.reward}}"))
    try:
        assert main(["graph", "recipe=maxrl"]) == 2
    finally:
        graph.write_text(text)
    assert "rewards (rewards.outcome) has no output 'reward'. Did you mean 'rewards'?" in capfd.readouterr().err


def test_the_diff_fits():
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.M | re.S)
    file, added = None, []
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            file = (ROOT / line[6:]).read_text(encoding="utf-8").splitlines()
        elif line.startswith(" "):
            assert line[1:] in file
        elif line.startswith("+"):
            added.append(line[1:])
            assert line[1:] not in file
    assert len(added) == 2
