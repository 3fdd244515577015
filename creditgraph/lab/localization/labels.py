"""The true first error of each failure: from the embedded task's oracle, or from a file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from creditgraph.lab.localization.records import Failure
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.run.metrics import read_lines
from creditgraph.pipeline.run.recording import read_table


@dataclass
class Labels:
    """True first errors.

    Attributes:
        name: where they come from.
        step: uid → true first error, from 1 to the number of steps.
        unlabelled: why other failures have none → their number.
        out_of_range: labelled failures whose answer also named a number that is none of their steps.
        notes: sentences for the user.
    """

    name: str
    step: dict[int, int] = field(default_factory=dict)
    unlabelled: Counter[str] = field(default_factory=Counter)
    out_of_range: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, failure: Failure, step: int | None) -> None:
        """Adds a label; one that is missing or is none of the failure's steps is counted as such."""
        if step is None:
            self.unlabelled["no label"] += 1
        elif 1 <= step <= len(failure.steps):
            self.step[failure.uid] = step
        else:
            self.unlabelled["out of range"] += 1


def oracle_labels(failures: Sequence[Failure]) -> Labels | None:
    """The embedded task's own; None when a failure is of another task."""
    if any(f.oracle is None for f in failures):
        return None
    labels = Labels("oracle")
    for failure in failures:
        labels.add(failure, failure.oracle)
    return labels


def file_labels(file: Path, failures: Sequence[Failure]) -> Labels:
    """Labels from a JSONL or Parquet file with the columns `uid` and `first_error` (null: not labelled).

    Raises:
        DataError: the file cannot be read, lacks a column, labels a failure twice, or labels none of this run.
    """
    known: dict[int, int | None] = {}
    for number, row in enumerate(read_rows(file, "a failure"), 1):
        if "uid" not in row or "first_error" not in row:
            raise DataError(
                f"{file}, row {number}: has {', '.join(row) or 'nothing'}, expected uid and first_error (from 1; null "
                "without a label)."
            )
        uid = _integer(row["uid"])
        label = _integer(row["first_error"])
        if uid is None or (label is None and row["first_error"] is not None):
            raise DataError(
                f"{file}, row {number}: uid {row['uid']!r} and first_error {row['first_error']!r}, expected integers."
            )
        if known.get(uid, label) != label:
            raise DataError(f"{file}, row {number}: uid {uid} has two labels, expected one.")
        known[uid] = label
    if not known.keys() & {f.uid for f in failures}:
        raise DataError(
            f"{file}: labels {len(known)} failures, none of which this run recorded; expected the uids of its "
            "failures.jsonl."
        )
    labels = Labels(f"labels of {file.name}")
    for failure in failures:
        labels.add(failure, known.get(failure.uid))
    strangers = len(known.keys() - {f.uid for f in failures})
    if strangers:
        labels.notes.append(f"{file}: {strangers} of its {len(known)} uids are no failure of these")
    return labels


def read_rows(file: Path, row: str) -> list[dict[str, Any]]:
    """The rows of a JSONL or Parquet file, of which each is `row`; raises DataError if it cannot be read whole."""
    if not file.is_file():
        raise DataError(f"{file}: no such file; expected JSONL or Parquet, {row} per row.")
    if file.suffix == ".parquet":
        try:
            rows: list[dict[str, Any]] = read_table(file).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]}).") from None
        return rows
    rows = read_lines(file)
    lines = sum(bool(line.strip()) for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    if len(rows) < lines:
        raise DataError(f"{file}: {lines - len(rows)} of {lines} lines are no JSON object; expected {row} per line.")
    return rows


def _integer(value: Any) -> int | None:
    """An integer, also as text, because not every JSON reader keeps 64 bits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if not isinstance(value, float) or number == value else None
