"""`creditgraph run-node`: one component on the user's own files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipeline.core.component import Component, Context, ModelSpec
from pipeline.core.errors import ConfigError, did_you_mean
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Batch, Payload, Weights
from pipeline.core.registry import known_components, load_class
from pipeline.core.settings import build_config
from pipeline.core.sockets import Node, sockets_of
from pipeline.run.compose import parse_settings
from pipeline.run.node_runner import NodeRunner, set_origin
from pipeline.run.recording import read_payload, write_payload


def main(options: argparse.Namespace) -> int:
    """Builds the component, reads its inputs, runs it once, prints and writes its outputs."""
    context = Context(seed=options.seed, device=options.device, model=ModelSpec(path=options.model))
    made: list[NodeRunner] = []
    try:
        inputs = _read_inputs(options.use, options.inputs, context, made)
        outputs, metrics = _run(options.use, parse_settings(options.set), inputs, context, made, options.iteration)
        print_outputs(outputs, metrics, options.output)
    finally:
        for runner in made:
            runner.close()
    return 0


def _read_inputs(use: str, assignments: list[str], context: Context, made: list[NodeRunner]) -> dict[str, Any]:
    sockets = sockets_of(load_class(use)).inputs
    found: dict[str, list[Any]] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"input '{text}': no '='; wanted socket=FILE.parquet, or socket=engine.local for a policy."
            )
        if name not in sockets:
            raise ConfigError(f"input '{name}': {use} has no such socket.{did_you_mean(name, sockets)}")
        if value in known_components() or (":" in value and not Path(value).exists()):
            found.setdefault(name, []).append(_make_handle(value, name, context, made))
        else:
            found.setdefault(name, []).append(set_origin(read_payload(Path(value)), value))
    missing = [n for n, s in sockets.items() if s.required and n not in found]
    if missing:
        wanted = ", ".join(f"{n}=… ({sockets[n].type_text})" for n in missing)
        raise ConfigError(
            f"{use}: missing input {wanted}; give a Parquet file, or a component for a Policy or Verifier."
        )
    return {n: values if sockets[n].is_list else values[0] for n, values in found.items()}


def _make_handle(use: str, socket: str, context: Context, made: list[NodeRunner]) -> Any:
    """A policy or verifier from a component that needs at most weights; the weights are those of the model folder."""
    wanted = sockets_of(load_class(use)).inputs
    inputs: dict[str, Any] = {}
    if any(Weights in s.types for s in wanted.values()):
        name = next(n for n, s in wanted.items() if Weights in s.types)
        inputs[name] = Weights(version=0)
    outputs, _ = _run(use, {}, inputs, context, made, 0)
    return next(iter(outputs.values()))


def _run(
    use: str, settings: dict[str, Any], inputs: dict[str, Any], context: Context, made: list[NodeRunner], iteration: int
) -> tuple[dict[str, Any], dict[str, float]]:
    cls: type[Component] = load_class(use)
    config, problems = build_config(cls.Config, settings, use)
    if problems:
        raise ConfigError("\n".join(problems))
    node = Node(name=use.partition(".")[0], use=use, cls=cls, config=config, wires={}, settings=settings)
    own = Context(**{**vars(context), "node": node.name, "metrics": {}, "rejected": []})
    runner = NodeRunner(node, own)
    made.append(runner)
    runner.setup()
    outputs = runner.run(iteration, inputs)
    return outputs, runner.harvest().metrics


def print_outputs(outputs: dict[str, Any], metrics: dict[str, float], folder: str | None) -> None:
    """Shows a summary of each output and writes batches as Parquet."""
    for name, value in metrics.items():
        print(f"{name} = {value:.6g}")
    for name, value in outputs.items():
        print(f"{name}: {summary(value)}")
        if folder and isinstance(value, Payload) and isinstance(value, Batch):
            target = Path(folder)
            target.mkdir(parents=True, exist_ok=True)
            write_payload(target / f"{name}.parquet", value)
            print(f"  wrote {target / f'{name}.parquet'}")


def summary(value: Any) -> str:
    """One line on a payload."""
    if isinstance(value, Batch):
        parts = []
        for name, content in vars(value).items():
            if isinstance(content, Jagged) and content.values.dtype.is_floating_point and len(content.values):
                parts.append(f"{name} {len(content.values)} values, mean {float(content.values.double().mean()):.4g}")
            elif isinstance(content, Jagged):
                parts.append(f"{name} {len(content.values)} values")
        return f"{type(value).__name__}, {len(value)} rows" + (f" ({'; '.join(parts)})" if parts else "")
    return type(value).__name__
