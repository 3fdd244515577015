"""Checks between nodes: sockets, types, populations, cycles. Every function returns sentences, none raises."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import did_you_mean
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.payloads import Credit, Prompts, Trajectories, Weights
from creditgraph.pipeline.core.sockets import Node, Socket, Wire

# The rows of a batch, as the stacked rows of some outputs: (node, output, iterations ago).
Origin = tuple[str, str, int]
Population = tuple[Origin, ...]


def check_wiring(nodes: Mapping[str, Node], names: set[str]) -> list[str]:
    """All problems of the wires between `nodes`; `names` also has the nodes whose class is unknown."""
    problems = [p for node in nodes.values() for p in _node_problems(node, nodes, names)]
    problems += _cycles(nodes)
    populations = _Populations(nodes)
    for node in nodes.values():
        problems += _misaligned(node, nodes, populations)
        problems += _other_prompts(node, nodes, populations)
        problems += _other_settings(node, nodes)
    # A node whose class is not known may read anything.
    return problems + (list(_unread(nodes)) if names == set(nodes) else [])


def _other_settings(node: Node, nodes: Mapping[str, Node]) -> Iterator[str]:
    """Settings that a component shares with the nodes it reads, `same_settings`, and that differ."""
    for name, settings in node.cls.same_settings.items() if node.config is not None else ():
        for source in (nodes[wire.source] for wire in node.wires.get(name, ()) if wire.source in nodes):
            for setting in settings:
                own = getattr(node.config, setting, None)
                expected = getattr(source.config, setting, own)
                if own != expected:
                    yield (
                        f"{node.name}.{setting}: expected {expected}, as in '{source.name}', which samples '{name}', "
                        f"got {own}; set both to the same value."
                    )


def sorted_names(nodes: Mapping[str, Node]) -> list[str]:
    """Names in an order in which each node follows those it reads within an iteration; nodes in cycles are left out."""
    done: list[str] = []
    waiting = list(nodes)
    while True:
        ready = next((n for n in waiting if all(w.source in done for _, w in nodes[n].all_wires if not w.delay)), None)
        if ready is None:
            return done
        waiting.remove(ready)
        done.append(ready)


def _node_problems(node: Node, nodes: Mapping[str, Node], names: set[str]) -> Iterator[str]:
    inputs = node.sockets.inputs
    for name, wires in node.wires.items():
        socket = inputs.get(name)
        if socket is None:
            hint = did_you_mean(name, inputs) if inputs else " It has no inputs."
            yield f"{node.name}.{name}: {node.use} has no such input.{hint}"
        elif len(wires) > 1 and not socket.is_list:
            listed = _listed(wires)
            yield f"{node.name}.{name}: expected one wire, got {len(wires)} ({listed}); this input is not a list."
        for wire in wires:
            yield from _wire_problems(node, name, socket, wire, nodes, names)
    for name, socket in inputs.items():
        if socket.required and name not in node.wires:
            candidates = [
                f"{n.name}.{o}"
                for n in nodes.values()
                if n is not node
                for o, s in n.sockets.outputs.items()
                if socket.accepts(s)
            ]
            offer = (
                f" Outputs that fit: {', '.join(candidates[:6])}." if candidates else " No output in this graph fits."
            )
            yield f"{node.name}.{name}: not wired; {node.use} needs this {socket.type_text}.{offer}"


def _wire_problems(
    node: Node, name: str, socket: Socket | None, wire: Wire, nodes: Mapping[str, Node], names: set[str]
) -> Iterator[str]:
    place = f"{node.name}.{name}"
    if wire.source not in names:
        yield f"{place}: wire '{wire}' starts at an unknown node '{wire.source}'.{did_you_mean(wire.source, names)}"
    if wire.source not in nodes:
        return
    source = nodes[wire.source]
    output = source.sockets.outputs.get(wire.output)
    if output is None:
        outputs = source.sockets.outputs
        hint = did_you_mean(wire.output, outputs) if outputs else " It has no outputs."
        yield f"{place}: wire '{wire}': {wire.source} ({source.use}) has no output '{wire.output}'.{hint}"
        return
    if socket is not None and not socket.accepts(output):
        yield f"{place}: wire '{wire}' carries {output.type_text}; expected {replace(socket, is_list=False).type_text}."
    if wire.delay and output.carries(Handle):
        yield (
            f"{place}: wire '{wire}' delays a {output.type_text}, a handle whose past cannot be kept; "
            "delay the weights it is made of instead."
        )
    elif wire.newest and (node.placement == "collective" or not output.carries(Weights)):
        yield (
            f"{place}: wire '{wire}' reads the newest value that is there; expected weights and a node that every "
            f"replica runs for itself. Write '@{wire.delay}'."
        )
    elif wire.delay and _has_no_initial(source.cls):
        yield (
            f"{place}: wire '{wire}' reads an earlier iteration, but {source.use} defines no initial() to start from; "
            f"remove '@{wire.delay}' or define {source.cls.__name__}.initial."
        )


def _has_no_initial(component: type[Component]) -> bool:
    return component.initial is Component.initial


class _Populations:
    """Follows `same_rows` from a wire up to the outputs that made its rows."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._known: dict[tuple[str, str], Population | None] = {}

    def of_wires(self, wires: list[Wire]) -> Population | None:
        """Rows of the wires, stacked; None where a wire is broken."""
        parts = [self._of_wire(w) for w in wires]
        return None if not parts or None in parts else tuple(o for p in parts if p for o in p)

    def _of_wire(self, wire: Wire) -> Population | None:
        rows = self._of_output(wire.source, wire.output)
        return None if rows is None else tuple((node, output, ago + wire.delay) for node, output, ago in rows)

    def _of_output(self, node_name: str, output_name: str) -> Population | None:
        key = (node_name, output_name)
        if key not in self._known:
            self._known[key] = ((node_name, output_name, 0),)  # where a cycle of delayed wires returns to
            self._known[key] = self._follow(node_name, output_name)
        return self._known[key]

    def _follow(self, node_name: str, output_name: str) -> Population | None:
        node = self._nodes.get(node_name)
        output = node.sockets.outputs.get(output_name) if node else None
        if node is None or output is None:
            return None
        rows = output.same_rows
        if rows is not None and rows in node.wires:
            return self.of_wires(node.wires[rows])
        if rows is not None and rows in node.sockets.inputs and node.sockets.inputs[rows].required:
            return None
        if (
            rows is not None
            and rows not in node.sockets.inputs
            and rows in node.sockets.outputs
            and rows != output_name
        ):
            return self._of_output(node_name, rows)
        return ((node_name, output_name, 0),)


