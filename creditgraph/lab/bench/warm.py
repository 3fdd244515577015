"""Runs `creditgraph` commands in processes forked from ones that have the libraries loaded.

A command alone takes about seven seconds to load them, which is longer than a short run trains. A process that forks
never computes, so that every command begins as it would alone; a test compares the weights.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

LIBRARIES = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
    "creditgraph.components.learner.hf.learner",
    "creditgraph.components.engine.local.engine",
    "creditgraph.pipeline.app.commands.train",
    "creditgraph.pipeline.run.executor",
)


class Warm:
    """Processes that are ready to fork. Use as a context manager; `run` may be called from several threads."""

    def __init__(self) -> None:
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while not self._idle.empty():
            self._idle.get().communicate()

    def run(self, arguments: list[str], log: Path) -> int:
        """Runs `creditgraph` with arguments, its output added to a file; its exit code, −1 if it was killed."""
        try:
            process = self._idle.get_nowait()
        except Empty:
            process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([arguments, str(log)]), file=process.stdin, flush=True)
        code = process.stdout.readline()
        if not code:
            return -1
        self._idle.put(process)
        return int(code)

    @staticmethod
    def _started() -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": os.environ.get("WANDB_MODE", "offline")}
        pipe = subprocess.PIPE
        # -P: no file of the folder where the command was started hides a library's.
        command = [sys.executable, "-P", "-m", __name__]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def load() -> None:
    """Loads what a short run needs."""
    for library in LIBRARIES:
        importlib.import_module(library)
    from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

    build_experiment(compose(["recipe=toy_grpo"]))


def serve() -> None:
    """Reads [arguments, log] from each line of standard input, and writes the exit code of each."""
    # Ctrl-C in a terminal reaches the run too, which then saves its state: this process waits until it has.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load()
    for line in sys.stdin:
        arguments, log = json.loads(line)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os._exit(_command(arguments, log))
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


def _command(arguments: list[str], log: str) -> int:
    """The command, in a process of its own; its exit code."""
    import creditgraph

    with Path(log).open("ab", buffering=0) as file, Path(os.devnull).open() as nothing:
        for number, stream in enumerate((nothing, file, file)):
            os.dup2(stream.fileno(), number)
    try:
        return creditgraph.main(arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
