"""Overlap of evaluation problems with training data."""

import weakref
from itertools import pairwise

import numpy as np
import pytest

from creditgraph.lab.evaluate.contamination import find_overlaps, report_of, words_of
from creditgraph.lab.evaluate.suite import Contamination

LONG = (
    "Find the number of ordered pairs of positive integers whose greatest common divisor is exactly twelve "
    "and whose sum is below one hundred"
)


def search(problems, training, n=13, share=0.0):
    return find_overlaps({"task": problems}, iter(training), Contamination(n=n, share=share))[0]["task"]


def test_words_are_normalised():
    assert words_of("Let $x^2 + \\frac{1}{2}$ be THE ﬁrst") == ["let", "x", "2", "frac", "1", "2", "be", "the", "first"]
    assert words_of("求 x 的值") == ["求", "x", "的", "值"]  # a script without spaces: a word per character
    assert words_of("…") == []


def test_overlap_equals_a_plain_comparison_of_sets():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abc"), size=12)) for _ in range(40)]
    problems, training = texts[:10], texts[10:]

    def grams(text):
        words = text.split()
        return [tuple(words[i : i + 8]) for i in range(len(words) - 7)]

    known = {g for text in training for g in grams(text)}
    actual = search(problems, training, n=8)
    expected = [sum(g in known for g in grams(p)) / len(grams(p)) for p in problems]
    assert [o.share for o in actual] == pytest.approx(expected)
    assert any(expected)
    assert not all(expected)
    assert [o.flagged for o in actual] == [share > 0 for share in expected]


def test_a_copied_problem_is_found_in_other_notation_and_surroundings():
    copied = "Problem 7.  " + LONG.upper().replace(" ", "  ") + "!! (Answer: an integer.)"
    other = LONG.replace("twelve", "six").replace("hundred", "thousand")
    (hit,) = search([LONG], ["something else", copied])
    assert (hit.share, hit.flagged, hit.row) == (1.0, True, 1)
    assert hit.words == " ".join(words_of(LONG)[:13])
    # With another number in its middle no 13 words in a row are left before it, but 11 after it are too few.
    (miss,) = search([LONG], [" ".join(a + " X " + b for a, b in pairwise(other.split()))])
    assert (miss.share, miss.flagged, miss.words, miss.row) == (0.0, False, "", -1)


def test_eight_words_find_what_thirteen_do_not_and_a_share_can_be_asked_for():
    part = " ".join(LONG.split()[:10])
    assert not search([LONG], [part])[0].flagged
    (result,) = search([LONG], [part], n=8)
    assert result.flagged
    assert result.share == pytest.approx(3 / (len(LONG.split()) - 7))
    assert not search([LONG], [part], n=8, share=0.5)[0].flagged


def test_short_questions():
    ten = "what is the sum of the first ten odd numbers"
    # 8 to 12 words are searched as a whole inside others.
    assert search([ten], ["tell me " + ten + " please"])[0].flagged
    four = "what is 2 2"
    assert not search([four], ["tell me what is 2 2 please"])[0].flagged  # below 8 only equality counts
    assert search([four], ["What is 2 + 2?"])[0].flagged
    assert not search(["…"], ["…"])[0].flagged  # no words at all


def test_memory_does_not_grow_with_the_training_data():
    class Text(str):
        """A string that can be watched."""

    rows = []

    def training():
        for i in range(300):
            assert sum(row() is not None for row in rows) <= 1  # at most the one before
            text = Text(f"question {i} " * 20)
            rows.append(weakref.ref(text))
            yield text
            del text

    assert find_overlaps({"task": [LONG]}, training(), Contamination())[1] == 300


def test_report_lists_overlapping_problems_only():
    settings = Contamination()
    overlaps, num_rows = find_overlaps({"task": ["unrelated words only", LONG]}, [LONG], settings)
    report = report_of(overlaps["task"], ["a", "b"], "owner/name", num_rows, settings)
    assert (report["status"], report["train_rows"], report["problems"], report["flagged"]) == ("checked", 1, 2, 1)
    assert [(i["problem"], i["problem_id"], i["train_row"]) for i in report["overlapping"]] == [(1, "b", 0)]
