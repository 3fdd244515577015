"""One node of a running graph: builds its component, runs it, checks its outputs and collects its metrics."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from creditgraph.pipeline.core.component import Component, Context, ShardWrites
from creditgraph.pipeline.core.encoding import Encoded, encode
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, RunError, any_extra
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.payloads import Payload
from creditgraph.pipeline.core.ranks import use_device
from creditgraph.pipeline.core.sockets import Node, Wire
from creditgraph.pipeline.run.timeline.memory import Peak, peak_memory
from creditgraph.pipeline.run.timeline.spans import phase_of


class ContractError(CreditgraphError):
    """A component does not follow its own declaration."""


class NodeFailure(RuntimeError):
    """A component raised an exception; names the node and the iteration, and has the exception as its cause."""


@dataclass
class NodeReport:
    """Metrics and rejected rows of one node in one iteration.

    Attributes:
        metrics: complete name ("node/name", "seconds/node") → number.
        rejected: rows that it skipped, each with the reason.
        seconds: wall time of `run`.
        counts: the metrics that are summed over replicas.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    counts: set[str] = field(default_factory=set)


@dataclass
class LaneReport:
    """Report of one lane in one iteration: node → report, and the seconds that the lane itself worked and waited."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    overhead: float = 0.0
    waited: float = 0.0


class NodeRunner:
    """A node, its component and its context."""

    def __init__(self, node: Node, context: Context) -> None:
        self.node = node
        self.context = context
        self.component: Any = None
        self.seconds = 0.0
        self.peak = Peak()
        self.phase = phase_of(node)

    def setup(self) -> None:
        """Builds the component and calls its `setup`."""
        with self._named("setup"), self.context.trace.span(self.node.name, "setup"):
            self.component = self.node.cls(self.node.config)
            self.component.setup(self.context)

    def initial(self) -> dict[str, Any]:
        """The component's values before the first iteration."""
        with self._named("initial()"):
            return dict(self.component.initial())

    def snapshot(self, copy: bool) -> Encoded | None:
        """The component's state, or None when it has none."""
        with self._named("state_dict()"):
            state = self.component.state_dict()
            return encode(state, f"{self.node.name}: state_dict()", copy) if state else None

    def load(self, state: dict[str, Any]) -> None:
        """Restores the component's state."""
        with self._named("load_state_dict()"):
            self.component.load_state_dict(state)

    def refuse_missing(self, states: Mapping[str, Any], iteration: int) -> None:
        """Raises RunError if the checkpoint after `iteration` has no state of a node that learns."""
        missing = self.node.placement == "collective" and self.node.name not in states
        if missing and self.snapshot(copy=False) is not None:
            raise lacking(iteration, f"state of node '{self.node.name}'")

    @property
    def has_shards(self) -> bool:
        """Whether the component writes a part of its state from every rank."""
        return self.node.placement == "collective" and self.node.cls.save_shards is not Component.save_shards

    def save_shards(self, folder: Path) -> ShardWrites | None:
        """Has the component write this rank's part into its folder below `folder`; returns what is not written yet."""
        with self._named("save_shards()"):
            (folder / self.node.name).mkdir(parents=True, exist_ok=True)
            pending: ShardWrites | None = self.component.save_shards(folder / self.node.name)
        return pending

    def finish_shards(self, pending: ShardWrites) -> None:
        """Waits for what `save_shards` returned."""
        with self._named("save_shards()"):
            pending.finish()

    def load_shards(self, folder: Path) -> None:
        """Has the component read its folder below `folder`, if the checkpoint has one."""
        if (folder / self.node.name).is_dir():
            with self._named("load_shards()"):
                self.component.load_shards(folder / self.node.name)

    def close(self) -> None:
        """Closes the component, if it was built."""
        if self.component is not None:
            self.component.close()

    def run(self, iteration: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """Runs one iteration; returns output name → value."""
        self.context.iteration = iteration
        begin = perf_counter()
        span = self.context.trace.span(self.node.name, self.phase, iteration)
        with self._named(f"iteration {iteration}"), span, peak_memory(self.context.device) as self.peak:
            result = self.component.run(**inputs)
        self.seconds = perf_counter() - begin
        return self._checked(result, iteration)

    def harvest(self) -> NodeReport:
        """Returns the metrics and rejected rows since the last call.

        It is called after the node's readers have run, because a handle that it returned may log too.
        """
        name = self.node.name
        context = self.context
        metrics = {f"{name}/{k}": v for k, v in context.metrics.items()}
        counts = {f"{name}/{k}" for k in context.counts} | {f"rejected/{name}"}
        rejected = list(context.rejected)
        if rejected:
            metrics[f"rejected/{name}"] = float(len(rejected))
        metrics[f"seconds/{name}"] = self.seconds
        if self.peak.reserved:
            metrics |= {f"memory/{name}": self.peak.allocated, f"memory/{name}_reserved": self.peak.reserved}
        context.metrics.clear()
        context.counts.clear()
        context.rejected.clear()
        return NodeReport(metrics, rejected, self.seconds, counts)

    def _checked(self, result: Any, iteration: int) -> dict[str, Any]:
        sockets = self.node.sockets.outputs
        place = f"{self.node.name} ({self.node.use}), iteration {iteration}"
        if result is None and not sockets:
            return {}
        if not dataclasses.is_dataclass(result) or {f.name for f in dataclasses.fields(result)} != set(sockets):
            raise ContractError(
                f"{place}: run returned {_described(result)}; expected its declared outputs "
                f"{', '.join(sockets) or 'None'}. "
                "Return an instance of the dataclass that run is annotated with."
            )
        # The graph check relies on declarations; whether a component follows its own can only be checked here.
        outputs = {}
        for name, socket in sockets.items():
            value = getattr(result, name)
            items = value if socket.is_list and isinstance(value, list) else [value]
            for item in items:
                if not any(t is Any or not isinstance(t, type) or isinstance(item, t) for t in socket.types):
                    raise ContractError(
                        f"{place}: output '{name}' is {_described(item)}; expected {socket.type_text}, as declared."
                    )
            outputs[name] = set_origin(value, f"{self.node.name}.{name}")
        return outputs

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Around every call of the component: makes its device this thread's, and prefixes errors with node and place.

        Errors of the user keep their type.
        """
        use_device(self.context.device)
        place = f"{self.node.name} ({self.node.use}), {what}"
        try:
            with any_extra():
                yield
        except CreditgraphError as error:
            error.args = (f"{place}: {error}", *error.args[1:])
            raise
        except Exception as error:
            raise NodeFailure(f"{place}: {type(error).__name__}: {error}") from error


def initial_value(node: Node, values: Mapping[str, Any], wire: Wire) -> Any:
    """What a delayed wire carries before the first iteration, from the values that `initial()` of its source returned.

    Raises:
        ConfigError: it returned none for this output.
    """
    if wire.output not in values:
        raise ConfigError(
            f"{wire.source}.{wire.output}: read with '@{wire.delay}', but initial() of {node.use} returns no value for "
            f"it, only {sorted(values) or 'none'}. Return it from initial()."
        )
    return set_origin(values[wire.output], f"{wire.source}.{wire.output}")


def lacking(iteration: int, what: str) -> RunError:
    """The error for a checkpoint after `iteration` without something that the graph needs."""
    return RunError(
        f"checkpoint after iteration {iteration}: expected the {what}, but it is not there. Continue with the graph "
        "that wrote the checkpoint, or choose another run.name."
    )


def set_origin(value: Any, origin: str) -> Any:
    """Marks a payload with the output it came from; a payload of another node is copied first, sharing its tensors."""
    if not isinstance(value, Payload) or value.origin == origin:
        return value
    if value.origin:
        # A handle is an object with state, so a copy would be a different handle.
        if isinstance(value, Handle):
            return value
        value = copy.copy(value)
    object.__setattr__(value, "origin", origin)
    return value


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
