"""Programs that attack the sandbox, as the present user and, if that is root, as user 65534 too."""

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "components" / "sandbox" / "attacks.py"
NOBODY = 65534
PYTHON = "/usr/bin/python3"  # which an ordinary user can read; the project's environment may be in root's folder

sys.path.insert(0, str(SCRIPT.parent))

import attacks as table


@dataclass(frozen=True)
class Case:
    """One attack of the table, or what all of them must leave alone; it runs beside every N-th of the others."""

    name: str
    user: int
    every: int

    def __str__(self) -> str:
        return f"user {self.user}: {self.name}"


HONEST = "honest programs beside the attacks are right, and the host's process lives"


def cases() -> list[Case]:
    return _cases(1)


def quick() -> list[Case]:
    return _cases(18)


def _cases(every: int) -> list[Case]:
    names = [*(attack.name for attack in table.read_attacks()[::every]), HONEST]
    return [Case(name, user, every) for user in _users() for name in names]


def run(case: Case) -> tuple[bool, str]:
    figures = _figures(case.user, case.every)
    if "error" in figures:
        return False, figures["error"]
    if case.name == HONEST:
        right = figures["honest_right"] == figures["honest"] and figures["victim_alive"]
        return right, f"{figures['honest_right']} of {figures['honest']} right, alive: {figures['victim_alive']}"
    if case.name in figures["succeeded"]:
        return False, "the attack succeeded"
    if case.name in figures["other_reason"]:
        return False, f"another reason than the table's: {figures['other_reason'][case.name]}"
    return True, "wrong for the reason in the table"


def _users() -> list[int]:
    return [0, NOBODY] if os.geteuid() == 0 else [os.geteuid()]


@functools.cache
def _figures(user: int, every: int) -> dict:
    """The figures of one batch with all attacks, or every N-th, by one user."""
    become = []
    if user != os.geteuid():
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            return {"error": "no setpriv to become an ordinary user; install util-linux"}
        become = [setpriv, "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    python = os.path.realpath(PYTHON) if become else sys.executable
    command = [*become, python, "-B", str(SCRIPT), "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    if not done.stdout.strip():
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(done.stdout)
