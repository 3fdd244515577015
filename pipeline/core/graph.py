"""A graph of components: parsed from a plain dictionary, checked as a whole, sorted.

    nodes:
      prompts: {use: prompts.dataset}
      engine:  {use: engine.local, in: {weights: learner.weights@1}}
      sampler: {use: sampler.chains, in: {prompts: prompts.batch, policy: engine.policy}, config: {group_size: 8}}

A wire is written at its receiver: `node.output`, or `node.output@k` for the value of k iterations ago. Without `@k` the
graph must be acyclic.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import UnionType
from typing import Any, Literal

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, GraphError, did_you_mean, nearest
from creditgraph.pipeline.core.registry import known_components, load_class
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.core.sockets import Node, Wire, sockets_of
from creditgraph.pipeline.core.wiring import check_wiring, sorted_names

__all__ = ["Graph", "Node", "Wire", "build_graph"]

Lane = Literal["generation", "learning"]

RESERVED_NAMES = ("run", "model", "data", "nodes")
NODE_KEYS = ("use", "in", "config")
MAX_DELAY = 100  # every value in between is kept in memory
MAX_NODES = 128  # seven bits of every uid

_NAME = re.compile(r"^[a-z][a-z0-9_]*$")
_WIRE = re.compile(r"^(?P<source>[^.@\s]+)\.(?P<output>[^.@\s]+)(?:@(?P<newest><=|≤)?(?P<delay>-?\d+))?$")


@dataclass(frozen=True)
class Graph:
    """A checked graph.

    Attributes:
        nodes: in topological order: every node comes after those it reads within an iteration.
    """

    nodes: tuple[Node, ...]

    def __getitem__(self, name: str) -> Node:
        try:
            return self._by_name[name]
        except KeyError:
            raise ConfigError(f"no node '{name}' in this graph.{did_you_mean(name, self._by_name)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @property
    def names(self) -> list[str]:
        """Node names in sorted order; a node's place here is its `Context.node_index`."""
        return [n.name for n in self.nodes]

    def readers(self, name: str) -> list[tuple[Node, str, Wire]]:
        """Returns (receiving node, its input socket, wire) for every wire that starts at the node."""
        return [(node, socket, wire) for node in self.nodes for socket, wire in node.all_wires if wire.source == name]

    @cached_property
    def learners(self) -> list[Node]:
        """The collective nodes that read trajectories and their credit."""
        collective = [node for node in self.nodes if node.placement == "collective"]
        return [node for node in collective if {"trajectories", "credit"} <= set(node.wires)]

    def outputs_of(self, kind: type | UnionType) -> list[Wire]:
        """Returns every output that carries this class, in the order of the graph."""
        return [Wire(node.name, output) for node in self.nodes for output in node.outputs_of(kind)]

    def ancestors(self, targets: Iterable[str]) -> set[str]:
        """The targets and every node they depend on within an iteration."""
        names: set[str] = set()
        open_names = list(targets)
        while open_names:
            name = open_names.pop()
            if name not in names:
                names.add(name)
                open_names += [w.source for _, w in self[name].all_wires if not w.delay]
        return names

    @cached_property
    def max_delay(self) -> int:
        """The largest k of any `@k` wire, 0 without one."""
        return max((w.delay for n in self.nodes for _, w in n.all_wires), default=0)

    # Two lanes suffice: nodes that follow a collective node within an iteration have to wait for it anyway.
    @cached_property
    def lanes(self) -> dict[str, Lane]:
        """Node → lane. Collective nodes and all nodes that depend on them within an iteration are the learning lane."""
        lanes: dict[str, Lane] = {}
        for node in self.nodes:
            follows = any(lanes[w.source] == "learning" for _, w in node.all_wires if not w.delay)
            lanes[node.name] = "learning" if follows or node.placement == "collective" else "generation"
        return lanes

    @cached_property
    def overlaps(self) -> bool:
        """Whether the generation lane may run ahead while the learning lane still works on an earlier iteration.

        There must be nodes in both lanes, and every wire from the learning lane into the generation lane must be `@2`
        or more.
        """
        lanes = self.lanes
        back = [
            w.delay
            for n in self.nodes
            if lanes[n.name] == "generation"
            for _, w in n.all_wires
            if lanes[w.source] == "learning"
        ]
        return set(lanes.values()) == {"generation", "learning"} and all(delay >= 2 for delay in back)


