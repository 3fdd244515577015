"""Programs that attack: none succeeds, each is wrong for the reason in the table, and honest programs do not notice."""

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.sandbox.isolation import INSTALL
from components.sandbox.limits import Limits
from components.verifier.base import Item
from components.verifier.code import Code

pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"bubblewrap is not installed. {INSTALL}"),
    pytest.mark.xdist_group("sandbox"),  # the attacks run once, not in every worker
]
WORKERS = 8  # attacks mostly wait for their time limit
LIMITS = Limits(seconds=1.0, memory_mb=192, processes=12, files_mb=8, output_kb=256)
HONEST = "print(int(input()) ** 2)"


def read_attacks():
    text = (Path(__file__).parent / "attacks.txt").read_text()
    return [
        (*heading.split(" :: ", 1), body)
        for heading, _, body in (part.partition("\n") for part in text.split("\n=== ")[1:])
    ]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What the attacks are after."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("canary")
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract = socket.socket(socket.AF_UNIX)
    path = f"/tmp/canary-{os.getpid()}.sock"
    unix.bind(path)
    unix.listen()
    abstract.bind(f"\0creditgraph-canary-{os.getpid()}")
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    os.environ["CREDITGRAPH_CANARY"] = "canary"
    yield {
        "@FILE@": str(folder / "secret"),
        "@PORT@": str(tcp.getsockname()[1]),
        "@SOCKET@": path,
        "@VICTIM@": str(victim.pid),
        "@PARENT@": str(os.getpid()),
        "@ABSTRACT@": f"creditgraph-canary-{os.getpid()}",
    } | {"victim": victim}
    del os.environ["CREDITGRAPH_CANARY"]
    victim.kill()
    victim.wait()
    for one in (tcp, unix, abstract):
        one.close()
    os.unlink(path)


def _item(program, function):
    tests = (
        {"inputs": [[7]], "outputs": [49], "fn_name": "solve"} if function else {"inputs": ["7\n"], "outputs": ["49\n"]}
    )
    return Item(text=f"```python\n{program}\n```", answer="", metadata={"tests": tests, "template": "plain"})


@pytest.fixture(scope="module")
def verdicts(host, toolbox):
    """All attacks in one batch, an honest program after every fourth."""
    items, names = [], []
    for k, (name, _, program) in enumerate(read_attacks()):
        for old, new in host.items():
            if old.startswith("@"):
                program = program.replace(old, new)
        names.append(name)
        items.append(_item(program, name.startswith("[function]")))
        if k % 4 == 3:
            names.append("")
            items.append(_item(f"{HONEST}  # {k}", False))
    started = time.monotonic()
    results = toolbox.start(Code, limits=LIMITS, workers=WORKERS).verdicts(items)
    seconds = time.monotonic() - started
    # On a busy host a program may reach the limit before its attack fails; those get more time.
    reasons = {name: reason for name, reason, _ in read_attacks()} | {"": "^$"}
    slow = [i for i, v in enumerate(results) if "timed out" in v.detail and not re.search(reasons[names[i]], v.detail)]
    patient = toolbox.start(Code, limits=dataclasses.replace(LIMITS, seconds=20.0), workers=2)
    for i, verdict in zip(slow, patient.verdicts([items[i] for i in slow]), strict=True):
        results[i] = verdict
    return list(zip(names, results, strict=True)), seconds, len(slow)


def test_no_attack_succeeds_and_each_has_its_reason(verdicts):
    reasons = {name: reason for name, reason, _ in read_attacks()}
    assert len(reasons) >= 60
    assert len(reasons) == len(read_attacks())
    attacks = {name: v for name, v in verdicts[0] if name}
    assert [name for name, v in attacks.items() if v.correct or v.value > 0] == []
    assert [name for name, v in attacks.items() if not v.valid] == []
    unexpected = {name: v.detail for name, v in attacks.items() if not re.search(reasons[name], v.detail)}
    assert unexpected == {}


def test_honest_programs_beside_them_are_right(verdicts):
    honest = [v for name, v in verdicts[0] if not name]
    assert len(honest) >= 20
    assert [v.detail for v in honest if not v.correct] == []


def test_the_host_is_as_it_was(verdicts, host):
    assert host["victim"].poll() is None
    assert Path(host["@FILE@"]).read_text() == "canary"
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


def test_the_batch_costs_no_more_than_its_time_limits(verdicts):
    # Every attack that hangs may use its limit once; starting them is what the rest takes.
    hanging = sum("timed out" in v.detail for _, v in verdicts[0]) + verdicts[2]
    assert verdicts[1] < hanging * (LIMITS.seconds + 1.0) / WORKERS + 90
