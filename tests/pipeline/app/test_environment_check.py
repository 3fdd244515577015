"""`creditgraph check` of an environment: what is wrong with it is one sentence under its name."""

import json

import pytest

from creditgraph.pipeline.app import environment_check
from creditgraph.pipeline.app.cli import main


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("Unseeded", ": two episodes of one problem differ: observation after step 1 is '"),
        ("Leaks", ": an episode differs with others in between: observation after step 2 is '2' (str) and '4'"),
        ("NaN", ": step returned nan (float) as reward, expected a finite number (call 2 of its episode)."),
        ("Raises", ": ZeroDivisionError: division by zero, environment_toys.py line"),
        ("Hangs", ": no reply in 0.2 s (call 1 of its episode)."),
        ("OverAtReset", ": reset returned ('x', 0.0, True) (tuple), expected a text, the first observation"),
        ("Changes", ".reset changes the problem that it receives, which other episodes share; copy it."),
        ("Slow", ": a call took 0."),
    ],
)
def test_a_faulty_environment_gets_a_sentence(name, finding, capsys, monkeypatch):
    monkeypatch.setattr(environment_check, "_SLOW", 0.25)
    if name == "Hangs":
        monkeypatch.setattr(environment_check.check_environment, "__defaults__", (0.2,))
    assert main(["check", f"environment_toys:{name}"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"- {name}{finding}")
    assert lines[-1].startswith(f"environment_toys:{name}: ")


def test_sound_environments(capsys, tmp_path):
    assert main(["check", "environment_toys:Fine"]) == 0
    said = capsys.readouterr().out
    assert "environment_toys:Fine: follows the environment contract (3 problems, 3 episodes each, of which 3 " in said
    assert main(["check", "environment_toys:Endless"]) == 0
    assert "of which 0 ended within 24 scripted turns" in capsys.readouterr().out
    assert main(["check", "environment.stop", "-s", "rewards=[1,2]"]) == 0
    assert "environment.stop: follows the component contract (3 problems" in capsys.readouterr().out
    tests = [{"input": "1", "output": "1"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "Echo.", "tests": tests}) + "\n")
    words = ["check", "environment.code", "--problems", str(tmp_path / "p.jsonl"), "-s", "allow_unsandboxed=true"]
    assert main(words) == 0
    assert "1 problem, 3 ep" in capsys.readouterr().out


def test_what_is_no_environment_is_refused(capsys, tmp_path):
    assert main(["check", "environment_toys:NoClose"]) == 2
    assert "expected a class with the methods reset, step, close, got a class without close" in capsys.readouterr().err
    assert main(["check", f"{tmp_path}/none.py:Mine"]) == 2
    assert "none.py does not exist" in capsys.readouterr().err
    assert main(["check", "environment_toys:Fine", "--problems", f"{tmp_path}/none"]) == 2
    assert "cannot be read" in capsys.readouterr().err
