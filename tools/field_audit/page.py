"""The generated parts of docs/audit.md: counts, the table, and what could not be judged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

TITLES = {
    "verl": "verl", "trl": "TRL", "openrlhf": "OpenRLHF", "skyrl": "SkyRL", "slime": "slime", "miles": "miles",
    "nemo_rl": "NeMo-RL", "prime_rl": "prime-rl", "areal": "AReaL", "roll": "ROLL", "rllm": "rLLM",
    "open_instruct": "open-instruct", "pipelinerl": "PipelineRL", "rlinf": "RLinf", "swift": "ms-swift",
    "unsloth": "Unsloth",
}  # fmt: skip
MARKS = {"fault": "✗", "once": "✗", "choice": "○", "design": "≈"}


def read(file: Path) -> dict[str, Any]:
    """The results; of a file that is not there, none."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def judgement(rules: list[dict[str, Any]], trainer: str, row: dict[str, Any], check: str) -> dict[str, Any]:
    """The rule for a failure; raises LookupError if a person has not looked at it."""
    design = row.get("design") or {}
    for rule in rules:
        if rule["trainer"] not in ("*", trainer) or check not in rule["checks"] or rule["name"] not in row["name"]:
            continue
        if not rule.get("design"):
            return rule
        if check in design.get("fails", ()):
            return rule | {"why": design["words"]}
    raise LookupError(
        f"{trainer}, {row['name']}: nobody has judged its failure of {check}: add a rule to tools/field.yaml"
    )


def judged(results: dict[str, Any], rules: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Trainer, row, and check → judgement of each failure."""
    return [
        (trainer, row, {check: judgement(rules, trainer, row, check) for check in row.get("failures", {})})
        for trainer, found in results.items()
        for row in found["rows"]
    ]


def counts(results: dict[str, Any], rules: list[dict[str, Any]]) -> str:
    """The numbers of the first screen."""
    rows = [entry for entry in judged(results, rules) if entry[1]["judged"]]
    functions = {(trainer, row["function"]) for trainer, row, _ in rows}
    worst: Counter[str] = Counter()
    for _, _, found in rows:
        kinds = {rule["is"] for rule in found.values()}
        worst[next((k for k in ("fault", "once", "choice", "design") if k in kinds), "clean")] += 1
    evaluated = sum(len(row["passes"]) + len(row["failures"]) for _, row, _ in rows)
    return "\n".join(
        [
            f"- **{len(functions)} functions** of {len(results)} trainers in {len(rows)} settings were judged, by "
            f"{evaluated:,} checks whose batches they took.",
            f"- {worst['clean']} settings pass every check. {worst['design']} fail only what their documents or their "
            f"papers want (≈), {worst['choice']} only what is a choice that nobody documents (○).",
            f"- {worst['fault'] + worst['once']} settings have one of the faults below (✗).",
        ]
    )


def table(results: dict[str, Any], rules: list[dict[str, Any]]) -> str:
    """A row for each function and setting."""
    lines = ["| function | held | failed |", "|---|---|---|"]
    last = ""
    for trainer, row, found in judged(results, rules):
        if trainer != last:
            last, own = trainer, results[trainer]
            lines.append(f"| **{TITLES[trainer]}** {own['version']} | | |")
        if not row["judged"]:
            lines.append(f"| {row['name']} | – | not judged: see below |")
            continue
        parts = []
        for kind in ("fault", "once", "choice", "design"):
            whys: dict[str, list[str]] = {}
            for check, rule in found.items():
                if rule["is"] == kind:
                    whys.setdefault(rule["why"], []).append(f"`{check}`")
            for why, checks in whys.items():
                text = f"[{why}](#{why})" if kind in ("fault", "once") else why
                parts.append(f"{MARKS[kind]} {', '.join(checks)}: {text}")
        held = f"{len(row['passes'])} of {len(row['passes']) + len(row['failures'])}"
        lines.append(f"| {row['name'].replace('|', '&#124;')} | {held} | {'<br>'.join(parts)} |")
    return "\n".join(lines)


def left_out(results: dict[str, Any]) -> str:
    """What was not judged, and why."""
    lines = ["| trainer | function | why |", "|---|---|---|"]
    for trainer, found in results.items():
        lines += [f"| {TITLES[trainer]} | {name} | {why} |" for name, why in found["left_out"].items()]
        for row in found["rows"]:
            if not row["judged"]:
                why = row.get("refused") or "fewer than 8 checks could be evaluated"
                lines.append(f"| {TITLES[trainer]} | {row['name']} | {why.replace('|', '&#124;')} |")
    return "\n".join(lines)


def blocks(root: Path) -> dict[str, str]:
    """Block of docs/audit.md → its text."""
    results = read(root / "docs" / "evidence" / "field.json")
    rules = yaml.safe_load((root / "tools" / "field.yaml").read_text(encoding="utf-8"))
    return {"counts": counts(results, rules), "table": table(results, rules), "left_out": left_out(results)}
