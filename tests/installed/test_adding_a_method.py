"""docs/adding-a-method.md with an installed wheel: its files in a folder of their own, where its commands run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.lab.evidence.trial import CODES

pytestmark = pytest.mark.xdist_group("installed")

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
OWN = PAGE.split("## Shipping it here")[0]
FILES = dict(re.findall(r"^\*\*(\S+)\*\*\n```\w+\n(.*?)^```$", OWN, re.M | re.S))
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", OWN, re.M | re.S) for line in block.splitlines()]
JUDGED = re.findall(r"^    creditgraph (evidence .+)$", OWN, re.M)
# All commands in one process, so that torch is imported once.
RUN = """\
import contextlib, io, json, shlex, sys
from creditgraph import ROOT, main
printed = []
for line in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(shlex.split(line)[1:])
    printed.append(out.getvalue())
    assert code == 0, (line, printed[-1])
json.dump({"root": str(ROOT), "printed": printed}, sys.stdout)
"""
SMALL = """\
families:
  one: {title: One, settings: [data=chains_one, data.train.size=40, data.eval.size=20]}
  thoughts: {title: Turns, settings: [data=chains_one, data.train.size=40, data.eval.size=20]}
claims: {}
cells: {}
recipe:
  a: &a
    {title: A., family: one, regime: "", tokens: 1500, every: 9, rates: [1.0e-4, 3.0e-4], sweep_seeds: [100], seeds: 2,
     widenings: 0, set: [prompts.batch=1], methods: {grpo: {recipe: toy_grpo, rate: 1.0e-4}}}
  b: {<<: *a, family: thoughts, methods: {grpo_turns: {recipe: toy_grpo_thoughts, rate: 1.0e-4}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    (path / "small.yaml").write_text(SMALL)
    return path


def run(site, folder, *words, **options):
    """Python in the folder of the method, with what the wheel installs."""
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, **options)


def test_every_command_of_the_page(site, folder):
    commands = [line for line in COMMANDS if line.startswith("creditgraph ")]
    done = run(site, folder, "-c", RUN, input=json.dumps(commands))
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    found = json.loads(done.stdout)
    assert found["root"].startswith(str(site))
    printed = dict(zip(commands, found["printed"], strict=True))
    for use in ("pass_at_k:PassAtK", "turn_rloo:TurnRLOO"):
        assert "follows the component contract" in printed[f"creditgraph check {use}"]
    assert "pass_at_k:PassAtK" in (folder / "pass_at_k.mmd").read_text()
    trained = [text for line, text in printed.items() if line.startswith("creditgraph train")]
    assert len(trained) == 3
    assert all("held-out accuracy" in text for text in trained)
    assert "RLOO: minus the mean of the others" in printed["creditgraph audit recipe=turn_rloo"]
    (replayed,) = (text for line, text in printed.items() if line.startswith("creditgraph replay"))
    assert "largest = " in replayed
    (tests,) = (line for line in COMMANDS if not line.startswith("creditgraph "))
    done = run(site, folder, *tests.split()[1:])
    assert "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", JUDGED)
def test_the_evidence_of_each_idea_takes_every_stage(site, folder, line):
    words = [*re.findall(r'[^\s"]+', line), "--declaration", "small.yaml", "--jobs", "1"]
    done = run(site, folder, "-m", "creditgraph", *words)
    # With two runs of fifteen hundred tokens nothing is seen, not even the controls.
    assert done.returncode == CODES["too noisy"], done.stdout + done.stderr
    name = words[1].removeprefix("recipe=")
    assert re.search(rf"{name} against \S.*: too noisy .*the control \w+ is not seen", done.stdout)
    if line == JUDGED[0]:
        again = run(site, folder, "-m", "creditgraph", *words, "--again")
        assert f"{name}-" in again.stderr
        assert "grpo-" not in again.stderr  # the runs of baselines are kept
