"""`creditgraph new`: what it writes trains and passes its own tests."""

import subprocess
import sys

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.commands.new import KINDS


def test_each_kind_trains_and_passes_its_tests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    small = ["run.iterations=1", "prompts.batch=2", "sampler.group_size=2", "evaluator.num_problems=4"]
    for kind in KINDS:
        assert main(["new", kind, f"new_{kind}"]) == 0
        assert main(["train", f"recipe=new_{kind}", *small]) == 0
        monkeypatch.delitem(sys.modules, f"new_{kind}", raising=False)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "9 passed" in done.stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Shaped", "expected a name of a Python module"),
        ("class", "expected a name of a Python module"),
        ("a/b", "expected a name of a Python module"),
        ("json", "a module of that name exists"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused(tmp_path, monkeypatch, capsys, name, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "method", name]) == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("kept")
    assert main(["new", "method", "mine"]) == 2
    assert "mine.py exists; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert (tmp_path / "mine.py").read_text() == "kept"
