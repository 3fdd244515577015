"""The process of the `creditgraph` command, and `python -m creditgraph`."""

import gc
import sys


def main() -> int:
    """Runs the command that `sys.argv` names; returns its exit code."""
    # Importing torch and transformers makes millions of objects that stay; collections among them are a seventh of the
    # start at Python's threshold of 700.
    gc.set_threshold(20_000)
    from creditgraph.pipeline.app.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
