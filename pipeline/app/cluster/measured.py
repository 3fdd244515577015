"""What a finished run says about its phases, as the numbers `pipeline.app.cluster.simulate` takes.

Seconds come from metrics.jsonl, lengths of rollouts from the recorded batches. The first iteration, which loads and
compiles, is left out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.app.cluster.simulate import Curve, Draws, Plan, Stage
from pipeline.app.report.source import RunSource
from pipeline.core.errors import RunError
from pipeline.core.graph import Graph
from pipeline.core.payloads import Batch, Policy, Trajectories
from pipeline.core.sockets import Node

WARM = 1  # first iterations that are left out
SLOTS = 1 << 20  # an engine in the process runs all rows at once


@dataclass(frozen=True)
class Generating:
    """A node that asks an engine: per measured iteration its seconds and tokens, and the lengths of its rows.

    `longest` has the tokens of the longest row in those iterations that were recorded, by iteration.
    """

    name: str
    rows: int
    seconds: dict[int, float]
    tokens: dict[int, float]
    longest: dict[int, float]
    lengths: Draws


@dataclass(frozen=True)
class Measured:
    """A run's phases.

    Attributes:
        plan: the run itself, as it was.
        seconds: of each measured iteration, wall time.
        generating: names of the stages that ask an engine.
        rows: rollouts of an iteration: rows of the largest of these stages.
        trained: tokens the learner trained on, over those sampled.
        notes: what could not be known, as sentences.
    """

    plan: Plan
    seconds: list[float]
    generating: list[str]
    rows: int
    trained: float
    notes: list[str]


def measure(run: RunSource, replicas: int = 1) -> Measured:
    """Reads the phases of a run whose engine was in its processes, one per replica.

    Raises:
        RunError: the run holds too little.
    """
    graph = run.graph
    rows = [r for r in run.rows if "seconds/iteration" in r and r["iteration"] >= run.rows[0]["iteration"] + WARM]
    if graph is None:
        raise RunError(
            f"{run.path}: {'; '.join(run.notes) or 'no config.yaml'}; wanted a run of this version. Train one."
        )
    if len(rows) < 3:
        raise RunError(f"{run.path}: {len(rows)} iterations after the first; wanted at least 3. Train longer.")
    lanes, notes = graph.lanes(), list[str]()
    asking = [
        n for n in graph.nodes if lanes[n.name] == "generation" and not _evaluates(n) and _reads(graph, n, Policy)
    ]
    found = {n.name: g for n in asking if (g := _generating(run, n, rows)) is not None}
    notes += [
        f"{n.name} recorded nothing that tells its lengths; its seconds are kept whatever the size."
        for n in asking
        if n.name not in found
    ]
    curve = fit_curve(list(found.values()), replicas)
    stages, update = [], Draws()
    for node in graph.nodes:
        seconds = _seconds(rows, node.name)
        if lanes[node.name] != "generation" or not seconds or _evaluates(node):
            continue
        if any(isinstance(t, type) and issubclass(t, Policy) for s in node.sockets.outputs.values() for t in s.types):
            update = Draws(tuple(seconds))
        elif node.name in found:
            stages.append(_as_stage(found[node.name], curve, replicas))
        else:
            stages.append(_other_stage(run, node, seconds, replicas))
    learning = [n for n in graph.nodes if lanes[n.name] == "learning" and not _evaluates(n)]
    learn = [sum(r.get(f"seconds/{n.name}", 0.0) for n in learning) for r in rows]
    other = [r.get("seconds/executor", 0.0) + r.get("seconds/checkpoint", 0.0) for r in rows]
    plan = Plan(
        stages=tuple(stages), curve=curve, servers=replicas, own_servers=True, replicas=replicas, update=update, learn=Draws(tuple(learn)),
        other=Draws(tuple(other)), delay=max(1, graph.max_delay), engine_gpus=replicas, learner_gpus=replicas,
    )  # fmt: skip
    evaluation = [sum(r.get(f"seconds/{n.name}", 0.0) for n in graph.nodes if _evaluates(n)) for r in rows]
    if sum(evaluation) > 0.01 * sum(r["seconds/iteration"] for r in rows):
        notes.append(f"evaluation, {sum(evaluation):.1f} s of the run, is left out.")
    walls = [
        r["seconds/iteration"]
        for r, spent in zip(rows, evaluation, strict=True)
        if spent < 0.01 * r["seconds/iteration"]
    ]
    sampled = sum(statistics.fmean(g.tokens.values()) for g in found.values())
    trained = [r["learner/trained_tokens"] for r in rows if "learner/trained_tokens" in r]
    share = statistics.fmean(trained) / sampled if trained and sampled else 1.0
    return Measured(plan, walls, list(found), max((g.rows for g in found.values()), default=0), share, notes)


def fit_curve(stages: list[Generating], replicas: int = 1) -> Curve:
    """seconds = floor · longest row + each · tokens, by least squares over stages and recorded iterations, neither below 0.

    That is what a server takes that runs all rows at once: a step for every token of the longest, and every token's own
    share.
    """
    points = [
        (s.longest[i], s.tokens[i] / replicas, s.seconds[i])
        for s in stages
        for i in s.longest
        if i in s.tokens and i in s.seconds
    ]
    if not points:
        return Curve(floor=0.0, each=1e-3, slots=SLOTS)
    data = np.array(points, np.float64)
    x, y = data[:, :2], data[:, 2]
    floor, each = np.linalg.lstsq(x, y, rcond=None)[0] if len(points) > 1 else (-1.0, -1.0)
    if min(floor, each) < 0:
        alone = [float(x[:, j] @ y) / max(float(x[:, j] @ x[:, j]), 1e-12) for j in (0, 1)]
        errors = [float(((x[:, j] * alone[j] - y) ** 2).sum()) for j in (0, 1)]
        floor, each = (alone[0], 0.0) if errors[0] < errors[1] else (0.0, alone[1])
    return Curve(floor=float(floor), each=float(each), slots=SLOTS)


def scaled(plan: Plan, rows: int, generated: int) -> Plan:
    """The plan with `rows` rollouts in place of `generated`: rows of every stage grow with them, seconds per iteration stay."""
    factor = rows / generated
    return replace(
        plan, stages=tuple(replace(s, rows=max(1, round(s.rows * factor))) if s.rows else s for s in plan.stages)
    )


def _generating(run: RunSource, node: Node, rows: list[dict[str, Any]]) -> Generating | None:
    name = node.name
    seconds = {r["iteration"]: r[f"seconds/{name}"] for r in rows if f"seconds/{name}" in r}
    tokens = {r["iteration"]: r[f"{name}/sampled_tokens"] for r in rows if f"{name}/sampled_tokens" in r}
    lengths: list[float] = []
    longest: dict[int, float] = {}
    counts: list[int] = []
    for output in node.sockets.outputs:
        for iteration in run.iterations(f"{name}.{output}"):
            batch = run.read(f"{name}.{output}", iteration)
            if not isinstance(batch, Batch) or iteration not in seconds:
                continue
            if isinstance(batch, Trajectories):
                own = (batch.response_tokens.lengths - batch.inherited).clamp(min=0).tolist()
                counts = counts if lengths else []  # batches of other kinds only count when there are no rollouts
                counts.append(len(own))
                lengths += own
                longest[iteration] = float(max(own, default=0))
                tokens.setdefault(iteration, float(sum(own)))
            elif not lengths:
                counts.append(len(batch))
    if not tokens or not counts or not seconds:
        return None
    size = round(statistics.median(counts))
    mean = statistics.fmean(tokens.values()) / max(size, 1)
    if not lengths:  # rows that were judged or localised: equal lengths, as only their sum is known
        lengths = [mean]
        longest = dict.fromkeys(tokens, mean)
    # What a sampler draws and discards belongs to its work, too.
    draws = Draws(tuple(float(x) for x in lengths))
    return Generating(name, size, seconds, tokens, longest, draws.scaled(mean / draws.mean) if draws.mean else draws)


def _as_stage(stage: Generating, curve: Curve, replicas: int) -> Stage:
    """The stage with lengths scaled so that its mean time is the measured one (long prompts, a faster path for few rows)."""
    rows = -(-stage.rows // replicas)
    most = max(stage.lengths.values)
    expected = curve.floor * most + curve.each * stage.lengths.mean * rows
    factor = statistics.median(stage.seconds.values()) / expected if expected else 1.0
    return Stage(name=stage.name, rows=stage.rows, tokens=stage.lengths.scaled(factor))


def _other_stage(run: RunSource, node: Node, seconds: list[float], replicas: int) -> Stage:
    """A node that asks no engine takes time per row, where it recorded rows."""
    batches = [
        run.read(f"{node.name}.{o}", i) for o in node.sockets.outputs for i in run.iterations(f"{node.name}.{o}")
    ]
    counts = [len(batch) for batch in batches if isinstance(batch, Batch)]
    rows = round(statistics.median(counts)) if counts else 0
    if not rows:
        return Stage(name=node.name, rows=0, seconds=Draws(tuple(seconds)))
    return Stage(name=node.name, rows=rows, row_seconds=statistics.median(seconds) / -(-rows // replicas))


def _seconds(rows: list[dict[str, Any]], node: str) -> list[float]:
    return [r[f"seconds/{node}"] for r in rows if r.get(f"seconds/{node}", 0.0) > 0]


def _evaluates(node: Node) -> bool:
    return bool(getattr(node.cls, "final_pass", False))


def _reads(graph: Graph, node: Node, kind: type) -> bool:
    types = [t for _, wire in node.all_wires for t in graph[wire.source].sockets.outputs[wire.output].types]
    return any(isinstance(t, type) and issubclass(t, kind) for t in types)
