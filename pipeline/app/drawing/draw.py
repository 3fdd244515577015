"""Pictures of a graph as mermaid text and as a self-contained SVG, and descriptions of nodes for pages."""

import dataclasses
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from creditgraph.pipeline.app.drawing.layout import Place, lay_out
from creditgraph.pipeline.core.graph import Graph, Node, Wire

# Keywords of mermaid's grammar.
_MERMAID_WORD = re.compile("end|graph|flowchart|subgraph|style|class|classdef|click|default|direction|linkstyle")

NODE_HEIGHT = 46.0
LAYER_GAP = 68.0
STUB = 18.0  # of a line below its node, where its label is
MARGIN = 26.0
LANE = 16.0  # between lines that go back up
CORNER = 10.0

_LIGHT = {
    "page": "#ffffff",
    "text": "#1f2328",
    "soft": "#59636e",
    "line": "#7d8590",
    "gen": "#eef5ff",
    "gen-edge": "#5b8def",
    "learn": "#fff4e5",
    "learn-edge": "#e08a1e",
}
_DARK = {
    "page": "#0d1117",
    "text": "#e6edf3",
    "soft": "#9198a1",
    "line": "#6e7681",
    "gen": "#13233a",
    "gen-edge": "#4c83e6",
    "learn": "#33230d",
    "learn-edge": "#d08a2e",
}


def mermaid(graph: Graph) -> str:
    """Mermaid flowchart text; `@k` wires are dashed."""
    lines = ["flowchart TD"]
    for node in graph.nodes:
        text = f"{_mermaid_text(node.name)}<br/><small>{_mermaid_text(node.use)}</small>"
        lines.append(f'    {_mermaid_id(node.name)}["{text}"]')
    for target, wire in _wires(graph):
        label = _mermaid_text(wire.output + wire.age)
        arrow = f'-. "{label}" .->' if wire.delay else f'-- "{label}" -->'
        lines.append(f"    {_mermaid_id(wire.source)} {arrow} {_mermaid_id(target)}")
    learning = [_mermaid_id(n) for n, lane in graph.lanes.items() if lane == "learning"]
    if learning:
        lines.append("    classDef learning fill:#fff4e5,stroke:#e08a1e,color:#1f2328")
        lines.append(f"    class {','.join(learning)} learning")
    return "\n".join(lines) + "\n"


def svg(graph: Graph) -> str:
    """A self-contained SVG, light or dark according to the reader's system."""
    return _Picture(graph).render()


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """(name, value as text, differs from the default) of every setting of a Config, nested ones dotted."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{f.name}.")
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        yield f"{prefix}{f.name}", repr(value), value != default


def summary_of(node: Node) -> str:
    """The first line of the component's docstring."""
    return (node.cls.__doc__ or "").strip().partition("\n")[0]


def _wires(graph: Graph) -> list[tuple[str, Wire]]:
    """(target, wire) once per output and reader."""
    return [(node.name, wire) for node in graph.nodes for wire in dict.fromkeys(w for _, w in node.all_wires)]


def _mermaid_id(name: str) -> str:
    return f"{name}_" if _MERMAID_WORD.fullmatch(name) else name


def _mermaid_text(text: str) -> str:
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


