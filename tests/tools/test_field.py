"""The audit of other trainers: verdicts on verl and TRL are those committed, and the page has what it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from field_audit import page  # noqa: E402
from field_audit.run import LEAST, TRAINERS, table_of  # noqa: E402
from field_audit.source import Source, StandIn  # noqa: E402

RESULTS = page.read(ROOT / "docs" / "evidence" / "field.json")
ROWS = [(trainer, row) for trainer, found in RESULTS.items() for row in found["rows"]]


def verdicts(rows):
    return {
        row["name"]: (row["judged"], sorted(row.get("passes", [])), sorted(row.get("failures", []))) for row in rows
    }


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_verdicts_on_an_installed_trainer_are_those_committed(trainer, tmp_path):
    python = ROOT / f".venv-{trainer}/bin/python"
    if not python.exists():
        pytest.skip(f"no {trainer}: tools/other_environment {trainer}")
    out = tmp_path / "field.json"
    command = [python, ROOT / "tools/field", "run", trainer, "--quick", "--out", out]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert verdicts(json.loads(out.read_text())[trainer]["rows"]) == verdicts(RESULTS[trainer]["rows"])


def test_every_trainer_and_entry_has_a_row():
    assert list(RESULTS) == list(TRAINERS)
    for trainer, found in RESULTS.items():
        assert [row["name"] for row in found["rows"]] == [entry.name for entry in table_of(trainer).entries], trainer
        assert found["version"], trainer
        assert found["creditgraph"], trainer
        assert found["repository"].count("/") == 1, trainer


def test_a_row_counts_as_judged_only_if_checks_were_evaluated():
    for trainer, row in ROWS:
        if row["judged"]:
            assert len(row["passes"]) + len(row["failures"]) >= LEAST, (trainer, row["name"])
            assert {"returns", "loss_returns"} & set(row["passes"]), (trainer, row["name"])
        else:
            assert row.get("refused") or "passes" in row, (trainer, row["name"])
    assert len({(trainer, row["function"]) for trainer, row in ROWS if row["judged"]}) >= 60


def test_every_failure_was_looked_at():
    text = (ROOT / "docs/audit.md").read_text()
    rules = page.yaml.safe_load((ROOT / "tools/field.yaml").read_text())
    for _, row, found in page.judged(RESULTS, rules):
        for check, rule in found.items():
            assert rule["why"], (row["name"], check)
            assert rule["is"] in page.MARKS
            if rule["is"] in ("fault", "once"):
                assert f'<a id="{rule["why"]}"></a>' in text, rule["why"]


def test_a_failure_without_a_judgement_is_named():
    row = {"name": "f", "failures": {"monotone": {}}}
    with pytest.raises(LookupError, match=r"mine, f: nobody has judged its failure of monotone: add a rule to tools/f"):
        page.judgement([], "mine", row, "monotone")


def test_a_module_loads_without_its_dependencies(tmp_path):
    package = tmp_path / "far_trainer"
    package.mkdir()
    (package / "losses.py").write_text(
        "import not_there_at_all\n"
        "from transformers import Anything\n"
        "from .sums import total\n"
        "@not_there_at_all.registered('x')\n"
        "def f(x):\n    return total(x)\n"
        "def g(x):\n    return Anything(x)\n"
        "class C(Anything):\n    def m(self, x):\n        y = x + 1\n"
        "        if x:\n            z = y * 2\n            z = z + 1\n"
    )
    (package / "sums.py").write_text("def total(x):\n    return sum(x)\n")
    source = Source(tmp_path, "far_trainer")
    assert source.get("far_trainer.losses:f")([1, 2]) == 3
    assert isinstance(source.module("far_trainer.losses").Anything, StandIn)
    with pytest.raises(RuntimeError, match="Anything was left out; the function needs it"):
        source.get("far_trainer.losses:g")(1)
    with pytest.raises(AttributeError, match="h is not there, or its definition was left out"):
        source.get("far_trainer.losses:h")
    lines = source.lines("far_trainer.losses:C.m", "z = y", "z + 1", "z")
    assert lines(y=3) == 7
