"""Labelled chains of thought of others, in the format of BIG-Bench-Mistake, against a judge or a file of labels.

Fields of a line: input, steps, answer, target, mistake_index (from 0; null without a mistake), as the data's own README
(github.com/WHGTyen/BIG-Bench-Mistake) describes them. The data are not shipped.
"""

from pathlib import Path
from typing import Any

from creditgraph.lab.localization.labels import Labels, read_rows
from creditgraph.lab.localization.records import Failure
from creditgraph.lab.localization.show import share_text
from creditgraph.lab.localization.study import Share, deviation
from creditgraph.pipeline.app.text import markdown_table, visible
from creditgraph.pipeline.core.errors import DataError

FIELDS = ("input", "steps", "answer", "target", "mistake_index")


def read_traces(file: Path) -> tuple[list[Failure], int]:
    """Traces with a mistake, the line's number from 1 as uid and the labelled step as `step`; and how many have none.

    Raises:
        DataError: a line lacks a field, or its mistake_index is none of its steps.
    """
    failures: list[Failure] = []
    sound = 0
    for number, row in enumerate(read_rows(file, "a trace"), 1):
        missing = [name for name in FIELDS if name not in row]
        if missing:
            raise DataError(f"{file}, line {number}: has no {', '.join(missing)}; expected {', '.join(FIELDS)}.")
        steps, mistake = row["steps"], row["mistake_index"]
        if not isinstance(steps, list) or not all(isinstance(step, str) for step in steps):
            raise DataError(f"{file}, line {number}: expected a list of texts as steps.")
        if mistake is None:
            sound += 1
            continue
        if type(mistake) is not int or not 0 <= mistake < len(steps):
            raise DataError(
                f"{file}, line {number}: mistake_index {mistake!r}; expected 0 to {len(steps) - 1}, or null."
            )
        failures.append(
            Failure(
                uid=number,
                iteration=0,
                problem=str(row["input"]),
                answer=str(row["target"]),
                solution="",
                steps=steps,
                step=mistake + 1,
                source="file",
                oracle=None,
                suffixes=0,
                correct=0,
            )
        )
    return failures, sound


def agreement(failures: list[Failure], labels: Labels) -> dict[str, Any]:
    """How the named steps agree with the labelled ones: Shares of exact and clean (at or before), and mean distance."""
    away = [deviation(f.steps, labels.step[f.uid], f.step) for f in failures if f.uid in labels.step]
    named = [f for f in failures if f.uid in labels.step]
    return {
        "exact": Share(away.count(0), len(away)),
        "clean": Share(sum(d <= 0 for d in away), len(away)),
        "random_exact": sum(1 / len(f.steps) for f in named) / max(len(named), 1),
        "random_clean": sum(f.step / len(f.steps) for f in named) / max(len(named), 1),
    }


def agreement_table(name: str, failures: list[Failure], sound: int, labels: Labels) -> str:
    """The agreement with Wilson 95 % intervals, beside that of uniformly drawn steps."""
    result = agreement(failures, labels)
    lost = "".join(f", {count} {why}" for why, count in sorted(labels.unlabelled.items()))
    rows = []
    for kind, meaning in (("exact", "the labelled step"), ("clean", "at or before it")):
        share = result[kind]
        low, high = (share_text(end) for end in share.interval)
        random = share_text(result[f"random_{kind}"])
        rows.append([meaning, f"{share.count} of {share.total}", share_text(share.value), f"{low}–{high}", random])
    head = [f"{visible(labels.name)} names", "traces", "share", "95 %", "of random steps"]
    first = f"{visible(name)}: {len(failures)} traces with a labelled mistake{lost}; {sound} without one are left out"
    return f"{first}\n\n{markdown_table(head, rows)}"
