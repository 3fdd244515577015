"""One component outside any graph, on the user's own Parquet files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.component import Component, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Weights
from creditgraph.pipeline.core.registry import known_components, load_class
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.core.sockets import Node, sockets_of
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.node_runner import set_origin
from creditgraph.pipeline.run.recording import read_payload
from creditgraph.pipeline.run.run_settings import RunSettings
from creditgraph.pipeline.run.session import GraphSession


class ComponentRun(GraphSession):
    """Builds components and runs each once. Use as a context manager, which closes them.

    Args:
        seed: random seed.
        device: device of models.
        model: folder or hub name, for components that need one.
    """

    def __init__(self, seed: int, device: str, model: str) -> None:
        settings = RunSettings(seed=seed, device=device, iterations=1)
        super().__init__(Experiment(run=settings, model=ModelSpec(path=model), data={}, graph=Graph(()), resolved={}))

    def run_component(
        self, use: str, settings: dict[str, Any], inputs: Mapping[str, Any], iteration: int = 0
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Runs a component; returns its outputs and what it logged.

        Args:
            use: registered name or module:Class.
            settings: settings of the component.
            inputs: socket → value, or list of values where the socket takes several.
            iteration: part of the key of random streams.
        """
        cls: type[Component] = load_class(use)
        config, problems = build_config(cls.Config, settings, use)
        if problems:
            raise ConfigError("\n".join(problems))
        # The smallest graph there is: one node without wires, whose inputs are passed by hand.
        node = Node(name=use.partition(".")[0], use=use, cls=cls, config=config, wires={}, settings=settings)
        self.graph = Graph((node,))
        runner = self.start(node)
        outputs = runner.run(iteration, dict(inputs))
        return outputs, runner.harvest().metrics

    def read_inputs(self, use: str, assignments: Sequence[str]) -> dict[str, Any]:
        """The inputs of a component from texts such as "rewards=r.parquet" and "policy=engine.local"."""
        sockets = sockets_of(load_class(use)).inputs
        values: dict[str, list[Any]] = {}
        for text in assignments:
            name, equals, source = text.partition("=")
            if not equals:
                raise ConfigError(
                    f"input '{text}': no '='; expected socket=FILE.parquet, or socket=engine.local for a policy."
                )
            if name not in sockets:
                raise ConfigError(f"input '{name}': {use} has no such socket.{did_you_mean(name, sockets)}")
            values.setdefault(name, []).append(self._read(source))
        missing = [name for name, socket in sockets.items() if socket.required and name not in values]
        if missing:
            expected = ", ".join(f"{name}=… ({sockets[name].type_text})" for name in missing)
            raise ConfigError(
                f"{use}: missing input {expected}; give a Parquet file, or a component for a Policy or Verifier."
            )
        return {name: items if sockets[name].is_list else items[0] for name, items in values.items()}

    def _read(self, source: str) -> Any:
        """The batch of a file, or the handle (policy, verifier) that a component returns."""
        if source not in known_components() and (":" not in source or Path(source).exists()):
            return set_origin(read_payload(Path(source)), source)
        # A component that returns a handle has at most the input weights; version 0 are those of the model folder.
        sockets = sockets_of(load_class(source)).inputs
        inputs = {name: Weights(version=0) for name, socket in sockets.items() if socket.carries(Weights)}
        outputs, _ = self.run_component(source, {}, inputs)
        return next(iter(outputs.values()))


def summary(value: Any) -> str:
    """One line on a payload."""
    if not isinstance(value, Batch):
        return type(value).__name__
    parts = []
    for name, column in vars(value).items():
        if isinstance(column, Jagged):
            mean = ""
            if column.values.dtype.is_floating_point and len(column.values):
                mean = f", mean {float(column.values.double().mean()):.4g}"
            parts.append(f"{name} {len(column.values)} values{mean}")
    return f"{type(value).__name__}, {len(value)} rows" + (f" ({'; '.join(parts)})" if parts else "")
