"""Text and numbers about runs: results, data, configuration, and inputs and outputs of each node."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from creditgraph.pipeline.app.drawing.draw import settings_of, summary_of, svg
from creditgraph.pipeline.app.report.source import RunSource, spread
from creditgraph.pipeline.app.results import as_table, summarise
from creditgraph.pipeline.app.text import cut
from creditgraph.pipeline.app.trackers import WANDB_URL
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Prompts
from creditgraph.pipeline.run.recording import dtype_name
from creditgraph.pipeline.run.run_directory import differences

SNAPSHOTS = 8  # recorded iterations whose payloads are summarised
EXAMPLES = 3  # rows of each
LONGEST = 200  # characters of a value


def overview(run: RunSource) -> dict[str, Any]:
    """The content of the first table and of the cards of a run."""
    section = run.config.get("run")
    section = section if isinstance(section, dict) else {}
    results = summarise(run.rows) if run.rows else None
    return {
        "name": run.name,
        "recipe": str(run.config.get("recipe") or "–"),
        "seed": str(section.get("seed", "–")),
        "model": str((run.config.get("model") or {}).get("path", "–")),
        "iterations": results.iterations if results else 0,
        "planned": section.get("iterations"),
        "before": results.accuracy_before if results else None,
        "after": results.accuracy_after if results else None,
        "reward": results.reward_last if results else None,
        "tokens": results.sampled_tokens if results else None,
        "seconds": (results.seconds or None) if results else None,
        "table": as_table(results) if results else "",
        "running": run.running,
        "tracker": _tracker(run),
        "notes": run.notes,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        "data": data_card(run),
    }


def _tracker(run: RunSource) -> str:
    """The address of the run in wandb; "" where it is in none."""
    try:
        address = (run.path / WANDB_URL).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return address if address.startswith("https://") else ""


def data_card(run: RunSource) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, facts) about the data of a run: its data card, part by part, then what is recorded."""
    parts = [(str(name), _flat(value)) for name, value in run.card.items()]
    sections = run.config.get("data")
    facts = [(str(name), _line(section)) for name, section in sections.items()] if isinstance(sections, dict) else []
    names = sorted({name for name, kind in run.classes.items() if kind == "Prompts"})
    batches = [
        b for name in names[:1] for i in spread(run.iterations(name), 20) if isinstance(b := run.read(name, i), Prompts)
    ]
    if batches:
        lengths = np.concatenate([b.tokens.lengths.numpy() for b in batches])
        texts = {t for b in batches for t in b.text}
        tasks = Counter(str(m.get("task", "unnamed")) for b in batches for m in b.metadata)
        without = sum(not a for b in batches for a in b.answer)
        facts += [
            ("prompts read", f"{len(lengths):,} in {len(batches)} recorded iterations, {len(texts):,} distinct"),
            ("prompt tokens", f"{lengths.min()} to {lengths.max()}, median {int(np.median(lengths))}"),
            ("tasks", ", ".join(f"{name} {count:,}" for name, count in tasks.most_common(8))),
            ("without a reference answer", f"{without:,}"),
        ]
    if run.rejected:
        reasons = Counter(str(r.get("reason") or r.get("error") or "no reason given")[:LONGEST] for r in run.rejected)
        rejected = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common(5))
    else:
        rejected = "none"
    facts.append(("rejected rows", rejected))
    return [*parts, ("as configured and recorded", facts)]


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of every entry of a card, whatever it holds."""
    nested = isinstance(value, list) and any(isinstance(v, dict | list) for v in value)
    if value and (nested or isinstance(value, dict)):
        entries = enumerate(value) if nested else value.items()
        return [fact for key, inner in entries for fact in _flat(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, dict | list):
        text = ", ".join(map(str, value)) or "none"
    else:
        text = f"{value:,}" if type(value) is int else str(value)
    return [(name or "value", cut(text, LONGEST) or "–")]


def config_differences(runs: Sequence[RunSource]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run) of every setting that is not the same in all runs."""
    first, *others = runs
    names = dict.fromkeys(name for run in others for name, _, _ in differences(first.config, run.config))
    return [(name, [_lookup(run.config, name) for run in runs]) for name in names]


def _lookup(config: Any, name: str) -> str:
    for part in name.split("."):
        if not isinstance(config, dict) or part not in config:
            return "absent"
        config = config[part]
    return cut(_line(config), LONGEST)


def _line(value: Any) -> str:
    """A value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()


def graph_card(run: RunSource) -> dict[str, Any] | None:
    """The picture of the graph; per node its settings, wires and summaries of its records. None without a graph."""
    graph = run.graph
    if graph is None:
        return None
    shown = spread(run.iterations(), SNAPSHOTS)
    recorded = {
        name: {str(i): summary for i in shown if (summary := payload_summary(run.read(name, i))) is not None}
        for name in run.outputs()
    }
    nodes = {}
    for node in graph.nodes:
        nodes[node.name] = {
            "use": node.use,
            "summary": summary_of(node),
            "settings": [(name, cut(value, LONGEST), changed) for name, value, changed in settings_of(node.config)],
            "inputs": [
                [socket, str(wire), f"{wire.source}.{wire.output}", wire.delay] for socket, wire in node.all_wires
            ],
            "outputs": [f"{node.name}.{output}" for output in node.sockets.outputs],
        }
    return {
        "svg": svg(graph).replace(' role="img"', ' role="group"', 1),  # its nodes are buttons here
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
        return f"Jagged {dtype_name(value.values)}", what + _range(value.values)
    if isinstance(value, Tensor):
        return dtype_name(value), f"{len(value):,} values" + _range(value) if value.dim() else str(value.item())
    if isinstance(value, list):
        distinct = len({str(v) for v in value})
        return "list", f"{len(value):,} entries, {distinct:,} distinct"
    if isinstance(value, dict):
        items = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        return "dict", cut(", ".join(items), LONGEST) or "empty"
    return type(value).__name__, cut(str(value), LONGEST)


def _range(values: Tensor) -> str:
    if not len(values):
        return ""
    if values.dtype == torch.bool:
        return f", {100 * float(values.float().mean()):.1f} % true"
    if values.dtype in (torch.int32, torch.int64) and int(values.max()) > 1_000_000_000:
        return ""  # ids
    wide = values.double()[~values.isnan()]
    if not len(wide):
        return ", all unknown"
    return f"; {float(wide.min()):.4g} to {float(wide.max()):.4g}, mean {float(wide.mean()):.4g}"


def _cell(value: Any, row: int) -> str:
    if isinstance(value, Jagged):
        items = value.row(row)
        text = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in items[:24].tolist())
        return f"[{text}{f', … ({len(items):,})' if len(items) > 24 else ''}]"
    if isinstance(value, Tensor):
        return str(value[row].item()) if value.dim() else str(value.item())
    if isinstance(value, list):
        return cut(str(value[row]), LONGEST)
    return cut(str(value), LONGEST)
