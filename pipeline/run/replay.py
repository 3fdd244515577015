"""Runs one node of a finished run again, on its recorded inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, RunError, ranges
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.run import checkpoint
from creditgraph.pipeline.run.compose.experiment import build_experiment, settings_of_run
from creditgraph.pipeline.run.compose.overrides import deep_merge
from creditgraph.pipeline.run.node_runner import NodeRunner, initial_value, set_origin
from creditgraph.pipeline.run.packing import is_recorded
from creditgraph.pipeline.run.recording import read_payload, recorded_iterations, recorded_sums
from creditgraph.pipeline.run.session import GraphSession


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Result of running one node of a run again.

    Attributes:
        recorded: the outputs that the run recorded.
        outputs: the outputs of this replay.
        metrics: the metrics of this replay.
    """

    recorded: dict[str, Any]
    outputs: dict[str, Any]
    metrics: dict[str, float]


class Replay(GraphSession):
    """Rebuilds single nodes of a finished run and the values they read.

    Batches come from the run's records. Handles (Policy, Verifier) are created again by their nodes, weights come from
    the nearest checkpoint at or below the iteration; `notes` lists values that may differ from those of the run.
    """

    def __init__(self, path: Path, changes: Mapping[str, Any] | None = None) -> None:
        values = deep_merge(settings_of_run(path), dict(changes or {}))
        super().__init__(build_experiment(values, str(path / "config.yaml")))
        self.path = path

    def again(
        self, name: str, iteration: int, settings: Mapping[str, Any] | None = None, iterations: int | None = None
    ) -> Replayed:
        """Runs one node.

        Args:
            name: node of the run's graph.
            iteration: iteration of the inputs.
            settings: changed settings of the node.
            iterations: planned length of the run as the node sees it; by default that of the run.
        """
        self.iterations = self.experiment.run.iterations if iterations is None else iterations
        node = self.graph[name]
        if settings:
            config, problems = build_config(node.cls.Config, deep_merge(node.settings, dict(settings)), name)
            if problems:
                raise ConfigError("\n".join(problems))
            node = dataclasses.replace(node, config=config)
        recorded = {output: self._recorded(name, output, iteration) for output in node.sockets.outputs}
        inputs = self.inputs(node, iteration)
        runner = self.start(node)
        self._load_state(runner, iteration - 1)
        outputs = runner.run(iteration, inputs)
        metrics = runner.harvest().metrics
        return Replayed({k: v for k, v in recorded.items() if v is not None}, outputs, metrics)

    def supply(self, wire: Wire, iteration: int) -> Any:
        """Returns a recorded value, a newly created handle, or the weights of the nearest checkpoint.

        Raises:
            RunError: the value was not recorded; the error lists the recorded iterations.
        """
        node = self.graph[wire.source]
        output = node.sockets.outputs[wire.output]
        recorded = self._recorded(wire.source, wire.output, iteration) if iteration >= 0 else None
        if recorded is not None:
            return recorded
        computed = output.carries(Handle)
        # Weights are never recorded, and values from before the first iteration are not recorded either.
        if not computed and (iteration < 0 or output.carries(Weights)):
            runner = self.start(node)
            self._load_state(runner, iteration)
            made = runner.initial()
            # Weights that a node makes of others, as their average.
            computed = iteration >= 0 and wire.output not in made
            if not computed:
                return initial_value(node, made, wire)
        if computed:
            again = self.again(node.name, iteration, iterations=self.iterations)
            self.give(node.name, iteration, again.outputs)
            return again.outputs[wire.output]
        there = recorded_iterations(self.path, f"{wire.source}.{wire.output}")
        hint = (
            f"recorded iterations: {ranges(there)}"
            if there
            else "that output is not recorded; add it to run.record.outputs and train again"
        )
        raise RunError(
            f"'{wire.source}.{wire.output}' of iteration {iteration} is not in {self.path / 'record'}; {hint}."
        )

    def checkpoints(self) -> list[int]:
        """Iterations of the checkpoints, oldest first."""
        return [int(folder.name) for folder in checkpoint.numbered(self.path / "checkpoints")]

    def newest_checkpoint(self) -> int:
        """Iteration of the newest checkpoint, −1 without one."""
        return max(self.checkpoints(), default=-1)

    def _recorded(self, node: str, output: str, iteration: int) -> Any:
        file = self.path / "record" / f"{node}.{output}" / f"{iteration:06d}.parquet"
        listed = f"{file.parent.name}/{file.name}" in recorded_sums(self.path / "record")  # reading it says it is lost
        return set_origin(read_payload(file), f"{node}.{output}") if listed or is_recorded(file) else None

    def _load_state(self, runner: NodeRunner, after: int) -> None:
        """Loads a component's state after an iteration, from the nearest checkpoint at or below it."""
        # The class decides, not the present state: a backlog is empty in a fresh component, but not in the checkpoint.
        if type(runner.component).state_dict is Component.state_dict or after < 0:
            return
        at = max((number for number in self.checkpoints() if number <= after), default=-1)
        name = runner.node.name
        if at < 0:
            self.notes.append(f"{name}: no checkpoint at or before iteration {after}; its initial state is used.")
            return
        own = f"node.{name}"
        saved = checkpoint.load(self.path / "checkpoints" / f"{at:06d}", lambda group: group == own)
        if own in saved.groups:
            runner.load(saved.groups[own])
        if runner.has_shards:
            checkpoint.check_shards(saved.path)
            runner.load_shards(saved.path / checkpoint.SHARDS)
        if at != after:
            self.notes.append(
                f"{name}: the state after iteration {at} is used, because iteration {after} has no checkpoint."
            )


def published(path: Path, iteration: int) -> Weights | None:
    """The weights of a run after the iteration of a checkpoint, on the CPU; None if its graph publishes none.

    The learner makes them again from its state; those of a learner that cannot are among the values in flight.
    """
    with Replay(path, {"run": {"device": "cpu"}}) as replay:
        for node in replay.graph.nodes:
            for output, socket in node.sockets.outputs.items():
                if output in node.cls.remakes and socket.carries(Weights):
                    weights: Weights = replay.value(Wire(node.name, output), iteration)
                    return weights
    folder = path / "checkpoints" / f"{iteration:06d}"
    values = checkpoint.load(folder, lambda group: group == "values").groups.get("values", {}).values()
    return max((v for v in values if isinstance(v, Weights)), key=lambda w: w.version, default=None)
