"""One node on its own: on recorded inputs of a run, or on files of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pipeline.core.component import Component, Context
from pipeline.core.errors import ConfigError, RunError, did_you_mean
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Batch, Handle, Weights
from pipeline.core.settings import build_config
from pipeline.core.sockets import Node, Wire
from pipeline.run import checkpoint
from pipeline.run.compose import Experiment, build_experiment, deep_merge, read_yaml
from pipeline.run.node_runner import NodeRunner, set_origin
from pipeline.run.recording import read_payload
from pipeline.run.run_settings import resolve_device
from pipeline.run.values import as_inputs


def parse_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Turns ["optimizer.lr=1e-4", "split=2x4"] into nested settings; values are YAML.

    >>> parse_settings(["a.b=1", "a.c=x"])
    {'a': {'b': 1, 'c': 'x'}}
    """
    settings: dict[str, Any] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"-o {text}: no '='; wanted setting=value, for example -o normalize=mean.")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"-o {text}: the value is not YAML ({str(error).splitlines()[0]}); quote it.") from error
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        settings = deep_merge(settings, parsed)
    return settings


def open_run(path: Path, changes: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment of a run directory, with some settings changed."""
    config = path / "config.yaml"
    if not config.exists():
        near = [p.name for p in path.parent.iterdir() if (p / "config.yaml").exists()] if path.parent.is_dir() else []
        raise RunError(
            f"{path}: no run there (no config.yaml); wanted a run "
            f"directory.{did_you_mean(path.name, near) if near else ''}"
        )
    return build_experiment(deep_merge(read_yaml(config), dict(changes or {})), str(config))


class Replay:
    """Rebuilds single nodes of a finished run and the values they read.

    Batches come from the run's records. Handles (Policy, Verifier) are made anew by their nodes, weights come from the
    checkpoint nearest below; `notes` says what stood in for what.
    """

    def __init__(self, path: Path, changes: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.experiment = open_run(path, changes)
        self.graph = self.experiment.graph
        self.notes: list[str] = []
        self._iterations = self.experiment.run.iterations
        self._values: dict[tuple[str, str, int], Any] = {}
        self._runners: list[NodeRunner] = []

    def newest_checkpoint(self) -> int:
        """Iteration of the newest checkpoint, −1 without one."""
        return max((number for number, _ in self.checkpoints()), default=-1)

    def run(
        self, name: str, iteration: int, settings: Mapping[str, Any] | None = None, iterations: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
        """Runs one node; returns its recorded outputs (where there are any), its new outputs, and what it logged.

        Args:
            name: node of the run's graph.
            iteration: whose inputs it gets.
            settings: changed settings of the node.
            iterations: planned length of the run, when the node is to be told another one.
        """
        self._iterations = self.experiment.run.iterations if iterations is None else iterations
        node = self.graph[name]
        if settings:
            config, problems = build_config(node.cls.Config, deep_merge(node.settings, dict(settings)), name)
            if problems:
                raise ConfigError("\n".join(problems))
            node = dataclasses.replace(node, config=config)
        recorded = {output: self._recorded(name, output, iteration) for output in node.sockets.outputs}
        outputs, metrics = self._run(node, iteration)
        return {k: v for k, v in recorded.items() if v is not None}, outputs, metrics

    def close(self) -> None:
        """Closes every component that was built."""
        for runner in self._runners:
            runner.close()

    def _runner(self, node: Node) -> NodeRunner:
        run = self.experiment.run
        context = Context(
            node=node.name,
            node_index=self.graph.names.index(node.name),
            seed=run.seed,
            iterations=self._iterations,
            device=resolve_device(run.device),
            model=self.experiment.model,
            data=self.experiment.data,
            run_dir=None,
        )
        runner = NodeRunner(node, context)
        self._runners.append(runner)
        runner.setup()
        return runner

    def _run(self, node: Node, iteration: int) -> tuple[dict[str, Any], dict[str, float]]:
        inputs = {
            socket: [self.value(w, iteration, f"{node.name}.{socket}") for w in wires]
            for socket, wires in node.wires.items()
        }
        runner = self._runner(node)
        self._load_state(runner, iteration - 1)
        outputs = runner.run(iteration, as_inputs(node, inputs))
        return outputs, runner.harvest().metrics

    def value(self, wire: Wire, iteration: int, place: str) -> Any:
        """What a wire carried into an iteration."""
        key = (wire.source, wire.output, iteration - wire.delay)
        if key not in self._values:
            self._values[key] = self._make(wire, key[2], place)
        return self._values[key]

    def _make(self, wire: Wire, iteration: int, place: str) -> Any:
        node = self.graph[wire.source]
        socket = node.sockets.outputs[wire.output]
        found = self._recorded(wire.source, wire.output, iteration) if iteration >= 0 else None
        if found is not None:
            return found
        if socket.carries(Handle):
            outputs, _ = self._run(node, iteration)
            for name, value in outputs.items():
                self._values[wire.source, name, iteration] = value
            return outputs[wire.output]
        if iteration < 0 or socket.carries(Weights):
            runner = self._runner(node)
            self._load_state(runner, iteration)
            return set_origin(runner.initial()[wire.output], f"{wire.source}.{wire.output}")
        folder = self.path / "record" / f"{wire.source}.{wire.output}"
        there = sorted(int(p.stem) for p in folder.glob("*.parquet")) if folder.is_dir() else []
        hint = (
            f"recorded iterations: {_ranges(there)}"
            if there
            else "that output is not recorded; add it to run.record.outputs and train again"
        )
        raise RunError(
            f"{place}: '{wire.source}.{wire.output}' of iteration {iteration} is not in {self.path / 'record'}; {hint}."
        )

    def _recorded(self, node: str, output: str, iteration: int) -> Any:
        file = self.path / "record" / f"{node}.{output}" / f"{iteration:06d}.parquet"
        return set_origin(read_payload(file), f"{node}.{output}") if file.exists() else None

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(iteration, folder) of every checkpoint, oldest first."""
        folder = self.path / "checkpoints"
        return sorted((int(p.name), p) for p in folder.iterdir() if p.name.isdigit()) if folder.is_dir() else []

    def _load_state(self, runner: NodeRunner, after: int) -> None:
        """Gives a component its state after an iteration, from the nearest checkpoint at or below it."""
        # By the class, not by what it holds now: a backlog is empty in a fresh component and in the checkpoint it is
        # not.
        if type(runner.component).state_dict is Component.state_dict or after < 0:
            return
        below = [entry for entry in self.checkpoints() if entry[0] <= after]
        name = runner.node.name
        if not below:
            self.notes.append(f"{name}: no checkpoint at or before iteration {after}; its initial state stands in.")
            return
        at, path = below[-1]
        groups = checkpoint.load(path).groups
        if f"node.{name}" in groups:
            runner.load(groups[f"node.{name}"])
        if at != after:
            self.notes.append(
                f"{name}: the state after iteration {at} stands in for the one after {after} (no checkpoint there)."
            )


def describe_difference(old: Any, new: Any) -> list[str]:
    """Sentences on how two payloads differ, field by field; empty when they are bitwise equal."""
    if isinstance(old, Batch) and isinstance(new, Batch) and type(old) is type(new):
        if not torch.equal(old.uid, new.uid):
            return [
                f"rows differ: {len(old)} recorded, {len(new)} now, {len(set(old.uid.tolist()) & set(new.uid.tolist()))} in common"
            ]
        lines = []
        for field in dataclasses.fields(old):
            lines += _field_difference(field.name, getattr(old, field.name), getattr(new, field.name), old.uid)
        return lines
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        lines = []
        for field in dataclasses.fields(old):
            if "seconds" not in field.name:
                lines += _field_difference(field.name, getattr(old, field.name), getattr(new, field.name), None)
        return lines
    return [] if old == new else [f"{old!r} → {new!r}"]


def _field_difference(name: str, old: Any, new: Any, uid: Tensor | None) -> list[str]:
    if isinstance(old, Jagged) and isinstance(new, Jagged):
        if old.equal(new):
            return []
        same = old.lengths == new.lengths if len(old) == len(new) else torch.zeros(len(old), dtype=torch.bool)
        if not bool(same.all()):
            return [f"{name}: lengths differ in {int((~same).sum())} of {len(old)} rows"]
        return _numbers(name, old.values, new.values, old.row_ids, uid)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.shape == new.shape and torch.equal(torch.nan_to_num(old), torch.nan_to_num(new)):
            return []
        if old.shape != new.shape:
            return [f"{name}: shape {tuple(old.shape)} → {tuple(new.shape)}"]
        return _numbers(name, old, new, torch.arange(len(old)), uid)
    if isinstance(old, dict) and isinstance(new, dict):
        lines = [f"{name}.{k}: only {'recorded' if k in old else 'now'}" for k in sorted(old.keys() ^ new.keys())]
        for key in sorted(old.keys() & new.keys()):
            lines += _field_difference(f"{name}.{key}", old[key], new[key], uid)
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        return (
            [f"{name}: {len(changed)} of {len(old)} rows differ, first {old[changed[0]]!r} → {new[changed[0]]!r}"]
            if changed
            else []
        )
    return [] if old == new else [f"{name}: {old!r} → {new!r}"]


def _numbers(name: str, old: Tensor, new: Tensor, rows: Tensor, uid: Tensor | None) -> list[str]:
    changed = (old != new) & ~(old.isnan() & new.isnan()) if old.is_floating_point() else old != new
    first = int(changed.nonzero()[0])
    row = int(rows[first])
    where = f"uid {int(uid[row])}" if uid is not None else f"row {row}"
    a, b = old.double(), new.double()
    largest = float((a - b).abs().nan_to_num().max())
    return [
        f"{name}: {int(changed.sum())} of {len(old)} values in {len(set(rows[changed].tolist()))} rows differ, largest |Δ| {largest:.4g}, "
        f"mean {float(a.mean()):.4g} → {float(b.mean()):.4g}; first at {where}: {float(a[first]):.4g} → "
        f"{float(b[first]):.4g}"
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-5, 7" for [0, 1, 2, 3, 4, 5, 7]."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(str(p) for p in dict.fromkeys(part)) for part in parts)
