"""An audit: its targets, its checks, and its results as a table, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.pipeline.app.audit.checks import Check, Finding
from creditgraph.pipeline.app.audit.designs import WORDS
from creditgraph.pipeline.app.audit.likely import likely
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.core.errors import did_you_mean

MARKS = {"pass": "✓", "fail": "✗", "declared": "≈", "not applicable": "–"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """A check of a target with its finding and the seconds it took."""

    target: str
    check: Check
    finding: Finding
    seconds: float


def all_checks() -> tuple[Check, ...]:
    """Every check, in the order in which they run."""
    from creditgraph.pipeline.app.audit.loss import LOSS
    from creditgraph.pipeline.app.audit.records_tokens import RECORDS

    return (*of_advantages(), *LOSS, *RECORDS)


def of_advantages() -> tuple[Check, ...]:
    """The checks of a function that gives advantages."""
    from creditgraph.pipeline.app.audit.contract import CONTRACT
    from creditgraph.pipeline.app.audit.critic import CRITIC
    from creditgraph.pipeline.app.audit.gradient import GRADIENT
    from creditgraph.pipeline.app.audit.metamorphic import METAMORPHIC

    return (*CONTRACT, *METAMORPHIC, *CRITIC, *GRADIENT)


def known_names(names: Iterable[str]) -> frozenset[str]:
    """Names of checks, where a word such as "reinforce++" stands for several; raises AuditError for an unknown one."""
    known = {check.name: frozenset({check.name}) for check in all_checks()} | dict(WORDS)
    for name in names:
        if name not in known:
            raise AuditError(f"--declare {name}: no such check.{did_you_mean(name, known)}")
    return frozenset().union(*(known[name] for name in names))


def run_checks(
    target: Any,
    checks: Sequence[Check],
    declared: frozenset[str] = frozenset(),
    layers: frozenset[str] = frozenset(),
    known: Mapping[str, str] | None = None,
) -> list[Result]:
    """Runs checks on one target.

    Args:
        target: an advantage function, a loss or recorded data.
        checks: those of its kind.
        declared: names of checks whose failure is wanted, beside those that the target declares itself.
        layers: runs the checks of these layers only; empty for all.
        known: check → why its failure is known, as of a file.

    Raises:
        AuditError: the target cannot be called, or declares a check that there is not.
    """
    wanted: Mapping[str, str] = {**(known or {}), **target.declares}
    known_names(wanted)
    results = []
    for check in checks:
        if layers and check.layer not in (*layers, "contract"):
            continue
        begin = time.perf_counter()
        finding = _run(check, target)
        if finding.verdict == "fail" and (check.name in declared or check.name in wanted):
            reason = wanted.get(check.name, "declared on the command line")
            finding = dataclasses.replace(finding, verdict="declared", message=f"{finding.message} ({reason})")
        results.append(Result(target=target.name, check=check, finding=finding, seconds=time.perf_counter() - begin))
    bad = failures(results)
    fault = likely(target, [r.finding for r in bad], [r.check.name for r in bad])
    return [_told(r, fault) if fault and r in bad else r for r in results]


def _told(result: Result, fault: str) -> Result:
    return dataclasses.replace(result, finding=dataclasses.replace(result.finding, likely=fault))


def _run(check: Check, target: Any) -> Finding:
    try:
        return check.run(target)
    except AuditError:
        raise
    except Exception as error:  # a function from outside may refuse a batch in any way
        text = f"raises {type(error).__name__} on a batch of this check: {str(error).splitlines()[:1]}"
        return Finding(verdict="fail", message=text, size=1.0)


def failures(results: Iterable[Result]) -> list[Result]:
    """Those that nobody declared."""
    return [result for result in results if result.finding.verdict == "fail"]


def table(results: Sequence[Result]) -> str:
    """The results for a terminal: a line per check, counter-examples below the failures."""
    lines: list[str] = []
    width = max((len(r.check.name) for r in results), default=0)
    target = ""
    for result in results:
        if result.target != target:
            target = result.target
            lines += ["", target] if lines else [target]
            faults = dict.fromkeys(r.finding.likely for r in failures(results) if r.target == target)
            lines += [f"  likely: {fault}" for fault in faults if fault]
        finding = result.finding
        text = finding.message or result.check.title
        lines.append(f"  {MARKS[finding.verdict]} {result.check.name:{width}}  {text}")
        if finding.verdict == "fail":
            lines.append(f"    {'':{width}}  expected: {result.check.title}")
            lines += [f"    {'':{width}}  {key}: {_short(value)}" for key, value in finding.example.items()]
    counts = {v: sum(r.finding.verdict == v for r in results) for v in MARKS}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join([*lines, "", told])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 400 else text[:400] + " …"


def as_json(results: Sequence[Result]) -> str:
    """The results as JSON."""
    rows = [
        {
            "target": r.target,
            "check": r.check.name,
            "layer": r.check.layer,
            "title": r.check.title,
            "seconds": round(r.seconds, 3),
            **dataclasses.asdict(r.finding),
        }
        for r in results
    ]
    return json.dumps(_strict(rows), indent=1, allow_nan=False)


def _strict(value: Any) -> Any:
    """Numbers that JSON does not have as null."""
    if isinstance(value, Mapping):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(file: Path, results: Sequence[Result], title: str) -> None:
    """Writes a self-contained page: a table, and each counter-example drawn token by token."""
    from jinja2 import Environment

    template = (Path(__file__).parent / "audit.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rows = [(r, drawn(r.finding)) for r in results]
    text = environment.from_string(template).render(title=title, rows=rows, marks=MARKS, bad=len(failures(results)))
    file.write_text(text, encoding="utf-8")


def drawn(finding: Finding) -> list[dict[str, Any]]:
    """Rows of a counter-example for the page: what is told of each, and its tokens before and after."""
    batch = finding.example.get("batch")
    if not batch:
        return []
    before = finding.example.get("before") or finding.example.get("advantages") or finding.example.get("first") or []
    after = finding.example.get("after") or finding.example.get("second") or []
    rows = []
    for i, row in enumerate(batch):
        facts = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("turns", "tokens"))
        length = row["tokens"]
        turns = row.get("turns", [0] * length)
        rows.append(
            {
                "facts": facts,
                "before": _cells(before, i, turns, after),
                "after": _cells(after, i, turns, before),
            }
        )
    return rows


def _cells(values: Any, row: int, turns: list[int], others: Any) -> list[dict[str, Any]]:
    if len(values) <= row:
        return []
    cells = []
    for t, turn in enumerate(turns):
        value = values[row][t]
        other = others[row][t] if len(others) > row and len(others[row]) > t else value
        strength = 0.0 if value is None else min(1.0, abs(value))
        color = "46,125,50" if (value or 0) > 0 else "198,40,40"
        cells.append(
            {
                "text": "–" if value is None else f"{value:+.2f}",
                "style": f"background: rgba({color},{0.15 + 0.5 * strength:.2f})" if value else "",
                "differs": value != other,
                "observation": turn < 0,
            }
        )
    return cells
