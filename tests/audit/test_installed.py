"""Losses and estimators of real trainers by their short names, in environments of their own."""

import json
import os
import subprocess

import pytest

from creditgraph.pipeline import ROOT
from creditgraph.pipeline.app.audit.installed import installed
from creditgraph.pipeline.app.audit.targets import AuditError

SCRIPT = """
import json, sys, torch
from creditgraph.pipeline.app.audit.audit import run_checks
from creditgraph.pipeline.app.audit.opened import named_target

torch.set_num_threads(1)
out = {}
for name in sys.argv[1:]:
    results = run_checks(*named_target(name.rstrip("!"), {}, {}, kind="advantage" if name.endswith("!") else None))
    out[name] = {r.check.name: r.finding.verdict for r in results}
print(json.dumps(out))
"""
TRL = {"trl:grpo": set(), "trl:bnpo": {"loss_cut"}, "trl:cispo": set(), "trl:vespo": set()}
VERL = {
    "verl:vanilla": set(),
    "verl:gspo": set(),
    "verl:sapo": set(),
    "verl:cispo": set(),
    "verl:kl_cov": set(),
    "verl:gae!": {
        "other_groups",
        "copies",
        "credit_outside",
    },  # whitening over the batch; whitened outside the mask too
    "verl:grpo!": {"invalid_rows"},  # a row that is masked whole stays in the mean of its group
    "verl:opo!": {"idle_settings"},  # its epsilon is read nowhere
}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "expected"), [("trl", TRL), ("verl", VERL)], ids=["trl", "verl"])
def test_real_functions(library, expected):
    python = ROOT.parent / f".venv-{library}/bin/python"
    if not python.exists():
        pytest.skip(f"no {library}: tools/other_environment {library}")
    command = [python, "-W", "ignore", "-c", SCRIPT, *expected]
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    failing = {name: {check for check, verdict in own.items() if verdict == "fail"} for name, own in found.items()}
    assert failing == expected
    assert all(sum(verdict == "pass" for verdict in own.values()) >= 11 for own in found.values())


def test_what_is_not_installed_gets_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openrlhf", None)
    with pytest.raises(AuditError, match="openrlhf:ppo: importing openrlhf failed with ModuleNotFoundError"):
        installed("openrlhf:ppo")
    assert installed("mine.core:compute") is None
