"""`creditgraph watch`: the report of runs in a browser, which loads itself again while they train."""

from __future__ import annotations

import argparse
from pathlib import Path

from creditgraph.pipeline.app.arguments import add_trust

SUMMARY = "Serve the report of runs on this host; the page follows them while they train."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph watch                      the newest runs of ./runs\n"
        "  creditgraph watch runs/toy_srpo-s0 --open\n"
        "From another machine: ssh -L 8000:127.0.0.1:8000 HOST, with --port 8000."
    )
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER", help="a run, or a folder of runs")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--open", action="store_true", help="open the page in the browser of this host")


def main(options: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    import webbrowser

    from creditgraph.pipeline.app.report.live import LivePage, Server, newest

    folders = [Path(folder) for folder in options.folders]
    for run in newest(folders):
        print(f"{run}")
    with Server(LivePage(folders), options.port) as server:
        print(f"{server.url}  (this address is the key; Ctrl-C ends)", flush=True)
        if options.open:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
