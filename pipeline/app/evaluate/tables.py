"""Results as markdown: one subject, or several side by side with their differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.app.evaluate.scores import metric_order


def percent(found: Mapping[str, float] | None, sign: bool = False) -> str:
    """ "81.2 [77.0, 85.4]" in percent; an en dash where there is nothing.

    >>> percent({"value": 0.812, "low": 0.77, "high": 0.854})
    '81.2 [77.0, 85.4]'
    """
    if not found:
        return "–"
    value, low, high = (f"{100 * found[k]:{'+' if sign else ''}.1f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table with columns of even width."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
        for r in [head, *rows]
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def results_table(results: Mapping[str, Any]) -> str:
    """Tasks as rows, metrics as columns; tasks with flagged problems have a second row without them."""
    tasks: Mapping[str, Any] = results["tasks"]
    metrics = metric_order({m for t in tasks.values() for m in t["metrics"]})
    rows = []
    for name, t in tasks.items():
        rows.append(
            [
                name,
                str(t["problems"]),
                "–" if t["flagged"] is None else str(t["flagged"]),
                *(percent(t["metrics"].get(m)) for m in metrics),
            ]
        )
        rest = t.get("without_flagged")
        if rest:
            rows.append(
                [
                    f"{name}, without flagged",
                    str(rest["problems"]),
                    "0",
                    *(percent(rest["metrics"].get(m)) for m in metrics),
                ]
            )
    if results.get("mean"):
        rows.append(["mean of tasks", "", "", *(percent(results["mean"]["metrics"].get(m)) for m in metrics)])
    return table(["task", "problems", "flagged", *metrics], rows)


def results_page(results: Mapping[str, Any]) -> str:
    """The whole results.md of one subject."""
    lines = [
        f"# {results['title']}: {results['subject']}, checkpoint {results['checkpoint']}",
        "",
        results_table(results),
        "",
        f"Percent, with {100 * results['confidence']:g} % bootstrap intervals over problems ({results['resamples']:,} draws, percentile "
        f"method). Suite {results['suite']} version {results['version']}, seed {results['seed']}, {results['engine']}, "
        "model "
        f"{results['model']['path']} ({results['model']['dtype']}).",
        "",
        contamination_lines(results["contamination"]),
        "",
        "| task | set | responses | invalid | no answer | cut off | rows rejected | settings |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, t in results["tasks"].items():
        counts = [t["responses"], t["invalid"], t["no_answer"], t["cut"], t["rejected"]]
        settings = ", ".join(f"{k} {_plain(v)}{_origin(t['origin'].get(k))}" for k, v in t["settings"].items())
        lines.append(f"| {name} | {t['set']} | {' | '.join(map(str, counts))} | {settings} |")
    return "\n".join(lines) + "\n"


def contamination_lines(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """What the search in training data found, a sentence per way of searching."""
    told: dict[str, list[str]] = {}
    for task, report in reports.items():
        told.setdefault(_search_line(report), []).append(task)
    if len(told) == 1:
        return next(iter(told))
    return "\n".join(f"- {', '.join(tasks)}: {line}" for line, tasks in told.items())


def _search_line(report: Mapping[str, Any]) -> str:
    if report["status"] != "checked":
        return f"Contamination not checked: {report['status']}."
    rule = "any" if not report["share"] else f"more than {100 * report['share']:g} %"
    return (
        f"Flagged are problems with {rule} of their {report['n']}-grams of words in the {report['train_rows']:,} "
        "training problems of "
        f"{report['train']}."
    )


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """Several subjects side by side; differences are to the first."""
    names = comparison["subjects"]
    rows = []
    for task, t in comparison["tasks"].items():
        for metric in t["metrics"]:
            values = [percent(t["metrics"][metric].get(n)) for n in names]
            gaps = []
            for n in names[1:]:
                found = t["differences"][n]["metrics"].get(metric)
                gaps.append(percent(found, sign=True) + (" *" if found and found["resolved"] else ""))
            rows.append([task, metric, *values, *gaps])
    head = ["task", "metric", *names, *(f"{n} − {names[0]}" for n in names[1:])]
    note = (
        f"Percent, with {100 * comparison['confidence']:g} % bootstrap intervals; differences are drawn in pairs over "
        "the problems both "
        "have, and * marks those whose interval leaves out 0."
    )
    made = "; ".join(f"{n} is checkpoint {comparison['checkpoints'][n]} with {comparison['engines'][n]}" for n in names)
    return f"{table(head, rows)}\n\n{note} Suite {comparison['suite']} version {comparison['version']}; {made}.\n"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} {_plain(v)}" for k, v in value.items()) + "}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _origin(source: str | None) -> str:
    return f" ({source})" if source else ""
