"""Pictures: every node and wire is drawn, nothing overlaps, text is escaped, equal graphs give equal bytes."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from creditgraph.pipeline.app.drawing.draw import mermaid, settings_of, svg
from creditgraph.pipeline.app.drawing.layout import lay_out, separate
from creditgraph.pipeline.core.graph import build_graph

Nodes = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> list[tuple[float, float, float, float]]:
    rects = [r for r in ET.fromstring(picture).iter(f"{SVG}rect") if "node" in r.get("class", "").split()]
    return [
        (float(r.get("x", 0)), float(r.get("y", 0)), float(r.get("width", 0)), float(r.get("height", 0))) for r in rects
    ]


def test_mermaid_text() -> None:
    merge = {"use": "graph_toys:Merge", "in": {"trajectories": "sampler.trajectories"}}
    nodes = {
        "prompts": {"use": "graph_toys:Source"},
        "engine": {"use": "graph_toys:Engine", "in": {"weights": "learner.weights@2"}},
        "sampler": {"use": "graph_toys:Sampler", "in": {"prompts": "prompts.batch", "policy": "engine.policy"}},
        "end": merge,
        "rewards": {"use": "graph_toys:StackOutcome", "in": {"trajectories": "sampler.trajectories"}},
        "credit": {
            "use": "graph_toys:Advantage",
            "in": {"trajectories": "sampler.trajectories", "rewards": "rewards.rewards"},
        },
        "learner": {
            "use": "graph_toys:Learner",
            "in": {"trajectories": "sampler.trajectories", "credit": "credit.credit"},
        },
    }
    assert mermaid(build_graph({"nodes": nodes})) == (
        "flowchart TD\n"
        '    prompts["prompts<br/><small>graph_toys:Source</small>"]\n'
        '    engine["engine<br/><small>graph_toys:Engine</small>"]\n'
        '    sampler["sampler<br/><small>graph_toys:Sampler</small>"]\n'
        '    end_["end<br/><small>graph_toys:Merge</small>"]\n'
        '    rewards["rewards<br/><small>graph_toys:StackOutcome</small>"]\n'
        '    credit["credit<br/><small>graph_toys:Advantage</small>"]\n'
        '    learner["learner<br/><small>graph_toys:Learner</small>"]\n'
        '    learner -. "weights@2" .-> engine\n'
        '    prompts -- "batch" --> sampler\n'
        '    engine -- "policy" --> sampler\n'
        '    sampler -- "trajectories" --> end_\n'
        '    sampler -- "trajectories" --> rewards\n'
        '    sampler -- "trajectories" --> credit\n'
        '    rewards -- "rewards" --> credit\n'
        '    sampler -- "trajectories" --> learner\n'
        '    credit -- "credit" --> learner\n'
        "    classDef learning fill:#fff4e5,stroke:#e08a1e,color:#1f2328\n"
        "    class learner learning\n"
    )


def test_svg_has_every_node_and_wire_and_is_self_contained(srpo: Nodes) -> None:
    graph = build_graph({"nodes": srpo})
    picture = svg(graph)
    root = ET.fromstring(picture)
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert {n.name for n in graph.nodes} <= set(words)
    paths = [p for p in root.iter(f"{SVG}path") if "wire" in p.get("class", "").split()]
    titles = sorted(str(p[0].text) for p in paths)
    assert titles == sorted(f"{w} → {n.name}" for n in graph.nodes for _, w in n.all_wires)
    dashed = [str(p[0].text) for p in paths if "delayed" in p.get("class", "")]
    assert dashed == ["learner.weights@1 → engine"]
    assert "weights@1" in words
    assert "prefers-color-scheme: dark" in picture
    assert not re.search(r"href|url\((?!#tip)|<script|@import", picture)


def test_svg_nodes_lie_apart_and_inside(srpo: Nodes) -> None:
    picture = svg(build_graph({"nodes": srpo}))
    root = ET.fromstring(picture)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for (x1, y1, w1, h1), (x2, y2, w2, h2) in combinations(boxes(picture), 2):
        assert x1 + w1 < x2 or x2 + w2 < x1 or y1 + h1 < y2 or y2 + h2 < y1
    for x, y, w, h in boxes(picture):
        assert min(x, y) > 0
        assert x + w < width
        assert y + h < height
    numbers = [tuple(map(float, pair)) for pair in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", picture)]
    assert all(0 <= x <= width and 0 <= y <= height for x, y in numbers)


def test_pictures_are_deterministic(srpo: Nodes) -> None:
    assert svg(build_graph({"nodes": srpo})) == svg(build_graph({"nodes": srpo}))


def test_text_is_escaped(srpo: Nodes) -> None:
    assert "Samples a group per prompt &lt;&amp;&gt;." in svg(build_graph({"nodes": srpo}))


def test_settings_are_listed_and_changed_ones_marked(srpo: Nodes) -> None:
    srpo["learner"]["config"] = {"optimizer": {"lr": 1e-4}}
    settings = list(settings_of(build_graph({"nodes": srpo})["learner"].config))
    assert ("optimizer.lr", "0.0001", True) in settings
    assert ("objective", "'token'", False) in settings


def test_a_delayed_wire_that_points_downwards_is_drawn() -> None:
    nodes = {
        "learner": {
            "use": "graph_toys:Learner",
            "in": {"trajectories": "merge.trajectories", "credit": "credit.credit"},
        },
        "merge": {
            "use": "graph_toys:Expander",
            "in": {"failures": "stack.trajectories", "errors": "find.errors", "policy": "engine.policy"},
        },
        "find": {
            "use": "graph_toys:Localizer",
            "in": {"failures": "stack.trajectories", "prompts": "p.batch", "policy": "engine.policy"},
        },
        "stack": {"use": "graph_toys:Sampler", "in": {"prompts": "p.batch", "policy": "engine.policy"}},
        "p": {"use": "graph_toys:Source"},
        "engine": {"use": "graph_toys:Engine", "in": {"weights": "learner.weights@1"}},
        "rewards": {"use": "graph_toys:StackOutcome", "in": {"trajectories": "merge.trajectories"}},
        "credit": {
            "use": "graph_toys:Advantage",
            "in": {"trajectories": "merge.trajectories", "rewards": "rewards.rewards"},
        },
        "late": {
            "use": "graph_toys:Watch",
            "in": {"policy": "engine.policy", "report": "learner.report", "anything": "learner.weights@3"},
        },
    }
    picture = svg(build_graph({"nodes": nodes}))
    assert "learner.weights@3 → late" in picture
    assert "weights@1, @3" in picture


def test_separate_by_hand() -> None:
    assert separate([0.0, 10.0], [2.0], [1.0, 1.0]) == [0.0, 10.0]  # already apart
    assert separate([0.0, 0.0], [4.0], [1.0, 1.0]) == [-2.0, 2.0]
    assert separate([0.0, 0.0], [4.0], [3.0, 1.0]) == [-1.0, 3.0]  # the heavier one moves a third as far
    assert separate([5.0], [], [1.0]) == [5.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.1, 20), st.floats(0.5, 4)), min_size=1, max_size=8))
def test_separate_keeps_every_gap(rows: list[tuple[float, float, float]]) -> None:
    positions, gaps, weights = [r[0] for r in rows], [r[1] for r in rows[:-1]], [r[2] for r in rows]
    placed = separate(positions, gaps, weights)
    assert all(b - a >= gap - 1e-6 for (a, b), gap in zip(pairwise(placed), gaps, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.data())
def test_layers_follow_every_edge(count: int, data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(count)]
    pairs = list(combinations(names, 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), max_size=14)) if pairs else []
    layout = lay_out(dict.fromkeys(names, 50.0), edges, [])
    for source, target in edges:
        chain = layout.chains[source, target]
        assert (chain[0], chain[-1]) == (source, target)
        assert [layout.places[n].layer for n in chain] == list(
            range(layout.places[source].layer, layout.places[target].layer + 1)
        )
    for layer in layout.layers:
        for left, right in pairwise(layout.places[n] for n in layer):
            assert right.x - left.x >= (left.width + right.width) / 2


def test_crossing_free_order_is_found() -> None:
    # a feeds d and b feeds c: drawn in the order written they would cross.
    layout = lay_out(dict.fromkeys("abcd", 10.0), [("a", "d"), ("b", "c")], [])
    assert layout.layers in ([["a", "b"], ["d", "c"]], [["b", "a"], ["c", "d"]])


@pytest.mark.parametrize("size", [1, 2])
def test_small_graphs(size: int) -> None:
    graph = build_graph({"nodes": {f"n{i}": {"use": "graph_toys:Source"} for i in range(size)}})
    assert len(boxes(svg(graph))) == size
    assert mermaid(graph).count("Source") == size
