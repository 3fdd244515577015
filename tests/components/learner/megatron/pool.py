"""A long-lived pool of gloo processes: starting one costs seconds, running a function in it does not.

`pool.run(function, *args)` calls `function(*args)` on every rank at once, with torch.distributed initialised, and
returns the results in rank order. The function must stand at the top level of a file; arguments and results travel by
pickle. Each rank loads that file once, by its path.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing as mp
import os
import pickle
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

ROOT = __file__.rsplit("/tests/", 1)[0]
# Imported once by the fork server and shared by all ranks.
MOST_THREADS = 150  # of a rank; groups of earlier layouts keep some
PRELOAD = ["torch", "torch.distributed", "transformers", "megatron.core", "megatron.core.optimizer", "mbridge"]


class RankError(AssertionError):
    """A function failed on one or more ranks; the text holds their tracebacks."""


class Pool:
    """`size` processes with a gloo group over all of them, or the environment of torchrun alone."""

    def __init__(self, size: int, grouped: bool = True) -> None:
        self.size = size
        self.grouped = grouped
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0, grace: float = 10.0) -> list[Any]:
        """The results of all ranks; RankError when one raised, or is silent `grace` seconds after another raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__code__.co_filename, function.__name__, args))
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any, int]] = {}
        while len(answers) < self.size:
            left = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(left.values())
                self.close()
                raise RankError(_failures(answers) or f"ranks {missing} gave no answer within {timeout} s")
            for pipe in ready:
                rank = left[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = (False, "the process died", 0)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + grace)
        failures = _failures(answers)
        if failures:
            raise RankError(failures)
        if max(threads for _, _, threads in answers.values()) > MOST_THREADS:
            self.close()
        return [answer for _, (_, answer, _) in sorted(answers.items())]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            here, there = context.Pipe()
            # The child may not be able to import this module by name, so it runs the file.
            given = {"init_globals": {"SERVE": (there, rank, self.size, port, self.grouped)}, "run_name": "pooled_rank"}
            process = context.Process(target=runpy.run_path, args=(__file__,), kwargs=given)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        # A rank whose pipe closes ends by itself, and with it what it started (checkpoints start processes); one that
        # hangs is killed.
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _failures(answers: dict[int, tuple[bool, Any, int]]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, (fine, text, _) in sorted(answers.items()) if not fine)


def _load(path: str) -> Any:
    name = "pooled_" + path.removeprefix(ROOT).strip("/").removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _serve(pipe: Connection, rank: int, size: int, port: int, grouped: bool) -> None:
    import torch
    import torch.distributed as dist

    gc.freeze()
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
    if grouped:
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}")
    while True:
        try:
            path, name, args = pipe.recv()
        except EOFError:  # the pool is closed, or the test process gone
            return
        try:
            answer = (True, getattr(_load(path), name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        # Plain, because pipes would send each tensor as a file of shared memory.
        pipe.send_bytes(pickle.dumps((*answer, len(os.listdir("/proc/self/task")))))


if __name__ == "pooled_rank":
    _serve(*globals()["SERVE"])
