"""Where the processes of megatron-core that write a checkpoint report to their rank: a file that both have open.

megatron-core takes a manager of multiprocessing, a further process per rank that imports torch and outlives a rank that
is killed.
"""

from __future__ import annotations

import pickle
import queue
import tempfile
from typing import Any


class ResultsQueue:
    """What the process that a rank forks for a checkpoint reports when it is done."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the queue

    def put(self, results: Any) -> None:
        """Writes them, in the process that was forked."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Reads them, in the rank. Raises queue.Empty when that process ended before it had reported."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            raise queue.Empty from None
