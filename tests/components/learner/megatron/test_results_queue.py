"""What a process that writes a checkpoint reports, and what one leaves behind that is killed."""

import multiprocessing
import os
import pickle
import queue
import signal

import pytest

from creditgraph.components.learner.megatron.results_queue import ResultsQueue

RESULTS = {0: [("weights", "x" * 200_000)], 1: []}  # more than a pipe holds


def _killed(results: ResultsQueue, share: float) -> None:
    written = pickle.dumps(RESULTS)
    results._file.write(written[: int(share * len(written))])
    results._file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_fork(function, *arguments) -> None:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()


def test_a_rank_reads_what_its_forked_process_reported() -> None:
    results = ResultsQueue()
    _in_a_fork(results.put, RESULTS)
    assert results.get_nowait() == RESULTS


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_of_a_process_that_was_killed_there_are_none(share: float) -> None:
    results = ResultsQueue()
    _in_a_fork(_killed, results, share)
    with pytest.raises(queue.Empty):
        results.get_nowait()
