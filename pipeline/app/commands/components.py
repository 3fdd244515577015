"""`creditgraph components`: the reusable steps."""

import argparse
import json
from dataclasses import asdict

from creditgraph.pipeline.app.completion import complete_component, with_completer
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.registry import known_components

SUMMARY = "List components with their inputs, outputs, settings, metrics and papers, and the settings of a run."
RUN = "run"  # named beside components: the section of a configuration that every run has


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    names = parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="one component with its settings and metrics, all of a kind (sampler), or run: the settings run.*",
    )
    with_completer(names, complete_component)
    parser.add_argument("--json", action="store_true", help="machine-readable")


def main(options: argparse.Namespace) -> int:
    """Prints the table, or the details of the named components."""
    if RUN in options.names:
        if len(options.names) > 1:
            raise ConfigError("components: 'run' stands for the settings run.*; expected it alone, or components.")
        return _list_run_settings(options.json)
    from creditgraph.pipeline.app.catalog import describe, listed

    known = known_components()
    names: list[str] = []
    for requested in options.names:
        kind = [name for name in known if name.partition(".")[0] == requested]
        if not kind and requested not in known and ":" not in requested:
            raise ConfigError(f"no component '{requested}'.{did_you_mean(requested, known)}")
        names += kind or [requested]
    describe_one = describe if len(names) == 1 else listed
    entries = {name: describe_one(name) for name in (names or known)}
    if options.json:
        print(json.dumps({name: asdict(entry) for name, entry in entries.items()}, indent=1))
        return 0
    for name, entry in entries.items():
        print(f"{name:22} {entry.summary}" + (f"  [{entry.paper}]" if entry.paper else ""))
        if entry.problem:
            continue
        print(f"{'':22}   takes {', '.join(f'{k}: {v}' for k, v in entry.takes.items()) or 'nothing'}")
        print(f"{'':22}   makes {', '.join(f'{k}: {v}' for k, v in entry.makes.items())}")
        if options.names:
            for setting in entry.settings:
                print(f"{'':22}   {setting.name}: {setting.type} = {setting.default}  {setting.doc}")
            for metric in entry.metrics:
                print(f"{'':22}   logs {metric.name} [{metric.unit}]  {metric.text}")
    return 0


def _list_run_settings(as_json: bool) -> int:
    from creditgraph.pipeline.app.catalog import settings_of
    from creditgraph.pipeline.run.run_settings import RunSettings

    settings = settings_of(RunSettings)
    if as_json:
        print(json.dumps([asdict(setting) for setting in settings], indent=1))
        return 0
    for setting in settings:
        print(f"run.{setting.name}: {setting.type} = {setting.default}  {setting.doc}")
    return 0
