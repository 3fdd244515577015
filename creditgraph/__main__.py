"""The process of the `creditgraph` command, and `python -m creditgraph`."""

import atexit
import gc
import os
import sys
from contextlib import suppress


def main() -> int:
    """Runs the command that `sys.argv` names; returns its exit code."""
    # Importing torch and transformers makes millions of objects that stay; collections among them are a seventh of the
    # start at Python's threshold of 700.
    gc.set_threshold(20_000)
    codes: list[int] = []
    atexit.register(_leave, codes)  # first, so called last
    from creditgraph.pipeline.app.cli import main as run

    codes.append(run())
    return codes[0]


def _leave(codes: list[int]) -> None:
    """Ends the process of a command that has returned: Python would take seconds to collect what was imported.

    Profilers of GPUs and tools that trace lines write what they have at Python's own end, so it stays there.
    """
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    if codes and not on_gpu and sys.gettrace() is None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(main())
