"""`creditgraph doctor`: checks an installation, a node or a cluster and lists what to fix."""

import argparse
import os
from pathlib import Path

from creditgraph.pipeline.app.cluster.doctor import examine

SUMMARY = "Check an installation, a node or a cluster, and list what to fix."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("--node", action="store_true", help="only what a node of a job needs")
    parser.add_argument("--slurm", action="store_true", help="fail if SLURM does not respond")
    parser.add_argument("--shared", metavar="FOLDER", help="also a folder that all nodes must see")
    parser.add_argument("--quiet", action="store_true", help="print only what failed")


def main(options: argparse.Namespace) -> int:
    """Prints findings; exit code 1 when one failed."""
    findings = examine(Path(options.shared) if options.shared else None, options.node, options.slurm)
    failed = [f for f in findings if f.state == "FAIL"]
    node = os.environ.get("SLURMD_NODENAME", "")
    for finding in findings:
        if not options.quiet or finding.state in ("warn", "FAIL"):
            print(f"{node}: {finding}" if options.quiet and node else finding)
    if not options.quiet:
        print("all well" if not failed else f"{len(failed)} to fix")
    return 1 if failed else 0
