"""Configurations in Python: compose one, run its graph step by step, change a setting and run again, or train it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.notebook.frames import COLUMNS, frame, rollout_rows
from creditgraph.pipeline.app.notebook.runs import Run
from creditgraph.pipeline.app.notebook.texts import Texts
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.payloads import Batch
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment
from creditgraph.pipeline.run.compose.experiment import compose as composed
from creditgraph.pipeline.run.session import GraphSession


class Composition:
    """A checked configuration.

    Attributes:
        overrides: what it was composed of, as on the command line.
        experiment: the graph, and the run, model and data sections.
    """

    def __init__(self, overrides: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> None:
        self.overrides = list(overrides)
        self.config_dirs = list(config_dirs)
        self.experiment = build_experiment(composed(overrides, config_dirs), " ".join(overrides))

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.experiment.graph

    def session(self) -> Session:
        """The graph, to run iteration by iteration without a run directory."""
        return Session(self)

    def train(self) -> Run:
        """Trains it as `creditgraph train` does, or continues the run of that name."""
        return trained(self.experiment)

    def __repr__(self) -> str:
        return f"Composition({' '.join(self.overrides)}: {', '.join(self.graph.names)})"

    def _repr_html_(self) -> str:
        from creditgraph.pipeline.app.drawing import draw

        return draw.svg(self.graph)


class StepOutputs(Mapping[str, Any]):
    """What the nodes of an iteration returned, by "node.output".

    Attributes:
        iteration: the iteration, from 0.
        metrics: "node/name" → number that a node logged.
    """

    def __init__(
        self, values: Mapping[str, Any], metrics: Mapping[str, float], iteration: int, learned: list[str], texts: Texts
    ) -> None:
        self._values = dict(values)
        self._learned = learned
        self._texts = texts
        self.metrics = dict(metrics)
        self.iteration = iteration
        batches = {name: value for name, value in values.items() if isinstance(value, Batch)}
        texts.add_to_all(batches, *batches.values())

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"no output '{name}' in this iteration.{did_you_mean(name, self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def rollouts(self) -> Any:
        """A DataFrame with the columns of `Run.rollouts`."""
        batches = {name: value for name, value in self._values.items() if isinstance(value, Batch)}
        rows = rollout_rows(batches, self.iteration, self._learned, self._texts.pieces)
        return frame(rows, COLUMNS, "rollouts()")

    def __repr__(self) -> str:
        lines = [f"  {name}: {value!r}"[:160] for name, value in self._values.items()]
        return "\n".join([f"iteration {self.iteration}", *lines])


class Session(GraphSession):
    """Runs a graph iteration by iteration, in this process and without a run directory.

        with creditgraph.compose("toy_grpo").session() as session:
            out = session.step()
            out["advantage.credit"]
            session.again("advantage.normalize=mean")["advantage.credit"]

    Nothing is recorded and no checkpoint is written; iterations are those that a run of the same seed makes, without
    the evaluations.
    """

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition.experiment)
        self.composition = composition
        self._texts = Texts(composition.experiment.model.path)
        self._next = 0

    def step(self, learn: bool = True) -> StepOutputs:
        """Runs the next iteration; returns what its nodes gave.

        Args:
            learn: False leaves out learners, and what reads them within the iteration; a step after such a one begins
                with the initial weights.
        """
        iteration = self._next
        left_out = [] if learn else [n.name for n in self.graph.nodes if n.placement == "collective"]
        nodes = [n for n in self.graph.nodes if not self.graph.ancestors([n.name]) & set(left_out)]
        metrics = self._run_all(iteration, nodes)
        self._next += 1
        self._forget(iteration - self.graph.max_delay)
        return self._outputs(iteration, metrics)

    def again(self, *overrides: str) -> StepOutputs:
        """Runs the last iteration again from the nodes whose settings the overrides change, on the same rollouts.

        The changed nodes and those that read them run, except learners, which have made their step; the following
        steps keep the change.

        Raises:
            ConfigError: no step was made, or the overrides add, remove or reorder nodes.
        """
        if not self._next:
            raise ConfigError("again: there is no iteration yet; call step() first.")
        iteration = self._next - 1
        changed = self._change(overrides)
        nodes = [
            node
            for node in self.graph.nodes
            if changed & self.graph.ancestors([node.name]) and node.placement != "collective"
        ]
        stale = {node.name for node in nodes}
        self._values = {key: v for key, v in self._values.items() if key[2] != iteration or key[0] not in stale}
        return self._outputs(iteration, self._run_all(iteration, nodes), learned=False)

    def _change(self, overrides: Sequence[str]) -> set[str]:
        """Composes with further overrides; returns the names of the nodes that differ, whose components end."""
        old = self.composition
        new = Composition([*old.overrides, *overrides], old.config_dirs)
        if new.graph.names != old.graph.names:
            raise ConfigError(
                f"again: {' '.join(overrides)} changes the nodes ({', '.join(old.graph.names)} becomes "
                f"{', '.join(new.graph.names)}); compose it and begin a session of its own."
            )
        changed = {n.name for n in new.graph.nodes if not _same(n, old.graph[n.name])}
        for name in changed & set(self._runners):
            self._runners.pop(name)
        self.composition, self.experiment, self.graph = new, new.experiment, new.graph
        return changed

    def _run_all(self, iteration: int, nodes: Sequence[Node]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for node in nodes:
            if node.cls.final_pass:  # evaluations
                continue
            if not self.outputs(node.name, iteration):
                self.run(node, iteration)
            report = self.runner(node).harvest()
            metrics |= {name if "/" in name else f"{node.name}/{name}": v for name, v in report.metrics.items()}
        return metrics

    def _outputs(self, iteration: int, metrics: Mapping[str, float], learned: bool = True) -> StepOutputs:
        values = {
            f"{node.name}.{output}": value
            for node in self.graph.nodes
            if learned or node.placement != "collective"
            for output, value in self.outputs(node.name, iteration).items()
        }
        last_word = [str(wire) for node in self.graph.learners for wire in node.wires["credit"]]
        return StepOutputs(values, metrics, iteration, last_word, self._texts)

    def _forget(self, before: int) -> None:
        """Drops values that no later iteration reads."""
        self._values = {key: value for key, value in self._values.items() if key[2] >= before or key[2] < 0}


def _same(left: Node, right: Node) -> bool:
    return (left.cls, left.config, left.wires) == (right.cls, right.config, right.wires)


def overrides_of(recipe: str, overrides: Sequence[str], run: Mapping[str, Any]) -> list[str]:
    """A recipe, or a first override such as "graph=grpo", with the others and with settings of the run.

    >>> overrides_of("toy_grpo", ["prompts.batch=4"], {"iterations": 5})
    ['recipe=toy_grpo', 'prompts.batch=4', 'run.iterations=5']
    """
    first = recipe if "=" in recipe else f"recipe={recipe}"
    return [first, *overrides, *(f"run.{name}={value}" for name, value in run.items())]


def compose(recipe: str, *overrides: str, config_dirs: Sequence[str | Path] = (), **run: Any) -> Composition:
    """Composes and checks a configuration.

        creditgraph.compose("toy_grpo", "advantage.normalize=mean", seed=1)

    Args:
        recipe: name of a recipe, or a first override, such as "graph=grpo".
        overrides: as on the command line.
        config_dirs: folders with configuration files beside ./configs.
        run: settings of the section `run`, such as iterations=20.

    Raises:
        ConfigError: it does not compose.
        GraphError: the graph or settings are wrong; all mistakes in one message.
    """
    return Composition(overrides_of(recipe, overrides, run), config_dirs)


def train(recipe: str, *overrides: str, config_dirs: Sequence[str | Path] = (), **run: Any) -> Run:
    """Trains as `creditgraph train` does, in this process, or continues the run of that name; arguments of `compose`.

        run = creditgraph.train("toy_srpo", iterations=20)
        run.rollouts()

    Raises:
        CreditgraphError: a mistake in the configuration, or something that it needs is not there.
    """
    return compose(recipe, *overrides, config_dirs=config_dirs, **run).train()


def trained(experiment: Experiment) -> Run:
    """Trains an experiment in this process; returns its run, however far it came."""
    from creditgraph.pipeline.app.commands.train import train_here
    from creditgraph.pipeline.app.notebook.progress import stream

    with stream() as lines:
        train_here(experiment, lines)
    return Run(experiment.run_path)
