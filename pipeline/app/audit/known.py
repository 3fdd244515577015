"""A file of declared failures: what a project knows of, so that only new failures end a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from creditgraph.pipeline.app.audit.audit import Result, known_names
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.run.compose.choices import load_yaml

Known = Mapping[str, Mapping[str, str]]


def read_known(path: Path) -> Known:
    """Target → check → why its failure is known, of a YAML file.

    Raises:
        AuditError: the file cannot be read, is of another form, or names a check that there is not.
    """
    try:
        held = load_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AuditError(f"--known {path}: cannot be read: {error}") from error
    if not isinstance(held, dict):
        raise AuditError(f"--known {path}: expected target: {{check: reason}}, got {type(held).__name__}.")
    out: dict[str, dict[str, str]] = {}
    for target, checks in held.items():
        if not isinstance(checks, dict | list):
            raise AuditError(f"--known {path}: {target}: expected {{check: reason}} or a list, got {checks!r}.")
        given = checks if isinstance(checks, dict) else dict.fromkeys(checks, "")
        out[str(target)] = {
            n: str(why or f"known in {path.name}") for c, why in given.items() for n in known_names([c])
        }
    return out


def of_target(known: Known, name: str) -> Mapping[str, str]:
    """The known failures of a target; those of "*" are of every target."""
    return {**known.get("*", {}), **known.get(name, {})}


def mended(known: Known, results: Sequence[Result]) -> list[str]:
    """A line for each known failure that was checked and no longer fails."""
    passing = {(r.target, r.check.name) for r in results if r.finding.verdict == "pass"}
    listed: Iterable[tuple[str, str]] = ((target, check) for target, checks in known.items() for check in checks)
    return [
        f"{target}: {check} is listed as a known failure and passes now; remove it"
        for target, check in listed
        if (target, check) in passing
    ]
