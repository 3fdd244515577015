"""Places a graph in layers, top to bottom: longest-path layers, barycentre order, least-squares coordinates.

Edges that span several layers pass through one invisible place per layer, so that they never run behind a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SWEEPS = 24
NODE_GAP, LINE_GAP = 34.0, 30.0


@dataclass
class Place:
    """A node, or an invisible place of a long edge, with the centre x the layout gives it."""

    name: str
    width: float
    layer: int
    visible: bool
    x: float = 0.0


@dataclass
class Layout:
    """The result: `layers` in drawing order, `places` by name, and for each edge the names it passes from source to target."""

    places: dict[str, Place] = field(default_factory=dict)
    layers: list[list[str]] = field(default_factory=list)
    chains: dict[tuple[str, str], list[str]] = field(default_factory=dict)


def lay_out(
    widths: Mapping[str, float], edges: Sequence[tuple[str, str]], delayed: Sequence[tuple[str, str]]
) -> Layout:
    """Lays out nodes (name → width) with `edges` within an iteration and `delayed` ones.

    Delayed edges decide no layer; those that happen to point downwards are routed like the others, the rest are left to
    the caller and have no chain.
    """
    depth = _depths(list(widths), edges)
    layout = Layout()
    for name, width in widths.items():
        layout.places[name] = Place(name, width, depth[name], True)
    layout.layers = [[n for n in widths if depth[n] == d] for d in range(max(depth.values()) + 1)]
    for source, target in dict.fromkeys([*edges, *delayed]):
        if depth[source] < depth[target]:
            layout.chains[source, target] = _chain(layout, source, target)
    links = [(a, b) for chain in layout.chains.values() for a, b in pairwise(chain)]
    _order(layout, links)
    _coordinates(layout, links)
    return layout


def _depths(names: list[str], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Longest path from a start; starts then move down to just above their first reader. Names come in sorted order."""
    depth = dict.fromkeys(names, 0)
    for name in names:
        depth[name] = max((depth[s] + 1 for s, t in edges if t == name), default=0)
    for name in names:
        readers = [depth[t] for s, t in edges if s == name]
        if readers and not any(t == name for _, t in edges):
            depth[name] = min(readers) - 1
    return depth


def _chain(layout: Layout, source: str, target: str) -> list[str]:
    chain = [source]
    for layer in range(layout.places[source].layer + 1, layout.places[target].layer):
        name = f"{source}>{target}>{layer}"
        layout.places[name] = Place(name, 2.0, layer, False)
        layout.layers[layer].append(name)
        chain.append(name)
    return [*chain, target]


def _order(layout: Layout, links: list[tuple[str, str]]) -> None:
    """Barycentre sweeps down and up; the order with the fewest crossings stays."""
    above: dict[str, list[str]] = {n: [a for a, b in links if b == n] for n in layout.places}
    below: dict[str, list[str]] = {n: [b for a, b in links if a == n] for n in layout.places}
    best, fewest = [list(layer) for layer in layout.layers], _crossings(layout.layers, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layout.layers if down else layout.layers[::-1]:
            index = {n: i / max(len(row) - 1, 1) for row in layout.layers for i, n in enumerate(row)}
            towards = above if down else below
            middle = {n: sum(index[m] for m in towards[n]) / len(towards[n]) if towards[n] else index[n] for n in layer}
            layer.sort(key=lambda n: middle[n])
        count = _crossings(layout.layers, links)
        if count < fewest:
            best, fewest = [list(layer) for layer in layout.layers], count
    layout.layers = best
    _swap_neighbours(layout.layers, links)


def _swap_neighbours(layers: list[list[str]], links: list[tuple[str, str]]) -> None:
    """Swaps neighbours while that removes a crossing."""
    fewest = _crossings(layers, links)
    improved = True
    while improved:
        improved = False
        for layer in layers:
            for i in range(len(layer) - 1):
                layer[i], layer[i + 1] = layer[i + 1], layer[i]
                count = _crossings(layers, links)
                if count < fewest:
                    fewest, improved = count, True
                else:
                    layer[i], layer[i + 1] = layer[i + 1], layer[i]


def _crossings(layers: list[list[str]], links: list[tuple[str, str]]) -> int:
    index = {n: (depth, i) for depth, row in enumerate(layers) for i, n in enumerate(row)}
    count = 0
    for depth in range(len(layers) - 1):
        ends = sorted((index[a][1], index[b][1]) for a, b in links if index[a][0] == depth)
        count += sum(
            ends[j][1] < ends[i][1]
            for i in range(len(ends))
            for j in range(i + 1, len(ends))
            if ends[j][0] > ends[i][0]
        )
    return count


def _coordinates(layout: Layout, links: list[tuple[str, str]]) -> None:
    """Pulls each place to the mean of its neighbours, keeping order and gaps; invisible places pull harder, so lines are straight."""
    near: dict[str, list[str]] = {n: [] for n in layout.places}
    for a, b in links:
        near[a].append(b)
        near[b].append(a)
    for layer in layout.layers:
        x = 0.0
        for name in layer:
            layout.places[name].x = x + layout.places[name].width / 2
            x += layout.places[name].width + NODE_GAP
    for sweep in range(3 * SWEEPS):
        for layer in layout.layers if sweep % 2 == 0 else layout.layers[::-1]:
            places = [layout.places[n] for n in layer]
            weights = [{n: 1.0 if layout.places[n].visible else 3.0 for n in near[p.name]} for p in places]
            wanted = [
                sum(layout.places[n].x * w for n, w in ws.items()) / sum(ws.values()) if ws else p.x
                for p, ws in zip(places, weights, strict=True)
            ]
            pull = [1.0 if p.visible else 4.0 for p in places]
            gaps = [
                (a.width + b.width) / 2 + (NODE_GAP if a.visible and b.visible else LINE_GAP)
                for a, b in pairwise(places)
            ]
            for place, x in zip(places, separate(wanted, gaps, pull), strict=True):
                place.x = x


def separate(wanted: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Positions nearest to `wanted` (weighted least squares) with at least `gaps[i]` between i and i + 1.

    Isotonic regression by pooling adjacent violators, after subtracting the accumulated gaps.

    >>> separate([0.0, 0.0], [2.0], [1.0, 1.0])
    [-1.0, 1.0]
    """
    shift = [0.0]
    for gap in gaps:
        shift.append(shift[-1] + gap)
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, count)
    for value, weight, offset in zip(wanted, weights, shift, strict=True):
        blocks.append((value - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (m1, w1, c1), (m2, w2, c2) = blocks[-2:]
            blocks[-2:] = [((m1 * w1 + m2 * w2) / (w1 + w2), w1 + w2, c1 + c2)]
    flat = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(flat, shift, strict=True)]
