"""Run by `python -m`: vLLM's API server with a key, or with --headless workers for the one of another node.

On a CPU it forks, to import once.

The key stands in the environment variable CREDITGRAPH_SERVER_KEY, because every user of a host sees arguments.

vLLM spawns engine core and worker on CPUs, and each imports everything again: 40 to 80 s on two cores, compared with
15 to 27 s forked. Forking is safe there because no thread or device has been started before. On GPUs vLLM's default is
kept.
"""

import gc
import importlib
import multiprocessing
import runpy
import sys
from multiprocessing.context import BaseContext

from creditgraph.components.engine.vllm.key import server_key

MIDDLEWARE = "creditgraph.components.engine.vllm.route.GuardedRows"
_USERS = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.core_client",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)


def fork_everywhere() -> None:
    """Makes every module of vLLM that starts processes fork them."""
    import vllm.utils.system_utils as system

    chosen = system.get_mp_context

    def forked() -> BaseContext:
        return multiprocessing.get_context("fork")

    system.get_mp_context = forked
    for name in _USERS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and getattr(module, "get_mp_context", None) is chosen:
            module.get_mp_context = forked  # type: ignore[attr-defined]


def run_headless() -> None:
    """Runs `vllm serve --headless`, the API server's arguments but no API."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    ServeSubcommand.cmd(parser.parse_args(["serve", *sys.argv[1:]]))


if __name__ == "__main__":
    server_key()
    gc.set_threshold(20_000)  # as in creditgraph/__main__.py: a fifth of the imports
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        fork_everywhere()
    if "--headless" in sys.argv:
        run_headless()
        sys.exit()
    sys.argv += ["--middleware", MIDDLEWARE]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
