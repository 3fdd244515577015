"""Words and numbers about runs: results, data card, configuration and its differences, and what each node read and made."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from pipeline.app.draw import svg
from pipeline.app.report.source import RunSource
from pipeline.app.results import as_table, summarise
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Batch, Prompts
from pipeline.run.run_directory import differences

SNAPSHOTS = 8  # recorded iterations whose payloads are summed up
EXAMPLES, LONGEST = 3, 200


def overview(run: RunSource) -> dict[str, Any]:
    """What the first table and the cards say of a run."""
    section = run.config.get("run") if isinstance(run.config.get("run"), dict) else {}
    results = summarise(run.rows) if run.rows else None
    return {
        "name": run.name,
        "recipe": str(run.config.get("recipe", "–")),
        "seed": str((section or {}).get("seed", "–")),
        "model": str((run.config.get("model") or {}).get("path", "–")),
        "iterations": results.iterations if results else 0,
        "planned": (section or {}).get("iterations"),
        "before": results.accuracy_before if results else None,
        "after": results.accuracy_after if results else None,
        "reward": results.reward_last if results else None,
        "tokens": results.sampled_tokens if results else None,
        "seconds": results.seconds if results else None,
        "table": as_table(results) if results else "",
        "running": run.running,
        "notes": run.notes,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        "data": data_card(run),
    }


def data_card(run: RunSource) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, facts) about the data of a run: its data card, part by part, then what is recorded."""
    parts = [(str(name), _flat(value)) for name, value in run.card.items()]
    facts = [
        (f"{part}", yaml.safe_dump(value, default_flow_style=True, width=10_000).strip())
        for part, value in _sections(run)
    ]
    names = sorted({name for name, kind in run.classes.items() if kind == "Prompts"})
    batches = [
        b
        for name in names[:1]
        for i in _spread(run.iterations(name), 20)
        if isinstance(b := run.read(name, i), Prompts)
    ]
    if batches:
        lengths = np.concatenate([b.tokens.lengths.numpy() for b in batches])
        texts = {t for b in batches for t in b.text}
        tasks = Counter(str(m.get("task", "unnamed")) for b in batches for m in b.metadata)
        without = sum(not a for b in batches for a in b.answer)
        facts += [
            ("prompts looked at", f"{len(lengths):,} in {len(batches)} recorded iterations, {len(texts):,} distinct"),
            ("prompt tokens", f"{lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}"),
            ("tasks", ", ".join(f"{name} {count:,}" for name, count in tasks.most_common(8))),
            ("without a reference answer", f"{without:,}"),
        ]
    if run.rejected:
        reasons = Counter(str(r.get("reason") or r.get("error") or "no reason given")[:LONGEST] for r in run.rejected)
        facts.append(("rejected rows", "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(5))))
    else:
        facts.append(("rejected rows", "none"))
    return [*parts, ("as configured and recorded", facts)]


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of every entry of a card, whatever it holds."""
    if isinstance(value, dict) and value:
        return [fact for key, inner in value.items() for fact in _flat(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and any(isinstance(v, dict | list) for v in value):
        return [fact for i, inner in enumerate(value) for fact in _flat(inner, f"{name}.{i}" if name else str(i))]
    text = ", ".join(map(str, value)) if isinstance(value, list) else f"{value:,}" if type(value) is int else str(value)
    return [(name or "value", _cut(text) or "–")] if value not in ({}, []) else [(name or "value", "none")]


def _sections(run: RunSource) -> list[tuple[str, Any]]:
    data = run.config.get("data")
    return [(str(k), v) for k, v in data.items()] if isinstance(data, dict) else []


def config_differences(runs: Sequence[RunSource]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run) of every setting that is not the same in all runs."""
    found: dict[str, None] = {}
    for other in runs[1:]:
        for name, _, _ in differences(runs[0].config, other.config):
            found[name] = None
    return [(name, [_lookup(run.config, name) for run in runs]) for name in found]


def _lookup(config: Any, name: str) -> str:
    for part in name.split("."):
        if not isinstance(config, dict) or part not in config:
            return "absent"
        config = config[part]
    text = yaml.safe_dump(config, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def graph_card(run: RunSource) -> dict[str, Any] | None:
    """The picture of the graph, and per node its settings, wires and summaries of what was recorded; None without a graph."""
    graph = run.graph
    if graph is None:
        return None
    shown = _spread(run.iterations(), SNAPSHOTS)
    recorded = {
        name: {str(i): summary for i in shown if (summary := payload_summary(run.read(name, i))) is not None}
        for name in run.outputs()
    }
    nodes = {}
    for node in graph.nodes:
        nodes[node.name] = {
            "use": node.use,
            "summary": (node.cls.__doc__ or "").strip().partition("\n")[0],
            "settings": _settings(node.config),
            "inputs": [
                [socket, str(wire), f"{wire.source}.{wire.output}", wire.delay] for socket, wire in node.all_wires
            ],
            "outputs": [f"{node.name}.{output}" for output in node.sockets.outputs],
        }
    return {
        "svg": svg(graph).replace(' role="img"', ' role="group"', 1),
        "nodes": nodes,
        "recorded": recorded,
        "iterations": shown,
    }


def payload_summary(payload: Any) -> dict[str, Any] | None:
    """Fields of a payload as [name, kind, what], and its first rows."""
    if payload is None:
        return None
    fields = [[f.name, *_field(getattr(payload, f.name))] for f in dataclasses.fields(payload)]
    count = min(EXAMPLES, len(payload)) if isinstance(payload, Batch) else 0
    examples = [
        [[f.name, _cell(getattr(payload, f.name), i)] for f in dataclasses.fields(payload)] for i in range(count)
    ]
    return {
        "class": type(payload).__name__,
        "rows": len(payload) if isinstance(payload, Batch) else None,
        "fields": fields,
        "rows3": examples,
    }


def _field(value: Any) -> tuple[str, str]:
    if isinstance(value, Jagged):
        lengths = value.lengths
        what = (
            f"{len(value.values):,} values, {int(lengths.min())} to {int(lengths.max())} per row"
            if len(value)
            else "no rows"
        )
        return f"Jagged {_dtype(value.values)}", what + _range(value.values)
    if isinstance(value, Tensor):
        return _dtype(value), f"{len(value):,} values" + _range(value) if value.dim() else str(value.item())
    if isinstance(value, list):
        distinct = len({str(v) for v in value})
        return "list", f"{len(value):,} entries, {distinct:,} distinct"
    if isinstance(value, dict):
        return "dict", _cut(
            ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        ) or "empty"
    return type(value).__name__, _cut(str(value))


def _range(values: Tensor) -> str:
    if not len(values):
        return ""
    if values.dtype == torch.bool:
        return f", {100 * float(values.float().mean()):.1f} % true"
    if values.dtype in (torch.int32, torch.int64) and int(values.max()) > 1_000_000_000:
        return ""  # ids
    wide = values.double()
    return f"; {float(wide.min()):.4g} to {float(wide.max()):.4g}, mean {float(wide.mean()):.4g}"


def _cell(value: Any, row: int) -> str:
    if isinstance(value, Jagged):
        items = value.row(row)
        text = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in items[:24].tolist())
        return f"[{text}{f', … ({len(items):,})' if len(items) > 24 else ''}]"
    if isinstance(value, Tensor):
        return str(value[row].item()) if value.dim() else str(value.item())
    if isinstance(value, list):
        return _cut(str(value[row]))
    return _cut(str(value))


def _settings(config: Any, prefix: str = "") -> list[list[Any]]:
    """[name, value, differs from the default] of every setting."""
    found: list[list[Any]] = []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            found += _settings(value, f"{prefix}{f.name}.")
            continue
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        found.append([f"{prefix}{f.name}", _cut(repr(value)), value != default])
    return found


def _spread(items: list[int], most: int) -> list[int]:
    """At most `most` entries, evenly spaced, first and last among them."""
    if len(items) <= most:
        return items
    return [items[i] for i in sorted({round(k * (len(items) - 1) / (most - 1)) for k in range(most)})]


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"
