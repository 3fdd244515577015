"""Signals that arrive while `creditgraph train` ends."""

import signal
import subprocess
import sys

ENDING = """
import signal, sys, time
from creditgraph.pipeline.app.commands import train

class Late:
    def __del__(self):  # runs while Python ends, after it has reset its own handlers
        print("ending", flush=True)
        time.sleep(1)

signal.signal(signal.SIGUSR1, train._not_begun)
sys.modules["late"] = Late()
sys.exit(train._ended(75))
"""


def test_a_second_signal_does_not_change_the_exit_code_of_a_run_that_has_saved():
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 75
