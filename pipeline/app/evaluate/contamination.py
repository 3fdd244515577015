"""Searches evaluation problems in training data: overlap of word n-grams, by 64-bit hashes.

Memory grows only with the evaluation sets, because training rows are read once and dropped. A hash collision can flag a
problem by mistake, with odds of about (n-grams of the evaluation sets) × (n-grams of the training data) / 2^64.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditgraph.pipeline.app.evaluate.suite import Contamination
from creditgraph.pipeline.core.streams import mix64

Words = NDArray[np.uint64]

# Scripts written without spaces: every character is a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers of it never vanish
SHORTEST = 8
"""Words of the shortest question that is searched inside longer ones; a shorter one must be equal (2005.14165)."""


def words_of(text: str) -> list[str]:
    """Normalised words: compatibility forms joined (NFKC), lower case, letters and digits only.

    >>> words_of("Let \\\\frac{1}{2} be  THE  answer.")
    ['let', 'frac', '1', '2', 'be', 'the', 'answer']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hashes_of(words: Sequence[str]) -> Words:
    """uint64 [W], one per word."""
    return np.array([_word_hash(w) for w in words], dtype=np.uint64)


def gram_hashes(words: Words, n: int) -> Words:
    """uint64 [W − n + 1]: a hash of each n consecutive words; n is part of it, so that lengths never mix."""
    if len(words) < n or n < 1:
        return np.zeros(0, dtype=np.uint64)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(n, _MULTIPLIER, dtype=np.uint64))
        sums = np.lib.stride_tricks.sliding_window_view(words, n) @ powers + np.uint64(n)
        return mix64(np.asarray(sums, dtype=np.uint64))


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
    grams = {task: [gram_hashes(hashes_of(w), min(settings.n, len(w))) for w in rows] for task, rows in words.items()}
    known = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *(g for rows in grams.values() for g in rows)]))
    first_row = np.full(len(known), -1, dtype=np.int64)
    sizes = sorted({min(settings.n, len(w)) for rows in words.values() for w in rows if len(w) >= shortest})
    num_rows = 0
    for question in training:
        hashes = hashes_of(words_of(question))
        # Short problems only match a question of the same length, longer ones a part of any question.
        for size in sizes if len(hashes) >= shortest else [len(hashes)]:
            sought = gram_hashes(hashes, size)
            if len(known) and len(sought):
                place = np.minimum(np.searchsorted(known, sought), len(known) - 1)
                hits = place[known[place] == sought]
                first_row[hits[first_row[hits] < 0]] = num_rows
        num_rows += 1
    overlaps = {
        task: [
            _overlap(words[task][i], first_row[np.searchsorted(known, g)], settings) for i, g in enumerate(grams[task])
        ]
        for task in problems
    }
    return overlaps, num_rows


def _overlap(words: list[str], rows: NDArray[np.int64], settings: Contamination) -> Overlap:
    """`rows` [n-grams]: the first training row with each n-gram of the problem, −1 without one."""
    present = rows >= 0
    if not present.any():
        return Overlap()
    share = float(present.mean())
    first = int(present.argmax())
    return Overlap(
        share=share,
        flagged=share > settings.share,
        words=" ".join(words[first : first + settings.n]),
        row=int(rows[present].min()),
    )


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
