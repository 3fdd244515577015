"""What a killed rank leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = """
import time
from creditgraph.components.learner.megatron.results_queue import make_queue
if __name__ == "__main__":
    queue = make_queue()
    queue.put(5)
    print(queue.get(), queue._manager._process.pid, flush=True)
    time.sleep(600)
"""


def test_the_queue_of_a_killed_rank_ends(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    with subprocess.Popen([sys.executable, str(tmp_path / "rank.py")], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        value, manager = map(int, rank.stdout.readline().split())
        assert value == 5
        assert os.path.exists(f"/proc/{manager}")
        rank.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{manager}"):
        assert time.monotonic() < deadline, "it outlives its rank"
        time.sleep(0.05)
