"""tools/attack: its command, a part of every suite, and malformed data files."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from attack_suites import damage, data, directory, kill, sandbox, settings, toy_runs

from creditgraph.pipeline.app.cli import main

ROOT = Path(__file__).resolve().parents[2]
SOME = damage.cases()[3::13]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    data.use(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    toy_runs.use(tmp_path_factory.mktemp("attack"))
    toy_runs.finished.cache_clear()


def test_the_suites_are_as_large_as_promised_and_name_each_attack_once():
    for suite, least in ((damage, 60), (data, 71), (kill, 100), (sandbox, 120), (settings, 200)):
        names = [str(case) for case in suite.cases()]
        assert len(names) >= least
        assert len(set(names)) == len(names)
    assert kill.cases() == kill.cases()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_damage(folder, case):
    held, detail = damage.run(case)
    assert held, detail


@pytest.mark.parametrize("case", data.cases(), ids=str)
def test_data(data_folder, case):
    held, detail = data.run(case)
    assert held, detail


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    directory.use(tmp_path_factory.mktemp("directories"))


@pytest.mark.parametrize("case", directory.cases(), ids=str)
def test_code_that_a_directory_names_is_not_run(directories, case):
    held, detail = directory.run(case)
    assert held, detail


def test_code_of_a_run_that_was_made_here_or_is_trusted_is_loaded(directories, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\nPath('LOADED').touch()\ndef reward(response, answer): return 1.0\n"
    )
    own = ["verifier.use=verifier.function", "verifier.function=mine.py:reward", "run.root=runs", "run.name=own"]
    assert main(["train", "recipe=toy_grpo", *directory.SMALL, *own]) == 0
    replay = ["replay", "--iteration", "0", "--node", "advantage"]
    (tmp_path / "LOADED").unlink()
    assert main([*replay, "runs/own"]) == 0  # made here
    assert (tmp_path / "LOADED").exists()
    shutil.copytree("runs/own", "runs/copy")
    (tmp_path / "LOADED").unlink()
    assert main([*replay, "runs/copy"]) == 2
    assert "names code outside of creditgraph (verifier.function: mine.py:reward)" in capsys.readouterr().err
    assert not (tmp_path / "LOADED").exists()
    assert main([*replay, "runs/copy", "--trust"]) == 0
    assert (tmp_path / "LOADED").exists()


def test_the_suite_of_data_notices_lost_rows_and_wrong_reasons(data_folder):
    lost = data.Case("lost", "a.jsonl", b'{"question": "<solve> 1", "answer": "1"}\n{}\n', ("1",))
    assert data.run(lost) == (False, "used ('1',), rejected (('no question', 1),), 0")
    assert not data.run(replace(lost, name="reason", rejected=1, reason="^no answer"))[0]
    assert data.run(replace(lost, name="right", rejected=1, reason="^no question"))[0]


def test_a_suite_notices_what_does_not_hold(folder):
    harmless = damage.Case("a warning is expected", lambda path: None, "metrics.jsonl")
    assert damage.run(harmless) == (False, "no warning names metrics.jsonl")
    refusal = damage.Case("a refusal is expected", lambda path: None, "", refused=True)
    assert damage.run(refusal) == (False, "the run continued; expected a refusal")
    broken = damage.Case("an exception", lambda path: (path / "config.yaml").write_text("nodes: {delay: 1}"), "")
    assert not damage.run(broken)[0]


def test_the_command_counts_and_returns_1_when_something_does_not_hold(tmp_path):
    def attack(*arguments):
        command = [sys.executable, str(ROOT / "tools" / "attack"), *arguments, "--json", str(tmp_path / "found")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done, json.loads((tmp_path / "found").read_text()) if done.returncode < 2 else None

    suites = ("answers", "data", "kill", "verifiers")
    done, rows = attack(*suites, "--quick")
    assert {row["suite"] for row in rows} == set(suites)
    assert all(row["tried"] >= 3 for row in rows)
    lost = [result for row in rows for result in row["attacks"] if not result["held"]]
    assert done.returncode == bool(lost), done.stderr
    # A host may lack bubblewrap, or give ordinary users no namespaces.
    assert [result for result in lost if "cannot isolate" not in result["detail"]] == []
    assert done.stdout.splitlines()[0].split() == ["suite", "tried", "held", "seconds"]
    done, _ = attack("kil")
    assert done.returncode == 2
    assert "no suite 'kil'; expected some of" in done.stderr
