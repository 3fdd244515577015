"""Pictures of a graph: mermaid text, a self-contained SVG, and an HTML page with every node's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape
from typing import Any

from pipeline.app.draw_layout import Layout, Place, lay_out
from pipeline.core.graph import Graph, Node, Wire

# Words that end or open something in mermaid's own grammar.
_MERMAID_WORDS = {
    "end",
    "graph",
    "flowchart",
    "subgraph",
    "style",
    "class",
    "classdef",
    "click",
    "default",
    "direction",
    "linkstyle",
}

NODE_HEIGHT, LAYER_GAP, STUB, MARGIN, LANE_STEP, CORNER = 46.0, 68.0, 18.0, 26.0, 16.0, 10.0

_KEYS = ("page", "text", "soft", "line", "gen", "gen-edge", "learn", "learn-edge")
_LIGHT = dict(
    zip(_KEYS, ("#ffffff", "#1f2328", "#59636e", "#7d8590", "#eef5ff", "#5b8def", "#fff4e5", "#e08a1e"), strict=True)
)
_DARK = dict(
    zip(_KEYS, ("#0d1117", "#e6edf3", "#9198a1", "#6e7681", "#13233a", "#4c83e6", "#33230d", "#d08a2e"), strict=True)
)


def mermaid(graph: Graph) -> str:
    """Mermaid flowchart text; `@k` wires are dashed."""
    names = [
        f'    {_mermaid_id(n.name)}["{_mermaid_text(n.name)}<br/><small>{_mermaid_text(n.use)}</small>"]'
        for n in graph.nodes
    ]
    lines = ["flowchart TD", *names]
    for source, target, label, delayed in _edges(graph):
        arrow = f'-. "{_mermaid_text(label)}" .->' if delayed else f'-- "{_mermaid_text(label)}" -->'
        lines.append(f"    {_mermaid_id(source)} {arrow} {_mermaid_id(target)}")
    learning = [_mermaid_id(n) for n, lane in graph.lanes().items() if lane == "learning"]
    if learning:
        lines.append("    classDef learning fill:#fff4e5,stroke:#e08a1e,color:#1f2328")
        lines.append(f"    class {','.join(learning)} learning")
    return "\n".join(lines) + "\n"


def svg(graph: Graph) -> str:
    """A self-contained SVG, light or dark as the reader's system asks."""
    return _Picture(graph).render()


def html(graph: Graph, title: str = "Graph") -> str:
    """A self-contained page: the picture and a table of nodes with wires and settings; changed settings are bold."""
    rows = "\n".join(_table_row(node) for node in graph.nodes)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
body {{ background: {_LIGHT["page"]}; color: {_LIGHT["text"]}; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid {_LIGHT["line"]}66; }}
code {{ font-size: .92em; }}
td small {{ color: {_LIGHT["soft"]}; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: {_DARK["page"]}; color: {_DARK["text"]}; }}
  td small {{ color: {_DARK["soft"]}; }}
}}
</style></head><body>
<h1>{escape(title)}</h1>
{svg(graph)}
<table><thead><tr><th>node</th><th>reads</th><th>settings</th></tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""


def _edges(graph: Graph) -> Iterator[tuple[str, str, str, bool]]:
    """(source, target, label, delayed) once per output and reader."""
    told: set[tuple[str, Wire]] = set()
    for node in graph.nodes:
        for _, wire in node.all_wires:
            if (node.name, wire) not in told:
                told.add((node.name, wire))
                yield wire.source, node.name, wire.output + (f"@{wire.delay}" if wire.delay else ""), wire.delay > 0


def _mermaid_id(name: str) -> str:
    return f"{name}_" if name in _MERMAID_WORDS else name


def _mermaid_text(text: str) -> str:
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def _table_row(node: Node) -> str:
    summary = (node.cls.__doc__ or "").strip().partition("\n")[0]
    reads = "<br>".join(f"{escape(socket)} ← <code>{escape(str(wire))}</code>" for socket, wire in node.all_wires)
    settings = "<br>".join(
        f"<b><code>{escape(text)}</code></b>" if changed else f"<code>{escape(text)}</code>"
        for text, changed in _settings(node.config)
    )
    return (
        f"<tr><td><b>{escape(node.name)}</b><br><code>{escape(node.use)}</code><br><small>{escape(summary)}</small></td>"
        f"<td>{reads}</td><td>{settings}</td></tr>"
    )


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """("name = value", differs from the default) of every setting, nested ones dotted."""
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{prefix}{f.name}.")
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        yield f"{prefix}{f.name} = {value!r}", value != default


