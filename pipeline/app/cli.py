"""The `creditgraph` command: its subcommands, and the handling of errors and interrupts.

Each command is a module of `pipeline/app/commands` with `SUMMARY`, `configure(parser)` and `main(options)`. The modules
are imported here, so they import torch and modules that need it inside `main`, which keeps `--help` fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

from pipeline.app.commands import (
    audit,
    cancel,
    check,
    components,
    credit,
    data,
    doctor,
    eval,
    graph,
    replay,
    report,
    serve,
    status,
    submit,
    train,
)
from pipeline.app.commands.tools import compare, creditbench, export, localization, plan, resets
from pipeline.app.completion import complete
from pipeline.core.errors import CreditgraphError, did_you_mean


class Command(Protocol):
    """The interface of a module of `commands`."""

    SUMMARY: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def main(self, options: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


COMMANDS: dict[str, Command] = {
    "train": train,
    "graph": graph,
    "components": components,
    "check": check,
    "audit": audit,
    "replay": replay,
    "report": report,
    "credit": credit,
    "eval": eval,
    "export": export,
    "compare": compare,
    "creditbench": creditbench,
    "localization": localization,
    "resets": resets,
    "data": data,
    "submit": submit,
    "status": status,
    "cancel": cancel,
    "serve": serve,
    "plan": plan,
    "doctor": doctor,
}

HELP = """\
usage: creditgraph COMMAND …

Credit assignment for RL with verifiable rewards, as a declared graph of reusable steps.

commands:
{commands}

first steps:
  creditgraph train recipe=toy_srpo             train the embedded model on the embedded task
  creditgraph graph recipe=toy_srpo             see what that is
  creditgraph components                        the reusable steps
  creditgraph COMMAND --help                    all options of a command
  creditgraph --version                         version and commit"""

INTERRUPTED = 130  # exit code of a process that ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 2 for a user's mistake, which is printed, 130 for an interrupt."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        complete(COMMANDS)
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(HELP.format(commands="\n".join(f"  {n:<12}{c.SUMMARY}" for n, c in COMMANDS.items())))
        return 0
    if name == "--version":
        print(f"creditgraph {_version()}")
        return 0
    if name not in COMMANDS:
        print(f"creditgraph: unknown command '{name}'.{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    parser = _Parser(
        prog=f"creditgraph {name}",
        description=command.SUMMARY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.configure(parser)
    options = parser.parse_intermixed_args(arguments)
    # Components of the user's own, named as module:Class; last, so that no file of that folder replaces a library's.
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())] + [os.getcwd()]
    try:
        with _quiet_torch():
            return command.main(options)
    except CreditgraphError as error:
        if os.environ.get("CREDITGRAPH_TRACEBACK"):
            raise
        print(f"creditgraph {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("creditgraph: interrupted", file=sys.stderr)
        if threading.active_count() > 1:
            # The generation thread may be inside a long call; leaving through the interpreter would wait for it or
            # crash.
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (for example `| head`); nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _Parser(argparse.ArgumentParser):
    """Says how a setting is written when one was given as an option, such as `--recipe toy_srpo`."""

    def error(self, message: str) -> NoReturn:
        option = message.partition("unrecognized arguments: --")[2].split()
        if option and not any(action.option_strings == [f"--{option[0]}"] for action in self._actions):
            message += f". Options are listed by --help; a setting is written {option[0].partition('=')[0]}=VALUE."
        super().error(message)


def _version() -> str:
    """The version of the installed package, with its commit in a checkout."""
    import subprocess
    from importlib.metadata import PackageNotFoundError, version

    from pipeline import ROOT

    try:
        number = version("creditgraph")
    except PackageNotFoundError:
        number = "(not installed)"
    if not (ROOT / ".git").exists():
        return number
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return number
    return f"{number}, commit {done.stdout.strip()}" if done.returncode == 0 else number


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silences torch's C++ stack traces, because ranks that lose each other report it themselves.

    torch reads the variable when it is imported, and processes started here inherit it.
    """
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
