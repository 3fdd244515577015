"""Commands of pages, run in this process: to start Python and import torch takes longer than most of them."""

import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from creditgraph.pipeline.app.cli import main

COMMAND = re.compile(r"^(creditgraph (?:.*\\\n)*.*)$", re.MULTILINE)


@contextlib.contextmanager
def working_in(folder):
    """A working folder; what commands add to the module path and imports is taken back."""
    threads, path, modules = torch.get_num_threads(), list(sys.path), set(sys.modules)
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(folder):
                del sys.modules[name]
        torch.set_num_threads(threads)


def run_bash(block):
    """The lines of a block in their order: commands of `creditgraph` here, what stands between them in a shell each."""
    for part in COMMAND.split(block):
        if part.startswith("creditgraph "):
            assert main(shlex.split(part.replace("\\\n", " "), comments=True)[1:]) == 0, part
        elif part.strip():
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", part], capture_output=True, text=True)
            assert done.returncode == 0, f"{part}\n{done.stdout}\n{done.stderr}"
