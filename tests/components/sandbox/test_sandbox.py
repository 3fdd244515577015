"""Running programs: outputs, limits, refusals, both ways of isolating."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from creditgraph.components.sandbox import probe, runner
from creditgraph.components.sandbox.isolation import Isolation, no_isolation
from creditgraph.components.sandbox.limits import Limits
from creditgraph.components.sandbox.pool import Program, run_programs
from creditgraph.components.sandbox.probe import find_isolation
from creditgraph.pipeline.core.errors import RunError

LIMITS = Limits(seconds=4.0, memory_mb=192, processes=8, files_mb=4, output_kb=64)


def run(isolation, source, *inputs, function="", limits=LIMITS):
    return run_programs([Program(source=source, inputs=inputs, function=function)], isolation, limits, workers=1)[0]


def test_standard_input_to_standard_output(isolation):
    results = run(isolation, "print(sum(map(int, input().split())))", "1 2", "30 4\n", "x")
    assert [(r.out, r.reason[:11]) for r in results] == [("3\n", ""), ("34\n", ""), ("", "exit code 1")]
    assert results[2].reason == "exit code 1: ValueError: invalid literal for int() with base 10: 'x'"


def test_functions_and_solutions(isolation):
    source = "class Solution:\n    def twice(self, x, y=0):\n        return (x, {'k': y})"
    results = run(isolation, source, [1, 2], [[3]], function="twice")
    assert [r.result for r in results] == ['[1, {"k": 2}]', '[[3], {"k": 0}]']
    assert run(isolation, "def f(): return 'ä'", [], function="f")[0].result == '"\\u00e4"'


def test_what_ordinary_programs_do(isolation):
    source = """
import sys, threading, collections, heapq, itertools, math, re, random, decimal, fractions, bisect, functools, string
import tempfile, dataclasses
sys.setrecursionlimit(20000)
threading.stack_size(2**25)
@dataclasses.dataclass
class P:
    x: int
def main():
    data = sys.stdin.read().split()
    with tempfile.TemporaryFile("w+") as f:
        f.write(data[0]); f.seek(0); print(f.read(), P(1), hash("a") == hash("a"))
    if __name__ == "__main__":
        exit()