def build_graph(description: Mapping[str, Any], place: str = "graph") -> Graph:
    """Parses and checks `{"nodes": {name: {use, in, config}}}`; other keys are ignored.

    Component classes are imported, but none is built.

    Raises:
        GraphError: lists every problem with its place, the expected and the actual value, and the nearest name.
    """
    entries = description.get("nodes") if isinstance(description, Mapping) else None
    if not isinstance(entries, Mapping) or not entries:
        raise GraphError(["nodes: expected 'nodes: {name: {use: …, in: {…}, config: {…}}}', got none."], place)
    problems: list[str] = []
    if len(entries) > MAX_NODES:
        problems.append(f"nodes: expected at most {MAX_NODES}, got {len(entries)}.")
    parsed = {str(name): _parse_node(str(name), entry, problems) for name, entry in entries.items()}
    nodes = {name: node for name, node in parsed.items() if node is not None}
    problems += check_wiring(nodes, set(parsed))
    if problems:
        raise GraphError(problems, place)
    return Graph(tuple(nodes[name] for name in sorted_names(nodes)))


def _parse_node(name: str, entry: Any, problems: list[str]) -> Node | None:
    """A node with its syntax, class and settings checked; None when its class is not known."""
    if not _NAME.match(name):
        problems.append(f"{name}: not a node name; expected lower-case letters, digits and '_', first a letter.")
    if name in RESERVED_NAMES:
        problems.append(f"{name}: this name is reserved for a section of the configuration; choose another node name.")
    if isinstance(entry, str):
        problems.append(f"{name}: expected '{{use: {entry}}}', got {entry!r}.")
        return None
    if not isinstance(entry, Mapping):
        problems.append(f"{name}: expected a mapping with 'use' and, where needed, 'in' and 'config', got {entry!r}.")
        return None
    unknown = [key for key in entry if key not in NODE_KEYS]
    problems += [
        f"{name}.{key}: unknown key; a node has 'use', 'in' and 'config'.{nearest(str(key), NODE_KEYS)}"
        for key in unknown
    ]
    wires = _parse_wires(name, entry.get("in"), problems)
    use = entry.get("use")
    if not isinstance(use, str):
        problems.append(f"{name}.use: expected a component name or 'package.module:Class', got {use!r}.")
        return None
    component = _load(name, use, problems)
    if component is None:
        return None
    settings = entry.get("config")
    config, sentences = build_config(component.Config, settings, name)
    problems += [text + _elsewhere(text, name, use, settings) for text in sentences]
    return Node(name, use, component, config, wires, dict(settings) if isinstance(settings, Mapping) else {})


def _load(name: str, use: str, problems: list[str]) -> Any:
    try:
        component: Any = load_class(use)
        if not issubclass(component, Component):
            raise ConfigError(f"{use} is not a component; derive it from creditgraph.Component.")
        sockets_of(component)
    except ConfigError as error:
        problems.append(f"{name}.use: {error}")
        return None
    except Exception as error:
        problems.append(f"{name}.use: importing '{use}' failed with {type(error).__name__}: {error}")
        return None
    return component


def _elsewhere(problem: str, name: str, use: str, settings: Any) -> str:
    """Names the components of the same kind that have an unknown setting; "" for other problems, or if none has it."""
    keys = settings if isinstance(settings, Mapping) else ()
    key = next((k for k in keys if problem.startswith(f"{name}.{k}: unknown setting.")), None)
    family = use.partition(".")[0] + "."
    owners = []
    for other in known_components() if key is not None and ":" not in use else ():
        if other.startswith(family) and other != use:
            with suppress(ConfigError, ImportError):
                component: Any = load_class(other)
                if key in {f.name for f in dataclasses.fields(component.Config)}:
                    owners.append(other)
    has = "has" if len(owners) == 1 else "have"
    return f" {' and '.join(owners)} {has} it; choose it with {name}.use={owners[0]}." if owners else ""


def _parse_wires(name: str, inputs: Any, problems: list[str]) -> dict[str, list[Wire]]:
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        problems.append(f"{name}.in: expected 'input: node.output' pairs, got {inputs!r}.")
        return {}
    wires: dict[str, list[Wire]] = {}
    for socket, written in inputs.items():
        if written is None:  # a recipe unwires an optional input with null
            continue
        texts = written if isinstance(written, list | tuple) else [written]
        if not texts:
            problems.append(f"{name}.{socket}: expected at least one wire, got an empty list.")
        parsed = [_parse_wire(f"{name}.{socket}", text, problems) for text in texts]
        wires[str(socket)] = [wire for wire in parsed if wire is not None]
    return wires


def _parse_wire(place: str, text: Any, problems: list[str]) -> Wire | None:
    match = _WIRE.match(text) if isinstance(text, str) else None
    if match is None:
        problems.append(f"{place}: expected a wire, 'node.output', 'node.output@k' or 'node.output@<=k', got {text!r}.")
        return None
    delay = match["delay"]
    if delay is not None and int(delay) < 1:
        problems.append(
            f"{place}: wire '{text}' reads {delay} iterations back; expected k ≥ 1 in '@k', or no '@k' for this "
            "iteration."
        )
        return None
    if int(delay or 0) > MAX_DELAY:
        problems.append(f"{place}: wire '{text}' reads {delay} iterations back; expected at most {MAX_DELAY}.")
        return None
    return Wire(match["source"], match["output"], int(delay or 0), newest=bool(match["newest"]))
