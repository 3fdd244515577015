"""The tests of one program: independent of each other, in a time that other programs do not change."""

import os
import subprocess
import sys
import time

import pytest

from creditgraph.components.sandbox import pool
from creditgraph.components.sandbox.limits import MEGABYTE, Limits
from creditgraph.components.sandbox.pool import Program, run_programs
from creditgraph.components.sandbox.watch import Watch

SPINNER = "import os\nos.setsid()\nwhile True: pass"


def run(isolation, source, *inputs, **limits):
    limits = Limits(**({"seconds": 4.0, "memory_mb": 192, "processes": 8} | limits))
    return run_programs([Program(source=source, inputs=inputs)], isolation, limits, workers=1)[0]


def test_no_test_sees_files_or_processes_of_another(isolation):
    source = """
import os, time
name = input()
time.sleep(0.05)
print(sorted(os.listdir("/tmp")))
os.makedirs("a/b")
open("a/b/c", "w").write("x")
os.chmod("a", 0)
if os.fork() == 0:
    os.setsid()
    while True:
        open(name, "w").close()
        time.sleep(0.001)
"""
    results = run(isolation, source, *"wxyz")
    assert [(r.reason, r.out) for r in results] == [("", "[]\n")] * 4


def test_an_input_arrives_when_its_test_starts(isolation):
    source = """
import gc, sys
found = gc.get_objects()
frame = sys._getframe()
while frame:
    found += frame.f_locals.values()
    frame = frame.f_back
texts = [repr(value) for value in found if isinstance(value, (str, bytes, list, tuple)) and len(value) < 1000]
print([name for name in ("alpha", "beta", "gamma") if any(name + "-input" in text for text in texts)])
"""
    results = run(isolation, source, "alpha-input", "beta-input", "gamma-input")
    assert [r.out for r in results] == ["['alpha']\n", "['beta']\n", "['gamma']\n"]


def test_folders_in_folders_are_deleted_in_no_time(isolation):
    source = "import os\nprint(os.listdir('.'))\nfor i in range(4000):\n    os.mkdir('d')\n    os.chdir('d')"
    started = time.monotonic()
    assert [r.out for r in run(isolation, source, "", "")] == ["[]\n", "[]\n"]
    assert time.monotonic() - started < 20


def test_a_program_has_a_budget(isolation):
    results = run(isolation, "import time\ntime.sleep(0.4)\nprint(1)", *["x"] * 9, program_seconds=1.0)
    assert [r.status for r in results] == ["exit"] * 3 + ["skipped"] * 6
    assert results[3].reason == "not run: the tests before it took more than 1 s together"
    with pytest.raises(ValueError, match="program_seconds: expected numbers > 0"):
        Limits(program_seconds=0.0)


def test_a_program_has_a_budget_by_the_clock(isolation, monkeypatch):
    """Waiting for a processor counts against no test, but no program has a worker for ever."""
    monkeypatch.setattr(pool, "CLOCK_FACTOR", 0.1)
    results = run(isolation, "import time\ntime.sleep(0.1)\nprint(1)", *["x"] * 40, seconds=40.0, program_seconds=10.0)
    assert results[0].status == "exit"
    assert results[-1].reason == "not run: the tests before it took more than 10 s together"


def test_a_test_that_stops_the_runner_gets_no_more_time(isolation):
    """The runner stands still from 0 to 1.6 s of a limit of 1 s, and then finds the answer and the host's request."""
    source = """
import os, signal, time
runner = os.getppid()
if os.fork() == 0:
    time.sleep(1.6)
    os.kill(runner, signal.SIGCONT)
    os._exit(0)
os.kill(runner, signal.SIGSTOP)
time.sleep(1.5)
print(49)
"""
    for _ in range(3):
        assert run(isolation, source, "", seconds=1.0)[0].reason == "timed out after 1 s"


def test_a_program_locks_nothing_of_the_host(isolation):
    source = """
import fcntl, os
for file in ("/dev/null", os.__file__, "/etc/ld.so.cache", "/usr/lib"):
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(os.open(file, os.O_RDWR if file == "/dev/null" else os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            print("locked", file)
        except PermissionError:
            pass
"""
    assert [(r.reason, r.out) for r in run(isolation, source, "")] == [("", "")]


