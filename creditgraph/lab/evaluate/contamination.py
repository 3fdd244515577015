"""Searches evaluation problems in training data: overlap of word n-grams.

Memory grows only with the evaluation sets, because training rows are read once and dropped.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditgraph.lab.evaluate.suite import Contamination

Gram = tuple[str, ...]

# Scripts written without spaces: every character is a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
SHORTEST = 8
"""Words of the shortest question that is searched inside longer ones; a shorter one must be equal (2005.14165)."""


def words_of(text: str) -> list[str]:
    """Normalised words: compatibility forms joined (NFKC), lower case, letters and digits only.

    >>> words_of("Let \\\\frac{1}{2} be  THE  answer.")
    ['let', 'frac', '1', '2', 'be', 'the', 'answer']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def grams_of(words: Sequence[str], n: int) -> list[Gram]:
    """Each n consecutive words; none of fewer than n words, or of no words.

    >>> grams_of(["a", "b", "c"], 2)
    [('a', 'b'), ('b', 'c')]
    """
    return list(zip(*(words[i:] for i in range(n)), strict=False))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The part of one problem that is in the training data.

    Attributes:
        share: share of its n-grams that are in the training data.
        flagged: whether that share is too large.
        words: the first such n-gram, normalised; "" without any.
        row: the first training row, from 0, with one; −1 without any.
    """

    share: float = 0.0
    flagged: bool = False
    words: str = ""
    row: int = -1


def find_overlaps(
    problems: Mapping[str, Sequence[str]], training: Iterable[str], settings: Contamination
) -> tuple[dict[str, list[Overlap]], int]:
    """(Task → overlap of each problem, number of training rows); `training` is read once, row by row."""
    shortest = min(SHORTEST, settings.n)
    words = {task: [words_of(question) for question in questions] for task, questions in problems.items()}
    grams = {task: [grams_of(w, min(settings.n, len(w))) for w in rows] for task, rows in words.items()}
    first_row = {gram: -1 for rows in grams.values() for row in rows for gram in row}  # of the training data
    sizes = sorted({min(settings.n, len(w)) for rows in words.values() for w in rows if len(w) >= shortest})
    num_rows = 0
    for question in training:
        row = words_of(question)
        # Short problems only match a question of the same length, longer ones a part of any question.
        for size in sizes if len(row) >= shortest else [len(row)]:
            first_row |= {gram: num_rows for gram in grams_of(row, size) if first_row.get(gram) == -1}
        num_rows += 1
    overlaps = {
        task: [_overlap(row, [first_row[gram] for gram in row], settings) for row in rows]
        for task, rows in grams.items()
    }
    return overlaps, num_rows


def _overlap(grams: Sequence[Gram], rows: Sequence[int], settings: Contamination) -> Overlap:
    """`rows`: the first training row with each n-gram of the problem, −1 without one."""
    present = [row for row in rows if row >= 0]
    if not present:
        return Overlap()
    share = len(present) / len(rows)
    first = next(gram for gram, row in zip(grams, rows, strict=True) if row >= 0)
    return Overlap(share=share, flagged=share > settings.share, words=" ".join(first), row=min(present))


def report_of(
    overlaps: Sequence[Overlap], ids: Sequence[str], train: str, num_rows: int, settings: Contamination
) -> dict[str, Any]:
    """The contamination report of one task as JSON values; problems without any overlap are not listed.

    Args:
        overlaps, ids: overlap and id of each problem of the task.
        train: name of the training data.
        num_rows: number of training rows.
        settings: settings of the search.
    """
    items = [
        {
            "problem": i,
            "problem_id": ids[i],
            "share": round(o.share, 6),
            "flagged": o.flagged,
            "words": o.words,
            "train_row": o.row,
        }
        for i, o in enumerate(overlaps)
        if o.share > 0
    ]
    return {
        "status": "checked",
        "train": train,
        "train_rows": num_rows,
        "n": settings.n,
        "share": settings.share,
        "problems": len(overlaps),
        "flagged": sum(o.flagged for o in overlaps),
        "overlapping": items,
    }
