"""Shares, deviations and intervals: counts and numbers by hand."""

import math

import pytest
from failures_by_hand import failure

from creditgraph.lab.localization.study import Z95, bin_names, deviation, study, wilson

# Per failure of 6 steps: localised step, true first error, correct suffixes of 4.
ROWS = [(3, 3, 4), (3, 3, 1), (2, 3, 2), (1, 6, 0), (5, 3, 0), (6, 1, 1)]
FAILURES = [failure(i, step=step, suffixes=4, correct=correct) for i, (step, _, correct) in enumerate(ROWS)]
TRUTH = {i: first for i, (_, first, _) in enumerate(ROWS)}


def by_name(result):
    return {c.name: c for c in result.corrections}


def test_wilson_by_hand():
    # 5 of 10: (.5 + .19207 ± 1.96·√(.025 + .0096037))/1.38415 = .5 ± .26341; 0 of 10: z²/10/(1 + z²/10) = .27753.
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
    assert all(math.isnan(end) for end in wilson(0, 0))


@pytest.mark.parametrize(("count", "total"), [(1, 3), (7, 9), (163, 1000)])
def test_an_end_of_wilsons_interval_is_z_standard_errors_of_itself_from_the_share(count, total):
    for end in wilson(count, total):
        assert abs(count / total - end) == pytest.approx(Z95 * math.sqrt(end * (1 - end) / total))


def test_shares_and_deviations():
    result = study(FAILURES, TRUTH)  # deviations 0, 0, −1, −5, +2, +5
    assert (result.clean.count, result.clean.total) == (4, 6)
    assert (result.exact.count, result.exact.total) == (2, 6)
    assert result.deviations == {-5: 1, -1: 1, 0: 2, 2: 1, 5: 1}
    # A uniform step of 6 is clean with probability (true first error)/6, exact with 1/6.
    assert result.random_clean == pytest.approx((3 + 3 + 3 + 6 + 3 + 1) / 36)
    assert result.random_exact == pytest.approx(1 / 6)


def test_correction_by_kind_and_by_deviation():
    result = by_name(study(FAILURES, TRUTH))
    assert bin_names() == ["≤ −4", "−3", "−2", "−1", "0", "+1", "+2", "+3", "≥ +4"]
    suffixes = {name: (c.suffixes.count, c.suffixes.total) for name, c in result.items() if c.failures}
    assert suffixes == {
        "clean": (7, 16),
        "erroneous": (1, 8),
        "≤ −4": (0, 4),
        "−1": (2, 4),
        "0": (5, 8),
        "+2": (0, 4),
        "≥ +4": (1, 4),
    }
    corrected = {name: (c.corrected.count, c.corrected.total) for name, c in result.items()}
    assert (corrected["clean"], corrected["erroneous"], corrected["0"], corrected["+1"]) == (
        (3, 4),
        (1, 2),
        (2, 2),
        (0, 0),
    )
    assert math.isnan(result["+1"].suffixes.value)


def test_failures_without_a_label_or_without_a_suffix_do_not_count():
    bare = failure(9, step=3)
    result = study([*FAILURES, bare], {0: 3, 9: 3})
    assert result.clean.total == 2
    zero = by_name(result)["0"]
    assert (zero.failures, zero.suffixes.total, zero.corrected.total) == (2, 4, 1)
    assert math.isnan(study(FAILURES, {}).clean.value)


def test_short_steps_do_not_count_in_a_deviation():
    steps = ["we add two and three", "so", "that makes five in all", "therefore seven </thought>"]
    assert [deviation(steps, step, 2) for step in (1, 2, 3, 4)] == [-1, 0, 1, 2]
    # Of five words and more: step 1 and step 3. The stop string is no word.
    assert [deviation(steps, step, 2, 5) for step in (1, 2, 3, 4)] == [-1, 0, 0, 1]
    assert deviation(steps, 2, 4, 5) == -deviation(steps, 4, 2, 5)
    short = failure(1, step=3, suffixes=0)
    assert study([short], {1: 1}, min_words=50).exact.count == 1