def test_seconds_of_many_processes_are_added(isolation):
    """Four processes compute 0.4 s each: 0.8 s by the clock on two processors, 1.6 s on all together."""
    source = "import os, time\nos.fork()\nos.fork()\nwhile time.process_time() < 0.4: pass\nos.wait()\nprint(1)"
    assert run(isolation, source, "", seconds=1.2)[0].reason == "timed out after 1.2 s"


def test_the_wait_for_a_processor_does_not_count(isolation):
    """0.5 s of computing, a limit of 1 s, one processor with five programs of other sessions: 3 s by the clock."""
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this kernel does not count how long a thread waits for a processor")
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", SPINNER]) for _ in range(5)]
    try:
        source = "import time\nwhile time.process_time() < 0.5: pass\nprint(round(time.process_time(), 1))"
        started = time.monotonic()
        result = run(isolation, source, "", seconds=1.0)[0]
        by_clock = time.monotonic() - started
    finally:
        os.sched_setaffinity(0, processors)
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert (result.reason, result.out) == ("", "0.5\n")
    assert by_clock > 1.5


def test_a_program_that_sleeps_gets_no_more_for_it(isolation):
    started = time.monotonic()
    assert run(isolation, "import time\ntime.sleep(60)", "", seconds=0.5)[0].reason == "timed out after 0.5 s"
    assert time.monotonic() - started < 8


def test_children_of_every_thread_are_watched():
    source = """
import os, threading, time
def fork():
    if os.fork() == 0:
        data = bytearray(64 * 2**20)
        while True:
            pass
    os.wait()
threading.Thread(target=fork).start()
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-S", "-c", source], start_new_session=True)
    watch = Watch(process.pid)
    try:
        deadline = time.monotonic() + 20
        usage = watch.sample(time.monotonic())
        while (usage.memory < 64 * MEGABYTE or usage.cpu < 0.3) and time.monotonic() < deadline:
            time.sleep(0.05)
            usage = watch.sample(time.monotonic())
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert usage.memory >= 64 * MEGABYTE
    assert usage.cpu >= 0.3
    assert watch.sample(time.monotonic()).memory == 0


ORDINARY = {
    "event loop": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\nasyncio.run(f())\nprint(5)",
    "threads": "from concurrent.futures import ThreadPoolExecutor as E\nwith E(3) as e: print(sum(e.map(abs, [2, 3])))",
    "a process": "import subprocess as s, sys\nprint(s.run([sys.executable, '-S', '-c', '5']).returncode + 5)",
    "processes": """
import multiprocessing as m
one, other = m.Pipe()
process = m.Process(target=one.send, args=(5,))
process.start()
print(other.recv())
process.join()""",
    "database": """
import sqlite3
with sqlite3.connect(":memory:") as base:
    base.execute("create table t(a)")
    base.execute("insert into t values(5)")
print(*base.execute("select a from t").fetchone())""",
    "files": """
import os, shutil, tempfile
folder = tempfile.mkdtemp()
with open(folder + "/a", "w") as file: file.write("12345")
shutil.copy2(folder + "/a", folder + "/b")
shutil.copytree(folder, "/tmp/c")
shutil.move("/tmp/c", "/tmp/d")
shutil.rmtree(folder)
print(os.path.getsize("/tmp/d/b"))""",
    "alarm": """
import signal, time
signal.signal(signal.SIGALRM, lambda *_: print(5))
signal.setitimer(signal.ITIMER_REAL, 0.02)
time.sleep(0.5)""",
    "map": "import mmap\nm = mmap.mmap(-1, 5)\nprint(len(m))",
    "deep recursion": """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**25)
def f(n): return n and f(n - 1)
t = threading.Thread(target=lambda: print(5 + f(50000)))
t.start()
t.join()""",
    "facts": "import os, time, resource, platform\nprint(5 if os.cpu_count() and platform.system() else 0)",
    "pipes": "import os, selectors\nr, w = os.pipe()\nos.write(w, b'5')\ns = selectors.DefaultSelector()\n"
    "s.register(r, 1)\ns.select(1)\nprint(os.read(r, 9).decode())",
}


def test_ordinary_programs_need_no_call_that_is_refused(isolation):
    programs = [Program(source=source, inputs=[""]) for source in ORDINARY.values()]
    results = run_programs(programs, isolation, Limits(seconds=20.0), workers=2)
    answers = {name: (r[0].reason, r[0].out) for name, r in zip(ORDINARY, results, strict=True)}
    assert {name: answer for name, answer in answers.items() if answer != ("", "5\n")} == {}
