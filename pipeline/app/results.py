"""The result of a run: a table and result.json, both made from metrics.jsonl."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.progress import ACCURACY, REWARD, SAMPLED_TOKENS, STEPS, TRAINED_TOKENS, duration
from creditgraph.pipeline.run.metrics import read_metrics
from creditgraph.pipeline.run.run_directory import write_json


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a run; None for values that the run did not log.

    Attributes:
        iterations: number of iterations run.
        accuracy_before: first held-out accuracy.
        accuracy_after: held-out accuracy after the last iteration; None where it was not measured, as of a run that was
            interrupted.
        reward_first, reward_last: mean reward, averaged over the first and the last tenth of the iterations (at least
            one).
        sampled_tokens, trained_tokens, optimizer_steps: sums over the run.
        seconds: wall time of all iterations.
        phases: node → seconds in all.
        memory: node → largest GPU memory of tensors, and of what torch had taken, in gigabytes.
        mfu, tokens_per_second: of the learner, means over the iterations that have them.
        curve: (iteration, accuracy) pairs.
        warning: why the run trained nothing, as a sentence; "" if it trained.
    """

    iterations: int
    accuracy_before: float | None
    accuracy_after: float | None
    reward_first: float | None
    reward_last: float | None
    sampled_tokens: int | None
    trained_tokens: int | None
    optimizer_steps: int | None
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    mfu: float | None = None
    tokens_per_second: float | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    warning: str = ""


def summarise(rows: list[dict[str, Any]], warning: str = "") -> Results:
    """Sums up the rows of a metrics.jsonl; `warning` is taken over. Pure."""
    curve = [(int(i), float(v)) for i, v in _series(rows, ACCURACY)]
    rewards = [v for _, v in _series(rows, REWARD)]
    tenth = max(1, len(rewards) // 10)  # one iteration's reward is too noisy to compare
    wall = 0.0
    phases: dict[str, float] = {}
    iterations = 0
    last = max((row["iteration"] for row in rows if "seconds/iteration" in row), default=-1)
    for row in rows:
        seconds = phase_seconds(row)
        iterations += "seconds/iteration" in row or REWARD in row  # rewards alone where the run was imported
        # The final pass has no iteration around it.
        wall += row.get("seconds/iteration", sum(seconds.values())) + seconds.get("checkpoint", 0.0)
        for name, value in seconds.items():
            phases[name] = phases.get(name, 0.0) + value
    return Results(
        iterations=iterations,
        accuracy_before=curve[0][1] if curve else None,
        accuracy_after=curve[-1][1] if curve and curve[-1][0] > last else None,
        reward_first=sum(rewards[:tenth]) / tenth if rewards else None,
        reward_last=sum(rewards[-tenth:]) / tenth if rewards else None,
        sampled_tokens=_total(rows, SAMPLED_TOKENS),
        trained_tokens=_total(rows, TRAINED_TOKENS),
        optimizer_steps=_total(rows, STEPS),
        seconds=wall,
        phases=dict(sorted(phases.items(), key=lambda p: -p[1])),
        memory=_memory(rows),
        mfu=_mean(rows, "learner/mfu"),
        tokens_per_second=_mean(rows, "learner/tokens_per_second"),
        curve=curve,
        warning=warning,
    )


def phase_seconds(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of an iteration by phase: node, or part of the executor → seconds."""
    clocks = {k.removeprefix("seconds/"): v for k, v in row.items() if k.startswith("seconds/")}
    # "cpu" is another clock, and waiting for the other lane overlaps with that lane's seconds.
    left_out = ("iteration", "cpu")
    return {
        k: float(v) for k, v in clocks.items() if k not in left_out and not k.startswith("waiting") and is_number(v)
    }


def is_number(value: Any) -> bool:
    """Whether a value of metrics.jsonl is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def as_table(results: Results) -> str:
    """The results as lines of text."""
    lines: list[tuple[str, str]] = [("iterations", str(results.iterations))]
    before = results.accuracy_before
    after = results.accuracy_after
    if before is not None and after is not None:
        lines.append(
            ("held-out accuracy", f"{before:.3f} before, {after:.3f} after ({(after - before) * 100:+.1f} points)")
        )
    elif before is not None:
        newest = "".join(f", {value:.3f} before iteration {i}" for i, value in results.curve[1:][-1:])
        lines.append(("held-out accuracy", f"{before:.3f} before{newest}; not measured after the last iteration"))
    if results.reward_first is not None and results.reward_last is not None:
        lines.append(("mean reward", f"{results.reward_first:.3f} first tenth, {results.reward_last:.3f} last tenth"))
    for label, count in (
        ("sampled tokens", results.sampled_tokens),
        ("trained tokens", results.trained_tokens),
        ("optimiser steps", results.optimizer_steps),
    ):
        if count is not None:
            lines.append((label, f"{count:,}"))
    if results.tokens_per_second is not None:
        lines.append(("trained per s and GPU", f"{results.tokens_per_second:,.0f} tokens"))
    if results.mfu is not None:
        lines.append(("MFU of the learner", f"{results.mfu:.1%}"))
    lines.append(("time", duration(results.seconds)))
    total = sum(results.phases.values())
    for name, seconds in results.phases.items():
        if total and seconds / total >= 0.001:
            held = results.memory.get(name)
            memory = f"  at most {held[0]:.1f} GB in tensors, {held[1]:.1f} GB taken" if held else ""
            lines.append((f"  {name}", f"{seconds:8.1f} s {100 * seconds / total:5.1f} %{memory}"))
    width = max(len(label) for label, _ in lines)
    table = "\n".join(f"{label:<{width}}  {text}" for label, text in lines)
    return "\n".join([table, *(f"WARNING {sentence}" for sentence in results.warning.splitlines())])


def write_results(run_path: Path, warning: str = "") -> str:
    """Writes result.json.

    Args:
        run_path: run directory.
        warning: why the run trained nothing.

    Returns:
        the results as a table.
    """
    results = summarise(read_metrics(run_path / "metrics.jsonl"), warning)
    write_json(run_path / "result.json", asdict(results))
    return as_table(results)


def _series(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["iteration"], row[name]) for row in rows if is_number(row.get(name))]


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [v for _, v in _series(rows, name)]
    return sum(values) / len(values) if values else None


def _memory(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Node → its largest memory of all iterations, in tensors and taken from the GPU."""
    largest: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("memory/") and is_number(value):
                node = name.removeprefix("memory/")
                largest[node] = max(largest.get(node, 0.0), value)
    taken = "_reserved"
    return {n: (v, largest[n + taken]) for n, v in largest.items() if n + taken in largest}


def _total(rows: list[dict[str, Any]], name: str) -> int | None:
    values = [v for _, v in _series(rows, name)]
    return int(sum(values)) if values else None
