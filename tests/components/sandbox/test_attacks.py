"""Programs that attack: none succeeds, each is wrong for the reason in the table, and honest programs do not notice."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from creditgraph.components.sandbox.isolation import INSTALL
from tests.components.sandbox.attacks import LIMITS, WORKERS, host_of_canaries, read_attacks, run_attacks

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed. {INSTALL}"),
    pytest.mark.xdist_group("sandbox"),  # the attacks run once, not in every worker
]


@pytest.fixture(scope="module")
def host():
    with host_of_canaries() as canaries:
        yield canaries


@pytest.fixture(scope="module")
def outcomes(host, isolation):
    return run_attacks(read_attacks(), host[0], isolation)


def test_no_attack_succeeds_and_each_has_its_reason(outcomes):
    attacks = [(attack, detail) for attack, detail in outcomes[0] if attack.name]
    assert len({attack.name for attack, _ in attacks}) == len(attacks) >= 170
    assert [attack.name for attack, detail in attacks if detail == ""] == []
    unexpected = {attack.name: detail for attack, detail in attacks if not re.search(attack.reason, detail)}
    assert unexpected == {}


def test_honest_programs_beside_them_are_right(outcomes):
    honest = [detail for attack, detail in outcomes[0] if not attack.name]
    assert len(honest) >= 40
    assert [detail for detail in honest if detail] == []


def test_the_host_is_as_it_was(outcomes, host):
    canaries, victim = host
    assert victim.poll() is None
    assert Path(canaries["@FILE@"]).read_text() == "canary"
    # The kernel takes a moment to bury what was killed.
    deadline = time.monotonic() + 20
    while (left := still_running()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def still_running():
    first = 1_000_000_000 + os.getpid() % 4_194_304 * 64
    left = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            users = re.search(r"^Uid:\s+(\d+)", status.read_text(), re.MULTILINE)
        except OSError:
            continue
        if users and first <= int(users.group(1)) < first + 64:
            left.append(status.parent.name)
    return left


def test_the_batch_costs_no_more_than_its_time_limits(outcomes):
    # Every attack that hangs may use its limit once; starting them is what the rest takes.
    batch, seconds, again = outcomes
    hanging = sum("timed out" in detail for _, detail in batch) + again
    assert seconds < hanging * (LIMITS.seconds + 1.0) / WORKERS + 90


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="needs root, to become an ordinary user, and /usr/bin/python3",
)
def test_attacks_as_an_ordinary_user():
    """Every third, in a user namespace."""
    user = [shutil.which("setpriv"), "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    script = Path(__file__).with_name("attacks.py")
    command = [*user, os.path.realpath("/usr/bin/python3"), "-B", str(script), "--every", "3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=1200)
    if "cannot isolate" in done.stderr:
        pytest.skip(f"this host gives ordinary users no namespaces: {done.stderr.strip().splitlines()[-1]}")
    figures = json.loads(done.stdout)
    assert (figures["user_namespace"], figures["succeeded"], figures["other_reason"]) == (True, [], {}), done.stderr
    assert figures["tried"] == figures["held"] >= 55
    assert figures["honest"] == figures["honest_right"]
    assert done.returncode == 0
