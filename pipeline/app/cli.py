"""The `creditgraph` command: its subcommands, and the handling of errors and interrupts.

Each command is a module of `pipeline/app/commands` with `SUMMARY`, `configure(parser)` and `main(options)`. `--help`
imports all of them, so they import torch and modules that need it inside `main`.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn, Protocol, cast

from creditgraph.pipeline.app.completion import complete
from creditgraph.pipeline.app.version import version_text
from creditgraph.pipeline.core.errors import CreditgraphError, any_extra, did_you_mean, raised_text
from creditgraph.pipeline.run.trust import TRUST


class Command(Protocol):
    """The interface of a module of `commands`."""

    SUMMARY: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments."""

    def main(self, options: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


COMMAND_GROUP = "creditgraph.commands"  # entry points: name = a module like those of pipeline/app/commands
_OWN = (
    "train graph components new check audit replay runs diff report watch credit export data submit status cancel "
    "serve doctor"
)
COMMANDS = {name: EntryPoint(name, f"creditgraph.pipeline.app.commands.{name}", COMMAND_GROUP) for name in _OWN.split()}


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Name → entry point of the commands that others add, those of `creditgraph.lab` among them."""
    added = sorted(entry_points(group=COMMAND_GROUP), key=lambda entry: entry.name)
    # None replaces a command of the product.
    return {entry.name: entry for entry in added if entry.name not in COMMANDS}


def all_commands() -> dict[str, Command]:
    """Name → module of every command that can be loaded: a broken package must not end the others' commands."""
    found = {}
    for name, entry in (COMMANDS | added_commands()).items():
        with suppress(CreditgraphError):
            found[name] = load(entry)
    return found


def load(entry: EntryPoint) -> Command:
    """The module of a command; CreditgraphError where it cannot be loaded."""
    try:
        return cast(Command, entry.load())
    except Exception as error:  # a module of another package may fail in any way
        raise CreditgraphError(
            f"{entry.value} cannot be loaded: {raised_text(error)}. Repair or uninstall its package."
        ) from error


HELP = """\
usage: creditgraph COMMAND …

Credit assignment for RL with verifiable rewards, as a declared graph of reusable steps.

commands:
{commands}

added by the lab and by other packages:
{added}

first steps:
  creditgraph train recipe=toy_srpo             train the embedded model on the embedded task
  creditgraph graph recipe=toy_srpo             see what that is
  creditgraph components                        the reusable steps
  creditgraph COMMAND --help                    all options of a command
  creditgraph --version                         version and commit"""

# What people type elsewhere → what it is here.
ELSEWHERE = {
    "resume": "`creditgraph train RUN` continues a run",
    "continue": "`creditgraph train RUN` continues a run",
    "run": "`creditgraph train` trains, `creditgraph replay` runs one node",
    "fit": "`creditgraph train`",
    "evaluate": "`creditgraph eval`",
    "test": "`creditgraph check` tests a component, `creditgraph eval` evaluates a model",
    "list": "`creditgraph runs` lists runs, `creditgraph graph --list` recipes, `creditgraph components` the steps",
    "ls": "`creditgraph runs`",
    "plot": "`creditgraph report`",
    "init": "`creditgraph new`",
}
INTERRUPTED = 130  # exit code of a process that ended by Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code: 2 for a user's mistake, which is printed, 130 for an interrupt."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A log shows a line when it is written, and whole: srun puts the rank in front of every piece that it reads.
        # Where the locale has no "✓", a table has "?".
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        complete(all_commands())
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(HELP.format(commands=_lines(COMMANDS), added=_lines(added_commands())))
        return 0
    if name == "--version":
        print(f"creditgraph {version_text()}")
        return 0
    known = COMMANDS if name in COMMANDS else added_commands()
    if name not in known:
        elsewhere = ELSEWHERE.get(name)
        hint = f" Here: {elsewhere}." if elsewhere else did_you_mean(name, [*COMMANDS, *known])
        print(f"creditgraph: unknown command '{name}'.{hint}", file=sys.stderr)
        return 2
    try:
        command = load(known[name])
        parser = _Parser(
            prog=f"creditgraph {name}",
            description=command.SUMMARY,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.configure(parser)
        options = parser.parse_intermixed_args(arguments)
        # Components of the user's own, named as module:Class; last, so that no file there replaces a library's.
        sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())] + [os.getcwd()]
        with _quiet_torch(), any_extra():
            TRUST.set(getattr(options, "trust", False))
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


def _lines(commands: Mapping[str, EntryPoint]) -> str:
    return "\n".join(f"  {name:<14}{_summary(entry)}" for name, entry in commands.items()) or "  none"


def _summary(entry: EntryPoint) -> str:
    try:
        return load(entry).SUMMARY
    except CreditgraphError as error:
        return str(error)


class _Parser(argparse.ArgumentParser):
    """Says how a setting is written when one was given as an option, such as `--recipe toy_srpo`."""

    def error(self, message: str) -> NoReturn:
        option = message.partition("unrecognized arguments: --")[2].split()
        if option and not any(action.option_strings == [f"--{option[0]}"] for action in self._actions):
            message += f". Options are listed by --help; a setting is written {option[0].partition('=')[0]}=VALUE."
        super().error(message)


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
