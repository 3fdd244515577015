"""The page of results in Markdown, from the lines of all stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from acceptance.runner import STAGES


def page(lines: dict[str, dict[str, Any]]) -> str:
    """One section per stage, after a table of all."""
    out = ["# Acceptance", ""]
    for key in ("device", "commit", "sources"):
        values = dict.fromkeys(str(line["facts"].get(key, "unknown")) for line in lines.values())
        out.append(f"- {key}: {', '.join(values)}")
    versions = dict.fromkeys(
        ", ".join(f"{n} {v}" for n, v in line["facts"].get("versions", {}).items()) for line in lines.values()
    )
    out += [f"- versions: {text}" for text in versions if text]
    if any(line["small"] for line in lines.values()):
        out.append("- **small sizes**: the code ran; speed and memory mean nothing")
    rows = [_summary(stage.name, stage.proves, lines.get(stage.name)) for stage in STAGES]
    out += ["", *_table(rows)]
    for stage in STAGES:
        if stage.name in lines:
            out += ["", *_section(lines[stage.name])]
    return "\n".join(out) + "\n"


def _summary(name: str, proves: str, line: dict[str, Any] | None) -> dict[str, Any]:
    if line is None:
        return {"stage": name, "proves": proves, "result": "not run yet", "checks": "", "s": ""}
    held = sum(check["holds"] for check in line["checks"])
    result = line["status"] + (f": {line['reason']}" if line.get("reason") else "")
    checks = f"{held} of {len(line['checks'])}"
    return {"stage": name, "proves": proves, "result": result, "checks": checks, "s": line["seconds"]}


def _section(line: dict[str, Any]) -> list[str]:
    out = [f"## {line['stage']}: {line['status']}", ""]
    if line.get("reason"):
        out += [f"{line['reason']}.", ""]
    if line["checks"]:
        out += [*_table(_checks(line["checks"])), ""]
    for group in _groups(line["rows"]):
        out += [*_table(group), ""]
    return [*out, *(f"- {note}" for note in line["notes"])]


def _checks(checks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "check": c["name"],
            "measured": c["value"],
            "expected": c["limit"] or "true",
            "": "ok" if c["holds"] else "**FAILS**",
        }
        for c in checks
    ]


def _groups(rows: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Rows with the same columns make one table."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return groups.values()


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, float):
        return (
            f"{value:.3g}"
            if math.isfinite(value) and abs(value) < 1e5
            else f"{value:,.0f}"
            if math.isfinite(value)
            else str(value)
        )
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")
