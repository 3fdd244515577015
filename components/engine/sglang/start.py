"""`python …/start.py …`: SGLang's server, which takes its key from the environment.

SGLang takes a key as an argument only, and every user of a host sees arguments. The script is run by path, because
SGLang's environment has no other package of this project.
"""

import os
import sys
from importlib.metadata import version

_KEY = "CREDITGRAPH_SERVER_KEY"
_TESTED = "0.5.23"


def main() -> None:
    """Starts the server with the arguments of the command line."""
    key = os.environ.pop(_KEY, "")
    if not key:
        sys.exit(f"creditgraph: expected the server's key in the environment variable {_KEY}, got none.")
    if (found := version("sglang").partition("+")[0]) != _TESTED:
        sys.exit(f"creditgraph: expected sglang {_TESTED}, whose API was compared with ours, got {found}.")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(sys.argv[1:])
    arguments.api_key = key
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
