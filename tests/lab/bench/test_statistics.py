"""Statistics of credit: numbers by hand."""

import math

import numpy as np
import pytest

from creditgraph.lab.bench.statistics import (
    jackknife,
    mean_sd,
    offset,
    pearson,
    ranks,
    reliability,
    share_within,
    sign_agreement,
    spearman,
)


def arr(*x):
    return np.array(x, dtype=np.float64)


def test_ranks_share_the_mean_of_their_places():
    # sorted: 1 (place 1), 2 2 2 (places 2, 3, 4 → 3), 9 (place 5)
    assert ranks(arr(2, 9, 2, 1, 2)).tolist() == [3, 5, 3, 1, 3]


def test_spearman_with_ties_by_hand():
    # x ranks 1, 2.5, 2.5, 4; y ranks 2, 1, 3.5, 3.5; both have mean 2.5.
    # Σ dx dy = (−1.5)(−.5) + 0 + 0 + 1.5·1 = 2.25; Σ dx² = 4.5; Σ dy² = .25 + 2.25 + 1 + 1 = 4.5 → .5
    assert spearman(arr(0, 1, 1, 5), arr(3, 2, 7, 7)) == pytest.approx(0.5)


def test_pearson_by_hand():
    # dx = −1, 0, 1; dy = −2, 1, 1: Σ = 3; √(2 · 6) = 3.4641
    assert pearson(arr(1, 2, 3), arr(0, 3, 3)) == pytest.approx(3 / math.sqrt(12))


def test_correlation_of_a_constant_is_not_a_number():
    assert math.isnan(pearson(arr(0.1, 0.1, 0.1), arr(1, 2, 3)))
    assert math.isnan(spearman(arr(1, 2), arr(4, 4)))
    assert math.isnan(pearson(arr(1), arr(1)))


def test_spearman_does_not_see_monotone_changes_and_pearson_does():
    x = np.random.default_rng(0).normal(size=50)
    y = x + np.random.default_rng(1).normal(size=50)
    assert spearman(np.exp(3 * x), y) == pytest.approx(spearman(x, y))
    assert abs(pearson(np.exp(3 * x), y) - pearson(x, y)) > 0.05


def test_sign_agreement_by_hand():
    # clear places: 0 (+, + agrees), 2 (−, 0 does not), 3 (−, − agrees), 4 (+, − does not); place 1 is below the bar.
    assert sign_agreement(arr(1, -1, 0, -2, -1), arr(0.3, 0.05, -0.2, -0.1, 0.5), 0.1) == 0.5
    assert math.isnan(sign_agreement(arr(1), arr(0.01), 0.1))


def test_offset_is_zero_for_scaled_truth_and_leans_with_a_constant():
    truth = arr(0.5, -0.25, -0.25)
    assert offset(7 * truth, truth) == pytest.approx(0)
    # all-ones credit: mean/rms = 1; truth has mean 0
    assert offset(arr(1, 1, 1), truth) == pytest.approx(1)
    assert math.isnan(offset(arr(0, 0, 0), truth))


def test_share_within_by_hand():
    # row 0: (2 + 1) of 4; row 1: 0 of 5; row 2: nothing
    got = share_within(arr(2, 1, 1, 5), np.array([0, 0, 0, 1]), np.array([True, True, False, False]), 3)
    assert got[:2].tolist() == [0.75, 0.0]
    assert math.isnan(got[2])


def test_reliability_by_hand():
    assert reliability(0.6) == pytest.approx(math.sqrt(1.2 / 1.6))
    assert math.isnan(reliability(-0.1))


def test_reliability_is_the_correlation_a_perfect_credit_reaches():
    rng = np.random.default_rng(3)
    true = rng.normal(size=200_000)
    a, b = (true + rng.normal(size=len(true)) for _ in range(2))
    assert reliability(pearson(a, b)) == pytest.approx(pearson(true, (a + b) / 2), abs=0.01)


def test_mean_sd_leaves_out_nan():
    mean, sd = mean_sd([1.0, math.nan, 3.0])
    assert (mean, sd) == (2.0, pytest.approx(math.sqrt(2)))
    assert math.isnan(mean_sd([])[0])
    assert math.isnan(mean_sd([1.0])[1])


def test_jackknife_of_a_mean_is_its_standard_error():
    x = arr(1, 4, 2, 8)
    left = [float(np.delete(x, i).mean()) for i in range(4)]
    assert jackknife(left) == pytest.approx(x.std(ddof=1) / 2)
    assert math.isnan(jackknife([1.0]))
