"""Completion in a shell, through argcomplete: commands, options, components, files of config groups, settings run.*.

`eval "$(register-python-argcomplete creditgraph)"` in ~/.bashrc or ~/.zshrc turns it on. The shell then starts
`creditgraph` with _ARGCOMPLETE in its environment at every Tab, so torch is imported for settings `run.*` only.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def complete(commands: Mapping[str, Any]) -> None:
    """Prints what may follow the line in the environment, and ends the process.

    Args:
        commands: name → module with `SUMMARY` and `configure(parser)`.
    """
    import argcomplete

    parser = argparse.ArgumentParser(prog="creditgraph")
    subparsers = parser.add_subparsers()
    for name, command in commands.items():
        command.configure(subparsers.add_parser(name, help=command.SUMMARY))
    argcomplete.autocomplete(parser)


def with_completer(action: argparse.Action, completer: Any) -> None:
    """Lets argcomplete ask `completer(prefix, parsed_args, …)` for the values of an argument."""
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete reads it there


def complete_override(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """`recipe=` and other groups, their files after the "=", and `run.` settings."""
    from creditgraph.pipeline.run.compose.choices import list_choices, list_groups, search_dirs

    dirs = search_dirs([folder for folder in parsed_args.config_dir if Path(folder).is_dir()])
    key, equals, _value = prefix.partition("=")
    if equals:
        return [f"{key}={name}" for name in list_choices(key, dirs)]
    groups = [f"{group}=" for group in sorted(list_groups(dirs))]
    return [*groups, *_run_settings()] if prefix.startswith("run") else [*groups, "run."]


def complete_component(prefix: str, **_: Any) -> Iterable[str]:
    """Names of components, their kinds, and "run"."""
    from creditgraph.pipeline.core.registry import known_components

    known = known_components()
    return ["run", *sorted({name.partition(".")[0] for name in known}), *known]


def _run_settings() -> list[str]:
    from creditgraph.pipeline.app.catalog import settings_of
    from creditgraph.pipeline.run.run_settings import RunSettings

    return [f"run.{setting.name}=" for setting in settings_of(RunSettings)]
