"""Commands in forked processes: their exit codes, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

SERVED = """
import os, signal, sys, time, creditgraph
from creditgraph.lab.bench import warm

def run(arguments):
    if arguments == ["wait"]:
        try:
            print("waiting", flush=True)
            time.sleep(600)
        finally:
            print("saved", flush=True)
    sys.exit(*arguments)

creditgraph.main = run
warm.load = lambda: os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C while libraries are loaded ends nothing
warm.serve()
"""


@pytest.fixture
def server(tmp_path):
    """command(…) sends arguments of a run whose output is in tmp_path/log, to a process that leads a group."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", SERVED], **options)

    def command(*arguments):
        print(json.dumps([arguments, str(tmp_path / "log")]), file=process.stdin, flush=True)
        return process

    yield command
    process.communicate()


def test_exit_codes_are_those_of_the_interpreter(server, tmp_path):
    codes = [int(server(*arguments).stdout.readline()) for arguments in ([], [None], [3], ["no such file"])]
    assert codes == [0, 0, 3, 1]
    assert (tmp_path / "log").read_text() == "no such file\n"


def test_an_interrupt_is_answered_once_the_run_has_saved(server, tmp_path):
    process, log = server("wait"), tmp_path / "log"
    while not (log.exists() and "waiting" in log.read_text()):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "1\n"
    assert "saved" in log.read_text()
    assert process.poll() is None