class _Picture:
    """Geometry and text of one SVG."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.lanes = graph.lanes()
        # Each read output has a port at the node's bottom, each wire one at the receiver's top.
        self.outputs = {n.name: list(dict.fromkeys(w.output for _, _, w in graph.readers(n.name))) for n in graph.nodes}
        self.wires = [(n.name, wire) for n in graph.nodes for wire in dict.fromkeys(w for _, w in n.all_wires)]
        widths = {n.name: self._width(n) for n in graph.nodes}
        near = [(w.source, target) for target, w in self.wires if not w.delay]
        far = [(w.source, target) for target, w in self.wires if w.delay]
        self.layout: Layout = lay_out(widths, near, far)
        self._shift()

    def _width(self, node: Node) -> float:
        text = max(len(node.name) * 8.3, len(node.use) * 6.3) + 26
        ports = sum(len(o) * 6.0 + 22 for o in self.outputs[node.name])
        return round(max(text, ports, 96.0))

    def _shift(self) -> None:
        """Moves everything right of the margin and keeps room for the lines that go back up."""
        places = self.layout.places.values()
        self.back = [(target, w) for target, w in self.wires if (w.source, target) not in self.layout.chains]
        low = min(p.x - p.width / 2 for p in places)
        high = max(p.x + max(p.width / 2, self._label_end(p)) for p in places)
        middle = (low + high) / 2
        self.left = [
            b for b in self.back if self.layout.places[b[0]].x + self.layout.places[b[1].source].x <= 2 * middle
        ]
        self.right = [b for b in self.back if b not in self.left]
        move = MARGIN + LANE_STEP * (len(self.left) + bool(self.left)) - low
        for place in places:
            place.x = round(place.x + move, 1)
        self.low, self.high = low + move, high + move
        self.width = self.high + MARGIN + LANE_STEP * (len(self.right) + bool(self.right))
        self.top = MARGIN + (14 + 6 * len(self.back) if self.back else 0)
        self.height = (
            self._y(len(self.layout.layers) - 1)
            + NODE_HEIGHT
            + MARGIN
            + 24
            + (14 + 6 * len(self.back) if self.back else 0)
        )

    def _label_end(self, place: Place) -> float:
        """How far the label of the last port can reach to the right of the node's centre."""
        outputs = self.outputs.get(place.name)
        if not outputs:
            return 0.0
        return place.width / 2 - place.width / len(outputs) / 2 + 14 + 6.2 * (max(len(o) for o in outputs) + 2)

    def _y(self, layer: int) -> float:
        return self.top + layer * (NODE_HEIGHT + LAYER_GAP)

    def _out_port(self, name: str, output: str) -> tuple[float, float]:
        place, ports = self.layout.places[name], self._sorted_outputs(name)
        step = place.width / len(ports)
        return place.x - place.width / 2 + step * (ports.index(output) + 0.5), self._y(place.layer) + NODE_HEIGHT

    def _sorted_outputs(self, name: str) -> list[str]:
        def mean_x(output: str) -> float:
            xs = [self._next_x(name, target) for target, w in self.wires if (w.source, w.output) == (name, output)]
            return sum(xs) / len(xs)

        return sorted(self.outputs[name], key=mean_x)

    def _next_x(self, source: str, target: str) -> float:
        chain = self.layout.chains.get((source, target))
        if chain is not None:
            return self.layout.places[chain[1]].x
        return self.high if any(b[0] == target and b[1].source == source for b in self.right) else self.low

    def _in_port(self, target: str, wire: Wire) -> tuple[float, float]:
        place = self.layout.places[target]

        def from_x(other: Wire) -> tuple[float, float]:
            chain = self.layout.chains.get((other.source, target))
            if chain is None:
                return (self.low if (target, other) in self.left else self.high), 0.0
            return self.layout.places[chain[-2]].x, self._out_port(other.source, other.output)[0]

        ports = sorted((w for t, w in self.wires if t == target), key=from_x)
        step = min(26.0, (place.width - 16) / len(ports))
        return place.x + step * (ports.index(wire) - (len(ports) - 1) / 2), self._y(place.layer)

    def _path_down(self, target: str, wire: Wire) -> str:
        x, y = self._out_port(wire.source, wire.output)
        path = f"M{x:.1f} {y:.1f}v{STUB:.0f}"
        y += STUB
        for name in self.layout.chains[wire.source, target][1:-1]:
            place = self.layout.places[name]
            path += _curve(x, y, place.x, self._y(place.layer)) + f"V{self._y(place.layer) + NODE_HEIGHT:.1f}"
            x, y = place.x, self._y(place.layer) + NODE_HEIGHT
        end_x, end_y = self._in_port(target, wire)
        return path + _curve(x, y, end_x, end_y - 5) + f"V{end_y - 1:.1f}"

    def _path_back(self, target: str, wire: Wire, number: int) -> str:
        """Down from the output, along the side, and in from above."""
        start_x, start_y = self._out_port(wire.source, wire.output)
        end_x, end_y = self._in_port(target, wire)
        on_left = (target, wire) in self.left
        lane = (self.left if on_left else self.right).index((target, wire))
        side = self.low - LANE_STEP * (lane + 1) if on_left else self.high + LANE_STEP * (lane + 1)
        below, above = start_y + 26 + 6 * number, end_y - 20 - 6 * number
        points = [
            (start_x, start_y),
            (start_x, below),
            (side, below),
            (side, above),
            (end_x, above),
            (end_x, end_y - 1),
        ]
        return _rounded(points)

    def render(self) -> str:
        parts = [*self._edge_parts(), *self._label_parts(), *self._node_parts(), self._legend()]
        title = f"{len(self.graph)} nodes: {', '.join(self.graph.names)}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" role="img" aria-label="{escape(title)}">\n<style>\n{_css()}</style>\n'
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="tip" d="M0 0.5 8 4 0 7.5z"/></marker></defs>\n'
            f'<rect class="page" width="{self.width:.0f}" height="{self.height:.0f}"/>\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )

    def _edge_parts(self) -> Iterator[str]:
        for target, wire in self.wires:
            back = (target, wire) in self.back
            path = (
                self._path_back(target, wire, self.back.index((target, wire)))
                if back
                else self._path_down(target, wire)
            )
            style = "wire delayed" if wire.delay else "wire"
            told = f"<title>{escape(f'{wire} → {target}')}</title>"
            yield f'<path class="{style}" d="{path}" marker-end="url(#tip)">{told}</path>'

    def _label_parts(self) -> Iterator[str]:
        for node in self.graph.nodes:
            for output in self.outputs[node.name]:
                x, y = self._out_port(node.name, output)
                delays = sorted({w.delay for _, w in self.wires if (w.source, w.output) == (node.name, output)})
                marks = ", ".join(f"@{d}" if d else "" for d in delays).strip(", ")
                yield f'<text class="port" x="{x + 5:.1f}" y="{y + 13:.1f}">{escape(output + marks)}</text>'

    def _node_parts(self) -> Iterator[str]:
        for node in self.graph.nodes:
            place = self.layout.places[node.name]
            x, y = place.x - place.width / 2, self._y(place.layer)
            summary = (node.cls.__doc__ or "").strip().partition("\n")[0]
            yield (
                f"<g><title>{escape(f'{node.name} ({node.use}) {summary}'.strip())}</title>"
                f'<rect class="node {self.lanes[node.name]}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{place.width:.0f}" height="{NODE_HEIGHT:.0f}" rx="8"/>'
                f'<text class="name" x="{place.x:.1f}" y="{y + 20:.1f}">{escape(node.name)}</text>'
                f'<text class="use" x="{place.x:.1f}" y="{y + 36:.1f}">{escape(node.use)}</text></g>'
            )

    def _legend(self) -> str:
        overlap = "overlapped" if self.graph.overlaps else "in turn"
        return (
            f'<text class="legend" x="{MARGIN:.0f}" y="{self.height - 10:.0f}"><tspan class="gen-text">■</tspan> generation'
            f'<tspan class="learn-text" dx="14">■</tspan> learning ({overlap})<tspan dx="14">dashed</tspan>: @k, k iterations ago</text>'
        )