class _Picture:
    """Geometry and text of one SVG.

    Each read output has a port at the node's bottom, each wire one at the receiver's top. Wires that go back up run in
    lanes along the right side.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.wires = _wires(graph)
        self.outputs = {n.name: list(dict.fromkeys(w.output for _, _, w in graph.readers(n.name))) for n in graph.nodes}
        near = [(wire.source, target) for target, wire in self.wires if not wire.delay]
        far = [(wire.source, target) for target, wire in self.wires if wire.delay]
        layout = lay_out({n.name: self._width(n) for n in graph.nodes}, near, far)
        self.places = layout.places
        self.chains = layout.chains
        self.back = [(target, wire) for target, wire in self.wires if (wire.source, target) not in self.chains]
        left = min(p.x - p.width / 2 for p in self.places.values())
        for place in self.places.values():
            place.x = round(place.x + MARGIN - left, 1)
        self.right = max(p.x + max(p.width / 2, self._label_end(p)) for p in self.places.values())
        self.width = self.right + MARGIN + LANE * (len(self.back) + bool(self.back))
        beyond = 14 + 6 * len(self.back) if self.back else 0  # room above and below for lines that go back up
        self.top = MARGIN + beyond
        self.height = self._y(len(layout.layers) - 1) + NODE_HEIGHT + beyond + MARGIN + 24

    def _width(self, node: Node) -> float:
        text = max(len(node.name) * 8.3, len(node.use) * 6.3) + 26
        ports = sum(len(output) * 6.0 + 22 for output in self.outputs[node.name])
        return round(max(text, ports, 96.0))

    def _label_end(self, place: Place) -> float:
        """Largest distance between the node's centre and the right end of the last port's label."""
        outputs = self.outputs.get(place.name)
        if not outputs:
            return 0.0
        return place.width / 2 - place.width / len(outputs) / 2 + 14 + 6.2 * (max(map(len, outputs)) + 2)

    def _y(self, layer: int) -> float:
        return self.top + layer * (NODE_HEIGHT + LAYER_GAP)

    def _neighbour(self, target: str, wire: Wire, place: int) -> float:
        """x of the second (1) or last but one (−2) place of a wire; the right side for one that goes back up."""
        chain = self.chains.get((wire.source, target))
        return self.right if chain is None else self.places[chain[place]].x

    def _out_port(self, name: str, output: str) -> tuple[float, float]:
        def mean_x(output: str) -> float:
            readers = [(t, w) for t, w in self.wires if (w.source, w.output) == (name, output)]
            return sum(self._neighbour(t, w, 1) for t, w in readers) / len(readers)

        place = self.places[name]
        # In the order of their readers, so that lines do not cross right below the node.
        ports = sorted(self.outputs[name], key=mean_x)
        x = place.x + place.width * ((ports.index(output) + 0.5) / len(ports) - 0.5)
        return x, self._y(place.layer) + NODE_HEIGHT

    def _in_port(self, target: str, wire: Wire) -> tuple[float, float]:
        def from_x(other: Wire) -> tuple[float, float]:
            return self._neighbour(target, other, -2), self._out_port(other.source, other.output)[0]

        place = self.places[target]
        ports = sorted((w for t, w in self.wires if t == target), key=from_x)
        step = min(26.0, (place.width - 16) / len(ports))
        return place.x + step * (ports.index(wire) - (len(ports) - 1) / 2), self._y(place.layer)

    def _path_down(self, target: str, wire: Wire) -> str:
        x, y = self._out_port(wire.source, wire.output)
        path = f"M{x:.1f} {y:.1f}v{STUB:.0f}"
        y += STUB
        for name in self.chains[wire.source, target][1:-1]:
            place = self.places[name]
            top = self._y(place.layer)
            path += _curve(x, y, place.x, top) + f"V{top + NODE_HEIGHT:.1f}"
            x = place.x
            y = top + NODE_HEIGHT
        end_x, end_y = self._in_port(target, wire)
        return path + _curve(x, y, end_x, end_y - 5) + f"V{end_y - 1:.1f}"

    def _path_back(self, target: str, wire: Wire) -> str:
        """Down from the output, up along the right side, and in from above."""
        number = self.back.index((target, wire))
        x, y = self._out_port(wire.source, wire.output)
        end_x, end_y = self._in_port(target, wire)
        below = y + 26 + 6 * number
        side = self.right + LANE * (number + 1)
        above = end_y - 20 - 6 * number
        r = CORNER
        arc = f"a{r:.0f} {r:.0f} 0 0 0"
        return (
            f"M{x:.1f} {y:.1f}V{below - r:.1f}{arc} {r:.0f} {r:.0f}H{side - r:.1f}{arc} {r:.0f} {-r:.0f}"
            f"V{above + r:.1f}{arc} {-r:.0f} {-r:.0f}H{end_x + r:.1f}{arc} {-r:.0f} {r:.0f}V{end_y - 1:.1f}"
        )

    def render(self) -> str:
        parts = [*self._edge_parts(), *self._label_parts(), *self._node_parts(), self._legend()]
        title = f"{len(self.graph)} nodes: {', '.join(self.graph.names)}"
        size = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" {size} '
            f'role="img" aria-label="{escape(title)}">\n<style>\n{_css()}</style>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="tip" d="M0 0.5 8 4 0 7.5z"/></marker></defs>\n'
            f'<rect class="page" {size}/>\n' + "\n".join(parts) + "\n</svg>\n"
        )

    def _edge_parts(self) -> Iterator[str]:
        for target, wire in self.wires:
            path = self._path_back if (target, wire) in self.back else self._path_down
            style = "wire delayed" if wire.delay else "wire"
            title = f"<title>{escape(f'{wire} → {target}')}</title>"
            yield f'<path class="{style}" d="{path(target, wire)}" marker-end="url(#tip)">{title}</path>'

    def _label_parts(self) -> Iterator[str]:
        for name, outputs in self.outputs.items():
            for output in outputs:
                x, y = self._out_port(name, output)
                ages = sorted({w.age for _, w in self.wires if (w.source, w.output) == (name, output)})
                marks = ", ".join(ages).strip(", ")
                yield f'<text class="port" x="{x + 5:.1f}" y="{y + 13:.1f}">{escape(output + marks)}</text>'

    def _node_parts(self) -> Iterator[str]:
        lanes = self.graph.lanes
        for node in self.graph.nodes:
            place = self.places[node.name]
            x = place.x - place.width / 2
            y = self._y(place.layer)
            yield (
                f"<g><title>{escape(f'{node.name} ({node.use}) {summary_of(node)}'.strip())}</title>"
                f'<rect class="node {lanes[node.name]}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{place.width:.0f}" height="{NODE_HEIGHT:.0f}" rx="8"/>'
                f'<text class="name" x="{place.x:.1f}" y="{y + 20:.1f}">{escape(node.name)}</text>'
                f'<text class="use" x="{place.x:.1f}" y="{y + 36:.1f}">{escape(node.use)}</text></g>'
            )

    def _legend(self) -> str:
        overlap = "overlapped" if self.graph.overlaps else "in turn"
        return (
            f'<text class="legend" x="{MARGIN:.0f}" y="{self.height - 10:.0f}">'
            '<tspan class="gen-text">■</tspan> generation'
            f'<tspan class="learn-text" dx="14">■</tspan> learning ({overlap})'
            '<tspan dx="14">dashed</tspan>: @k, k iterations ago</text>'
        )


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f"C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"


def _css() -> str:
    def rules(c: dict[str, str]) -> str:
        return (
            f".page {{ fill: {c['page']}; }} .name {{ fill: {c['text']}; }} .use, .legend {{ fill: {c['soft']}; }} "
            f".port {{ fill: {c['soft']}; stroke: {c['page']}; }} .wire {{ stroke: {c['line']}; }} "
            f".tip {{ fill: {c['line']}; }} .generation {{ fill: {c['gen']}; stroke: {c['gen-edge']}; }} "
            f".learning {{ fill: {c['learn']}; stroke: {c['learn-edge']}; }} "
            f".gen-text {{ fill: {c['gen-edge']}; }} .learn-text {{ fill: {c['learn-edge']}; }}\n"
        )

    return (
        "text { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; }\n"
        ".name { font-size: 14px; font-weight: 600; text-anchor: middle; }\n"
        ".use { font-size: 11px; text-anchor: middle; } .legend { font-size: 11px; }\n"
        ".port { font-size: 10.5px; stroke-width: 3px; paint-order: stroke; } .node { stroke-width: 1.4px; }\n"
        ".wire { fill: none; stroke-width: 1.4px; } .delayed { stroke-dasharray: 5 4; }\n"
        f"{rules(_LIGHT)}@media (prefers-color-scheme: dark) {{ {rules(_DARK).strip()} }}\n"
    )
