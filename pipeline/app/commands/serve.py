"""`creditgraph serve`: one engine server of a configuration, for job scripts; it ends with its signal.

After TERM, which SLURM sends to every step, the learner may still finish an iteration; USR2 ends the server at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from creditgraph.pipeline.app.arguments import OVERRIDES_HELP, add_overrides
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.run_directory import writing

if TYPE_CHECKING:
    from creditgraph.pipeline.app.cluster.servers import EngineServer

SUMMARY = "Run one engine server of a configuration (used by job scripts)."
GRACE_SECONDS = 25.0  # after TERM, in which the learner may finish an iteration
LOG = "CREDITGRAPH_LOG"  # variable of job scripts: prefix of the file for all output of a server


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = OVERRIDES_HELP
    add_overrides(parser)
    parser.add_argument("--index", type=int, default=0, help="number of this server")
    parser.add_argument("--count", type=int, default=1, help="number of servers in all")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the server, each a task of one SLURM step")


def main(options: argparse.Namespace) -> int:
    """Starts the server, publishes its address and waits for a signal."""
    ended = threading.Event()
    signalled: list[float] = []  # when signals came

    def handle(number: int, frame: FrameType | None) -> None:
        signalled.append(time.monotonic())
        if number == signal.SIGUSR2:
            ended.set()
            if server is None:
                os._exit(0)  # loading may take minutes that a preempted job does not have; the engine's guard ends it

    server: EngineServer | None = None
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handle)
    log = redirect_output(os.environ.get(LOG, ""))
    from creditgraph.pipeline.app.cluster.servers import EngineServer

    experiment = build_experiment(compose(options.overrides, options.config_dir), " ".join(options.overrides))
    server = EngineServer(experiment, options.index, options.count, log, options.nodes)
    try:
        while not ended.is_set() and not (signalled and time.monotonic() > signalled[0] + GRACE_SECONDS):
            if url := server.publish():
                print(f"server {options.index} of {options.count} is ready: {url}", flush=True)
            ended.wait(0.2)
    finally:
        server.close()
    return 0


def redirect_output(prefix: str) -> Path | None:
    """Redirects all output of this process and its server to PREFIX-NODE.log; "" does not redirect it."""
    if not prefix:
        return None
    log = Path(f"{prefix}-{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}.log")
    with writing(log), log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return log
