"""`creditgraph replay`: runs a node of a finished run again, with changed settings, or a component on files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.arguments import add_output, add_settings, add_trust
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.registry import known_components

SUMMARY = "Run one node of a finished run again and show what changed, or one component on Parquet files."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_trust(parser)
    parser.epilog = (
        "examples:\n"
        "  creditgraph replay runs/toy_srpo-s0 --iteration 12 --node advantage -s normalize=mean\n"
        "  creditgraph replay advantage.group trajectories=t.parquet rewards=r.parquet -s normalize=mean -o out/"
    )
    parser.add_argument("target", metavar="RUN|COMPONENT", help="run directory, registered name or module:Class")
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="socket=FILE",
        help="of a component: Parquet file per input; a socket may be given several times",
    )
    parser.add_argument("--node", help="of a run: node of its graph")
    parser.add_argument(
        "--iteration", type=int, help="of a run: recorded iteration, from 0; of a component: key of its draws"
    )
    parser.add_argument("--model", help="of a component: model folder for a policy input (default: the embedded one)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of a component: default cpu")
    parser.add_argument("--seed", type=int, help="of a component: random seed, default 0")
    add_settings(parser, "a setting of the component")
    add_output(parser, "DIR", "write each output as Parquet there")


def main(options: argparse.Namespace) -> int:
    """Prints metrics and outputs of the component and, for a run, the difference from its record."""
    if _is_component(options):
        if options.node is not None:
            raise ConfigError(
                f"replay {options.target}: --node is for a run directory, and this is a component; expected "
                "socket=FILE for its inputs, or a run directory in its place."
            )
        return _on_files(options)
    flags = [f"--{name}" for name in ("model", "device", "seed") if getattr(options, name) is not None]
    if options.inputs or flags:
        raise ConfigError(
            f"replay {options.target}: {', '.join([*options.inputs, *flags])} is for a component, and this is a run "
            "directory; expected --iteration N --node NAME, whose inputs are those that the run recorded."
        )
    if options.node is None or options.iteration is None:
        raise ConfigError(
            f"replay {options.target}: expected --iteration N and --node NAME with a run directory; for a component "
            "a registered name (creditgraph components lists them) or module:Class."
        )
    return _of_run(options)


def _is_component(options: argparse.Namespace) -> bool:
    """Whether the target is a component; a name that is neither a folder nor registered is one if it has inputs."""
    if Path(options.target).is_dir():
        return False
    return options.target in known_components() or ":" in options.target or bool(options.inputs)


def _of_run(options: argparse.Namespace) -> int:
    from creditgraph.pipeline.app.differences import describe_difference
    from creditgraph.pipeline.run.compose.overrides import parse_settings
    from creditgraph.pipeline.run.replay import Replay

    replay = Replay(Path(options.target))
    try:
        again = replay.again(options.node, options.iteration, parse_settings(options.set))
    finally:
        replay.close()
    for note in replay.notes:
        print(f"note: {note}")
    _print(again.outputs, again.metrics, options.output)
    for name in again.outputs:
        if name not in again.recorded:
            print(f"{options.node}.{name}: not recorded, so there is nothing to compare with")
            continue
        lines = describe_difference(again.recorded[name], again.outputs[name])
        print(f"{options.node}.{name}: " + ("the same bits as recorded" if not lines else "differs from the record"))
        for line in lines:
            print(f"  {line}")
    return 0


def _on_files(options: argparse.Namespace) -> int:
    from creditgraph.pipeline.app.component_run import ComponentRun
    from creditgraph.pipeline.run.compose.overrides import parse_settings

    with ComponentRun(options.seed or 0, options.device or "cpu", options.model or "tiny") as components:
        inputs = components.read_inputs(options.target, options.inputs)
        settings = parse_settings(options.set)
        outputs, metrics = components.run_component(options.target, settings, inputs, options.iteration or 0)
        _print(outputs, metrics, options.output)
    return 0


def _print(outputs: Mapping[str, Any], metrics: Mapping[str, float], folder: str | None) -> None:
    """Shows a summary of each output and, with a folder, writes batches there as Parquet."""
    from creditgraph.pipeline.app.component_run import summary
    from creditgraph.pipeline.core.payloads import Batch
    from creditgraph.pipeline.run.recording import write_payload
    from creditgraph.pipeline.run.run_directory import writing

    for name, value in metrics.items():
        print(f"{name} = {value:.6g}")
    for name, value in outputs.items():
        print(f"{name}: {summary(value)}")
        if folder and isinstance(value, Batch):
            target = Path(folder) / f"{name}.parquet"
            with writing(target, "--output DIR"):
                target.parent.mkdir(parents=True, exist_ok=True)
                write_payload(target, value)
            print(f"  wrote {target}")
