"""The component suite on the device: every test that takes the fixture `device`, in float32 and bfloat16."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from launch import ROOT

from acceptance.measure import Run

SMALL = ("tests/components/learner/test_logprobs.py",)
OWN = ("components", "pipeline", "configs", "creditgraph", "tests", "tools")
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
    # Of a pytest that runs this stage, nothing is handed on.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(command, cwd=ROOT, env=own | ENVIRONMENT, check=False)
    if not report.exists():
        run.check("pytest wrote its report", False)
        return
    found = {"passed": 0, "failed": 0, "skipped": 0}
    lacking = set()
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        text = "" if problem is None else f"{problem.get('message')} {problem.text}"
        missing = re.search(r"No module named '(\w+)", text)
        if missing and missing[1] not in OWN:
            lacking.add(missing[1])
        elif problem is not None:
            found["failed"] += 1
            run.note(f"failed: {case.get('classname')}::{case.get('name')}: {(problem.get('message') or '')[:160]}")
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    if lacking:
        run.note(f"Tests that need packages which are missing here were not run: {', '.join(sorted(lacking))}.")
    run.row(suite=f"--device {run.device}", **found)
    run.check("tests that failed", found["failed"], 0)
    run.check("tests that passed", found["passed"], 1, at_least=True)