def _curve(x1: float, y1: float, x2: float, y2: float) -> str:
    middle = (y1 + y2) / 2
    return f"C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"


def _rounded(points: list[tuple[float, float]]) -> str:
    """A path of straight lines with rounded corners."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        (x1, y1), (x2, y2) = _towards(corner, before), _towards(corner, after)
        path += f"L{x1:.1f} {y1:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {x2:.1f} {y2:.1f}"
    return path + f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def _towards(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1e-9)
    part = min(CORNER, length / 2) / length
    return start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part


def _css() -> str:
    def rules(c: dict[str, str]) -> str:
        return (
            f".page {{ fill: {c['page']}; }} .name {{ fill: {c['text']}; }} .use, .legend {{ fill: {c['soft']}; }} "
            f".port {{ fill: {c['soft']}; stroke: {c['page']}; }} .wire {{ stroke: {c['line']}; }} .tip "
            f"{{ fill: {c['line']}; }} "
            f".generation {{ fill: {c['gen']}; stroke: {c['gen-edge']}; }} .learning "
            f"{{ fill: {c['learn']}; stroke: {c['learn-edge']}; }} "
            f".gen-text {{ fill: {c['gen-edge']}; }} .learn-text {{ fill: {c['learn-edge']}; }}\n"
        )

    return (
        "text { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; }\n"
        ".name { font-size: 14px; font-weight: 600; text-anchor: middle; } .use { font-size: 11px; text-anchor: "
        "middle; }\n"
        ".port { font-size: 10.5px; stroke-width: 3px; paint-order: stroke; } .legend { font-size: 11px; }\n"
        ".node { stroke-width: 1.4px; } .wire { fill: none; stroke-width: 1.4px; } .delayed { stroke-dasharray: 5 4; "
        "}\n" + rules(_LIGHT) + f"@media (prefers-color-scheme: dark) {{ {rules(_DARK).strip()} }}\n"
    )
