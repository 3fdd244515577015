"""Places a graph in layers, top to bottom: longest-path layers, barycentre order, least-squares coordinates.

Edges that span several layers pass through one invisible place per layer, so that they never cross a node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import fmean

SWEEPS = 24
NODE_GAP = 34.0
LINE_GAP = 30.0

Edge = tuple[str, str]


@dataclass
class Place:
    """A node, or an invisible place of a long edge; x is its centre."""

    name: str
    width: float
    layer: int
    visible: bool = True
    x: float = 0.0


@dataclass
class GraphLayout:
    """`layers` in drawing order, `places` by name, and for each edge the names it passes from source to target."""

    places: dict[str, Place] = field(default_factory=dict)
    layers: list[list[str]] = field(default_factory=list)
    chains: dict[Edge, list[str]] = field(default_factory=dict)


def lay_out(widths: Mapping[str, float], edges: Sequence[Edge], delayed: Sequence[Edge]) -> GraphLayout:
    """Lays out nodes (name → width, in topological order) with `edges` within an iteration and `delayed` ones.

    Delayed edges do not determine layers. Those that point downwards anyway are routed like the others; the rest have
    no chain and are drawn by the caller.
    """
    depth = _depths(list(widths), edges)
    layout = GraphLayout()
    layout.places = {name: Place(name, width, depth[name]) for name, width in widths.items()}
    layout.layers = [[n for n in widths if depth[n] == d] for d in range(max(depth.values()) + 1)]
    for source, target in dict.fromkeys([*edges, *delayed]):
        if depth[source] < depth[target]:
            layout.chains[source, target] = _chain(layout, source, target)
    links = [link for chain in layout.chains.values() for link in pairwise(chain)]
    _order(layout, links)
    _coordinates(layout, links)
    return layout


def _depths(names: list[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Longest path from a start; starts then move down to just above their first reader."""
    depth: dict[str, int] = {}
    for name in names:
        depth[name] = max((depth[s] + 1 for s, t in edges if t == name), default=0)
    for name in names:
        readers = [depth[t] for s, t in edges if s == name]
        if readers and not any(t == name for _, t in edges):
            depth[name] = min(readers) - 1
    return depth


def _chain(layout: GraphLayout, source: str, target: str) -> list[str]:
    chain = [source]
    for layer in range(layout.places[source].layer + 1, layout.places[target].layer):
        name = f"{source}>{target}>{layer}"
        layout.places[name] = Place(name, 2.0, layer, visible=False)
        layout.layers[layer].append(name)
        chain.append(name)
    return [*chain, target]


def _order(layout: GraphLayout, links: Sequence[Edge]) -> None:
    """Barycentre sweeps down and up; the order with the fewest crossings stays."""
    above: dict[str, list[str]] = {n: [a for a, b in links if b == n] for n in layout.places}
    below: dict[str, list[str]] = {n: [b for a, b in links if a == n] for n in layout.places}
    best = [list(layer) for layer in layout.layers]
    fewest = _crossings(best, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        for layer in layout.layers if down else layout.layers[::-1]:
            index = {n: i / max(len(row) - 1, 1) for row in layout.layers for i, n in enumerate(row)}
            layer.sort(key=lambda n: fmean([index[m] for m in neighbours[n]] or [index[n]]))
        count = _crossings(layout.layers, links)
        if count < fewest:
            best = [list(layer) for layer in layout.layers]
            fewest = count
    layout.layers = best


def _crossings(layers: Sequence[Sequence[str]], links: Sequence[Edge]) -> int:
    """Pairs of links between the same two layers whose ends lie in opposite order."""
    index = {n: (depth, i) for depth, row in enumerate(layers) for i, n in enumerate(row)}
    ends = [(*index[a], index[b][1]) for a, b in links]  # layer, place above, place below
    return sum(p[0] == q[0] and (p[1] - q[1]) * (p[2] - q[2]) < 0 for p, q in combinations(ends, 2))


def _coordinates(layout: GraphLayout, links: Sequence[Edge]) -> None:
    """Pulls each place to the mean of its neighbours, keeping order and gaps; invisible places pull harder, so that
    long lines are straight."""
    near: dict[str, list[Place]] = {n: [] for n in layout.places}
    for a, b in links:
        near[a].append(layout.places[b])
        near[b].append(layout.places[a])
    rows = [[layout.places[n] for n in layer] for layer in layout.layers]
    for sweep in range(-1, 3 * SWEEPS):  # the first one packs each row from the left
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            targets = [0.0 if sweep < 0 else _pull(place, near[place.name]) for place in row]
            gaps = [
                (a.width + b.width) / 2 + (NODE_GAP if a.visible and b.visible else LINE_GAP) for a, b in pairwise(row)
            ]
            weights = [1.0 if place.visible else 4.0 for place in row]
            for place, x in zip(row, separate(targets, gaps, weights), strict=True):
                place.x = x


def _pull(place: Place, near: Sequence[Place]) -> float:
    """Weighted mean of the neighbours' x; the place's own x without any."""
    weights = [1.0 if other.visible else 3.0 for other in near]
    return sum(o.x * w for o, w in zip(near, weights, strict=True)) / sum(weights) if near else place.x


def separate(targets: Sequence[float], gaps: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Positions nearest to `targets` (weighted least squares) with at least `gaps[i]` between i and i + 1.

    Isotonic regression by pooling adjacent violators, after subtracting the accumulated gaps.

    >>> separate([0.0, 0.0], [2.0], [1.0, 1.0])
    [-1.0, 1.0]
    """
    shift = [0.0]
    for gap in gaps:
        shift.append(shift[-1] + gap)
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, count)
    for value, weight, offset in zip(targets, weights, shift, strict=True):
        blocks.append((value - offset, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (m1, w1, c1), (m2, w2, c2) = blocks[-2:]
            blocks[-2:] = [((m1 * w1 + m2 * w2) / (w1 + w2), w1 + w2, c1 + c2)]
    means = [mean for mean, _, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, shift, strict=True)]