threading.Thread(target=main).start()
"""
    result = run(isolation, source, "hello")[0]
    assert (result.reason, result.out) == ("", "hello P(x=1) True\n")


def test_tests_do_not_see_each_other_and_big_inputs_arrive(isolation):
    results = run(
        isolation,
        "import builtins, sys\ndata = sys.stdin.read()\nprint(len(data), hasattr(builtins, 'seen'))\nbuiltins.seen = 1",
        "a" * 3_000_000,
        "b",
    )
    assert [r.out for r in results] == ["3000000 False\n", "1 False\n"]


def test_after_a_time_out_the_other_tests_are_not_run(isolation):
    limits = Limits(seconds=0.7, memory_mb=192, processes=8, timeouts=2)
    started = time.monotonic()
    results = run(
        isolation, "while input() == 'hang': pass\nprint(1)", *["hang\nhang\n" * 10**5] * 3, "ok", limits=limits
    )
    assert [r.status for r in results] == ["timeout", "timeout", "skipped", "skipped"] or results[0].status == "exit"
    assert time.monotonic() - started < 10


def test_a_time_out_is_reported_and_what_was_printed_does_not_count(isolation):
    limits = Limits(seconds=0.7, memory_mb=192, processes=8)
    results = run(isolation, "print(1, flush=True)\nwhile True: pass", "", "", limits=limits)
    assert [(r.status, r.out) for r in results] == [("timeout", ""), ("skipped", "")]
    assert results[0].reason == "timed out after 0.7 s"
    assert results[1].reason == "not run after an earlier time-out"


def test_results_keep_their_order(isolation):
    programs = [Program(source=f"print({i})", inputs=[""]) for i in range(12)]
    assert [r[0].out for r in run_programs(programs, isolation, LIMITS, workers=3)] == [f"{i}\n" for i in range(12)]
    assert run_programs([], isolation, LIMITS, workers=2) == []


def test_packages_are_given_read_only(tmp_path, isolation):
    (tmp_path / "given.py").write_text("value = 5")
    source = "import given\nprint(given.value)\nopen(given.__file__, 'a')"
    tmp_path.chmod(0o700)
    with pytest.raises(RunError, match=r"is closed to other users, as whom programs run, expected mode 755"):
        find_isolation(packages=(str(tmp_path),))
    tmp_path.chmod(0o755)
    result = run(find_isolation(packages=(str(tmp_path),)), source, "")[0]
    assert "Read-only file system" in result.reason or "Permission denied" in result.reason
    assert (tmp_path / "given.py").read_text() == "value = 5"
    with pytest.raises(RunError, match=r"packages: /nowhere is not a folder"):
        find_isolation(packages=("/nowhere",))


def test_a_host_that_cannot_isolate_is_refused(monkeypatch):
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)
    with pytest.raises(RunError) as error:
        probe.find_isolation.__wrapped__()
    assert str(error.value).startswith(
        "sandbox: this host cannot isolate generated programs (bubblewrap (bwrap) is not installed), expected "
        "bubblewrap with namespaces of its own for processes, mounts and network. Install it with `apt-get install "
        "bubblewrap`, or set allow_unsandboxed: true"
    )


def test_a_bubblewrap_that_fails_or_does_not_isolate_is_refused(tmp_path, monkeypatch):
    fake = tmp_path / "bwrap"
    monkeypatch.setattr(probe.shutil, "which", lambda name: str(fake))
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(
        RunError, match=r"\(the sandbox did not start \(bwrap: No permissions to create new namespace\)\)"
    ):
        probe.find_isolation.__wrapped__()


def test_the_probe_notices_a_missing_isolation():
    from creditgraph.components.sandbox.probe import PROBE

    # Run as it is, it would make files for a moment; what it says of a process namespace is enough here.
    source = PROBE.split("for place in")[0] + "print(json.dumps(escapes))"
    said = subprocess.run([sys.executable, "-S", "-c", source], capture_output=True, text=True, check=True).stdout
    assert "it sees the host's processes" in said


def test_a_limit_that_macos_refuses_is_left_out(monkeypatch):
    def refused(kind, limits):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(runner.resource, "setrlimit", refused)
    with pytest.raises(ValueError, match="current limit"):
        runner._limit(runner.resource.RLIMIT_CORE, 0)
    monkeypatch.setattr(runner.sys, "platform", "darwin")
    runner._limit(runner.resource.RLIMIT_CORE, 0)


@pytest.mark.parametrize(
    ("program", "reason", "out"),
    [
        pytest.param("print(int(input()) + 1)", "", "2\n", id="right"),
        pytest.param("while True: pass", "timed out after 1 s", "", id="endless"),
        pytest.param("x = bytearray(10**9)", "exit code 1: MemoryError", "", id="large"),
        pytest.param("print('x' * 10**6)", "wrote more than 64 kB", None, id="talkative"),
    ],
)
def test_without_isolation_limits_still_hold(program, reason, out):
    limits = Limits(seconds=1.0, memory_mb=256, processes=16, output_kb=64)
    [[result]] = run_programs([Program(source=program, inputs=["1"])], no_isolation(), limits, workers=1)
    assert result.reason == reason
    assert out is None or result.out == out


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="needs root, to become an ordinary user, and /usr/bin/python3",
)
def test_an_ordinary_user_isolates_with_a_user_namespace(isolation):
    root = Path(__file__).resolve().parents[3]
    python = os.path.realpath("/usr/bin/python3")
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from creditgraph.components.sandbox.limits import Limits
from creditgraph.components.sandbox.pool import Program, run_programs
from creditgraph.components.sandbox.probe import find_isolation
isolation = find_isolation()
results = run_programs([Program(source="print(7)", inputs=[""])], isolation, Limits(), workers=1)
print(isolation.user_namespace, results[0][0].out)
"""
    user = [shutil.which("setpriv"), "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [*user, python, "-B", "-c", script, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
    if "cannot isolate" in done.stderr:
        pytest.skip(f"this host gives ordinary users no namespaces: {done.stderr.strip().splitlines()[-1]}")
    assert (done.stdout, done.returncode) == ("True 7\n\n", 0), done.stderr


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="seconds, files_mb: expected numbers > 0"):
        Limits(seconds=0, files_mb=0)
    with pytest.raises(ValueError, match=r"expected memory_mb ≥ 64, .* got 16"):
        Limits(memory_mb=16)
    with pytest.raises(ValueError, match=r"expected processes ≥ 4, .* got 2"):
        Limits(processes=2)


def test_isolation_command_has_no_host_folder_but_the_interpreter():
    isolation = Isolation(
        bubblewrap="/usr/bin/bwrap", user_namespace=True, interpreter="/opt/python/bin/python3", packages=()
    )
    command = isolation.command(LIMITS, -1)
    bound = {command[i + 1] for i, word in enumerate(command) if word == "--ro-bind"}
    assert not any(path.startswith(("/home", "/etc/passwd", "/var", "/proc")) for path in bound)
    assert "--unshare-net" in command
    assert "--unshare-pid" in command
    assert "--seccomp" not in command