def _misaligned(node: Node, nodes: Mapping[str, Node], populations: _Populations) -> Iterator[str]:
    for name, socket in node.sockets.inputs.items():
        other = socket.same_rows
        if other is None or name not in node.wires or other not in node.wires:
            continue
        # A wire of the wrong type has been reported; its rows mean nothing.
        if not (_all_fit(nodes, node, name) and _all_fit(nodes, node, other)):
            continue
        mine = populations.of_wires(node.wires[name])
        theirs = populations.of_wires(node.wires[other])
        if mine is not None and theirs is not None and mine != theirs:
            yield (
                f"{node.name}: '{name}' must have the rows of '{other}', but {_listed(node.wires[name])} has the rows "
                f"of {_shown(mine)} "
                f"and {_listed(node.wires[other])} has the rows of {_shown(theirs)}; wire both from the same "
                "population."
            )


def _other_prompts(node: Node, nodes: Mapping[str, Node], populations: _Populations) -> Iterator[str]:
    """Checks readers of a node that also returns prompts: it may hold some back, so they must use its prompts."""
    wired = {name: socket for name, socket in node.sockets.inputs.items() if name in node.wires}
    for name, socket in ((n, s) for n, s in wired.items() if Prompts in s.types):
        for other in (n for n, s in wired.items() if Trajectories in s.types):
            for source, output, ago in populations.of_wires(node.wires[other]) or ():
                own = next((o for o, s in nodes[source].sockets.outputs.items() if Prompts in s.types), "")
                right = Wire(source, own, ago)
                if own and node.wires[name] != [right] and not (socket.is_list and right in node.wires[name]):
                    yield (
                        f"{node.name}: '{other}' has the rows of {source}.{output}, whose prompts are {right}, but "
                        f"'{name}' is wired to "
                        f"{_listed(node.wires[name])}; wire {right}."
                    )


def _all_fit(nodes: Mapping[str, Node], node: Node, name: str) -> bool:
    socket = node.sockets.inputs[name]
    outputs = [nodes[w.source].sockets.outputs.get(w.output) for w in node.wires[name] if w.source in nodes]
    return (socket.is_list or len(outputs) == 1) and all(o is not None and socket.accepts(o) for o in outputs)


def _unread(nodes: Mapping[str, Node]) -> Iterator[str]:
    wires = [wire for node in nodes.values() for _, wire in node.all_wires]
    read = {(w.source, w.output) for w in wires}
    # A wire to a misspelt output has been reported; its source is not reported as unread too.
    misspelt = {w.source for w in wires if w.source in nodes and w.output not in nodes[w.source].sockets.outputs}
    for node in nodes.values():
        for name, socket in node.sockets.outputs.items():
            if socket.carries(Credit) and (node.name, name) not in read and node.name not in misspelt:
                yield (
                    f"{node.name}.{name}: no node reads this {socket.type_text}, so it trains nothing; wire it to a "
                    "learner or remove it."
                )


def _cycles(nodes: Mapping[str, Node]) -> Iterator[str]:
    """One sentence per cycle of wires without '@k', with the wire that should get one."""
    edges = {n.name: [w.source for _, w in n.all_wires if not w.delay and w.source in nodes] for n in nodes.values()}
    while True:
        paths = [p for p in (_path_back(start, edges) for start in nodes) if p]
        if not paths:
            return
        path = min(paths, key=len)
        hops = list(pairwise(path))
        # The wire named in the sentence is removed, so that the same cycle is not reported again.
        receiver, source = next(((r, s) for r, s in hops if not _has_no_initial(nodes[s].cls)), hops[0])
        edges[receiver] = [name for name in edges[receiver] if name != source]
        socket, wire = next((k, w) for k, w in nodes[receiver].all_wires if w.source == source and not w.delay)
        hint = "one of these wires must read the iteration before from a node that defines initial()"
        if not _has_no_initial(nodes[source].cls):
            hint = f"read the iteration before, for example '{receiver}.{socket}: {wire}@1'"
        # Wires are written at the receiver: reversed, the path follows the data.
        yield f"cycle: {' → '.join(path[::-1])}; {hint}."


def _path_back(start: str, edges: Mapping[str, list[str]]) -> list[str] | None:
    """A shortest path start, …, start along the edges, or None."""
    came: dict[str, str] = {}
    open_names = [start]
    for name in open_names:
        for source in edges[name]:
            if source == start:
                path = [name]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return [*path[::-1], start]
            if source not in came:
                came[source] = name
                open_names.append(source)
    return None


def _listed(wires: list[Wire]) -> str:
    return " + ".join(str(w) for w in wires)


def _shown(population: Population) -> str:
    return " + ".join(f"{node}.{output}" + (f"@{ago}" if ago else "") for node, output, ago in population)
