"""Whether evaluation problems stand in training data: overlap of word n-grams, by 64-bit hashes.

Memory grows with the evaluation sets alone, for training rows are read once and forgotten. A hash collision can flag a
problem by mistake, with odds of about (n-grams of the evaluation sets) × (n-grams of the training data) / 2^64.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.app.evaluate.suite import Contamination
from pipeline.core.streams import mix64

Words = NDArray[np.uint64]

# Scripts written without spaces: every character is a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that powers of it never vanish
SHORTEST = 8
"""Words of the shortest question that is looked for inside longer ones; below, a question must be equal as a whole (2005.14165)."""


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
    """uint64 [W − n + 1]: a hash of each n consecutive words; n is part of it."""
    if len(words) < n or n < 1:
        return np.zeros(0, dtype=np.uint64)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(n, _MULTIPLIER, dtype=np.uint64))
        sums = np.lib.stride_tricks.sliding_window_view(words, n) @ powers + np.uint64(n)
        return mix64(np.asarray(sums, dtype=np.uint64))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What was found of one problem.

    Attributes:
        share: of its n-grams that are in the training data.
        flagged: whether that is too much.
        words: the first n-gram found, normalised; "" when there is none.
        row: the first training row, from 0, that holds one; −1 when there is none.
    """

    share: float
    flagged: bool
    words: str = ""
    row: int = -1


@dataclass
class Search:
    """Looks for problems in training questions: `add` the problems, `scan` the training data once, read `overlaps`.

    Attributes:
        settings: n and the share that flags.
        scanned: training rows read.
    """

    settings: Contamination
    scanned: int = 0
    _words: dict[str, list[list[str]]] = field(default_factory=dict)
    _grams: list[tuple[int, bool, Words]] = field(default_factory=list)

    def add(self, task: str, questions: Sequence[str]) -> None:
        """The problems of one task."""
        self._words[task] = [words_of(q) for q in questions]
        for words in self._words[task]:
            self._grams.append(self._sought(words))

    def _sought(self, words: list[str]) -> tuple[int, bool, Words]:
        size = min(self.settings.n, len(words))
        whole = size < min(SHORTEST, self.settings.n)  # too short to be looked for inside other texts
        return size, whole, gram_hashes(hashes_of(words), size)

    def scan(self, questions: Iterable[str]) -> None:
        """Reads the training questions."""
        inside, whole = self._index(False), self._index(True)
        sizes = sorted({size for size, is_whole, grams in self._grams if not is_whole and len(grams)})
        for row, question in enumerate(questions):
            words = hashes_of(words_of(question))
            for size in sizes:
                _mark(inside, gram_hashes(words, size), row)
            if len(whole[0]):
                _mark(whole, gram_hashes(words, len(words)), row)
            self.scanned += 1
        self._found = {False: inside, True: whole}

    def _index(self, whole: bool) -> tuple[Words, NDArray[np.int64]]:
        """Sorted distinct hashes, and for each the first training row that holds it (−1: none yet)."""
        grams = [g for _, is_whole, g in self._grams if is_whole == whole]
        distinct = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *grams]))
        return distinct, np.full(len(distinct), -1, dtype=np.int64)

    def overlaps(self) -> dict[str, list[Overlap]]:
        """Task → what was found of each problem."""
        out: dict[str, list[Overlap]] = {}
        number = 0
        for task, problems in self._words.items():
            out[task] = []
            for words in problems:
                out[task].append(self._overlap(words, *self._grams[number]))
                number += 1
        return out

    def _overlap(self, words: list[str], size: int, whole: bool, grams: Words) -> Overlap:
        hashes, rows = self._found[whole]
        if not len(grams):
            return Overlap(share=0.0, flagged=False)
        found = rows[np.searchsorted(hashes, grams)]
        share = float((found >= 0).mean())
        if share == 0:
            return Overlap(share=0.0, flagged=False)
        first = int((found >= 0).argmax())
        row = int(found[found >= 0].min())
        return Overlap(
            share=share, flagged=share > self.settings.share, words=" ".join(words[first : first + size]), row=row
        )


def _mark(index: tuple[Words, NDArray[np.int64]], grams: Words, row: int) -> None:
    hashes, rows = index
    if not len(grams) or not len(hashes):
        return
    place = np.minimum(np.searchsorted(hashes, grams), len(hashes) - 1)
    hit = place[hashes[place] == grams]
    rows[hit[rows[hit] < 0]] = row


def report_of(search: Search, train: str, found: Sequence[Overlap], ids: Sequence[str]) -> dict[str, Any]:
    """The contamination report of one task as JSON values; problems without any overlap are not listed.

    Args:
        search: after its scan.
        train: what the training data is called.
        found: of each problem of the task.
        ids: problem ids.
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
        for i, o in enumerate(found)
        if o.share > 0
    ]
    return {
        "status": "checked",
        "train": train,
        "train_rows": search.scanned,
        "n": search.settings.n,
        "share": search.settings.share,
        "problems": len(found),
        "flagged": sum(o.flagged for o in found),
        "overlapping": items,
    }
