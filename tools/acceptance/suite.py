"""The component suite on the device: every test that takes the fixture `device`, in float32 and bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from launch import ROOT

from acceptance.measure import Run

SMALL = (
    "tests/components/learner/test_logprobs.py",
    "tests/components/learner/test_bfloat16.py",
    "tests/components/engine/local/test_bfloat16.py",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def stage(run: Run) -> None:
    """Counts what passed, and names what failed."""
    report = run.scratch / "suite.xml"
    report.unlink(missing_ok=True)
    paths = SMALL if run.small else ("tests/components",)
    command = [sys.executable, "-m", "pytest", "-q", "--device", run.device, "--only-device", "-p", "no:cacheprovider"]
    # Of a test file whose package is missing here, the others still run; its error is counted and named.
    command += ["--continue-on-collection-errors", f"--junitxml={report}", *paths]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=False)
    if not report.exists():
        run.check("pytest wrote its report", False)
        return
    found = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None]
        result = {"failure": "failed"}.get(kinds[0], kinds[0]) if kinds else "passed"
        found[result] += 1
        if result in ("failed", "error"):
            cause = case.find(kinds[0])
            text = "" if cause is None else (cause.get("message") or "").splitlines()[:1]
            run.note(f"{result}: {case.get('classname')}::{case.get('name')}: {''.join(text)[:160]}")
    run.row(suite=f"--device {run.device}", **found)
    run.check("tests that failed", found["failed"] + found["error"], 0)
    run.check("tests that passed", found["passed"], 1, at_least=True)
