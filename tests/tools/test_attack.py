"""tools/attack: its command, and a part of the suites of kills and damage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attack_suites import damage, kill, toy_runs

ROOT = Path(__file__).resolve().parents[2]
SOME = damage.cases()[3::13]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    toy_runs.use(tmp_path_factory.mktemp("attack"))
    toy_runs.finished.cache_clear()


def test_the_suites_are_as_large_as_promised_and_name_each_attack_once():
    for suite, least in ((damage, 60), (kill, 100)):
        names = [str(case) for case in suite.cases()]
        assert len(names) >= least
        assert len(set(names)) == len(names)
    assert kill.cases() == kill.cases()


@pytest.mark.parametrize("case", SOME, ids=str)
def test_damage(folder, case):
    held, detail = damage.run(case)
    assert held, detail


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

    done, rows = attack("kill", "--quick")
    assert done.returncode == 0, done.stderr
    assert [(row["suite"], row["tried"], row["held"]) for row in rows] == [("kill", 3, 3)]
    assert done.stdout.splitlines()[0].split() == ["suite", "tried", "held", "seconds"]
    done, _ = attack("kil")
    assert done.returncode == 2
    assert "no suite 'kil'; expected some of" in done.stderr
