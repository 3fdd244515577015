"""The queue in which megatron-core's writers of a checkpoint report, in a process that ends with its rank.

megatron-core takes it from a manager of multiprocessing, whose process waits for ever when a rank is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

_POLL_SECONDS = 0.5


def make_queue() -> Any:
    """A queue of a manager's process."""
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(_end_with_parent)
    return manager.Queue()  # which keeps the manager


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while os.getppid() == parent.pid:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
