"""Estimates over samples and problems: by hand, by listing, and as intervals that hold what they promise."""

from itertools import combinations

import numpy as np
import pytest

from creditgraph.lab.evaluate.estimates import estimate, majority, majority_at, pass_values, resampled_means
from creditgraph.pipeline.core.streams import Stream


def bootstrap(values, seed=0, resamples=2000, confidence=0.95):
    matrix = np.asarray(values, dtype=float).reshape(len(values), -1)
    return estimate(matrix, resampled_means(matrix, Stream(seed, "test").generator(), resamples), confidence)


def test_pass_values_equal_listing_every_subset():
    right = [True, False, True, False, False]
    for k in range(1, 6):
        subsets = list(combinations(right, k))
        expected = sum(any(s) for s in subsets) / len(subsets)
        assert pass_values([2], 5, k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_n_is_whether_any_sample_is_right():
    assert pass_values([0, 1, 5, 8], 8, 8).tolist() == [0, 1, 1, 1]
    assert pass_values([0, 1, 5, 8], 8, 1).tolist() == pytest.approx([0, 1 / 8, 5 / 8, 1])
    assert len(pass_values([], 8, 2)) == 0


def test_pass_at_k_is_unbiased():
    # Samples right with chance .3: over many draws of 6 samples the mean estimate of pass@4 is 1 − .7^4.
    draws = np.random.default_rng(1).binomial(6, 0.3, size=40_000)
    assert pass_values(draws, 6, 4).mean() == pytest.approx(1 - 0.7**4, abs=0.005)


def test_majority_by_hand():
    assert majority(["4", "4", "5"], [False, False, True]) == 0
    assert majority(["4", "5", "6"], [False, True, False]) == pytest.approx(1 / 3)  # three answers with a vote each
    assert majority([None, None, "5"], [False, False, True]) == 1  # no answer, no vote
    assert majority([], []) == 0


def test_majority_of_k_averages_over_blocks():
    answers, right = ["4", "4", "5", "5", "4", "5", "9"], [True, True, False, False, True, False, False]
    # Blocks of 3: (4, 4, 5) is right, (5, 4, 5) is wrong; the seventh sample is in no block.
    assert majority_at(answers, right, 3) == 0.5
    assert majority_at(answers, right, 7) == majority(answers, right)


def test_the_bootstrap_by_hand():
    # Two problems, 0 and 1: the mean of two draws is 0, ½ or 1 with chances ¼, ½, ¼, so every quantile below ¼ is 0.
    (result,) = bootstrap([0, 1], resamples=4000)
    assert (result.value, result.low, result.high) == (0.5, 0.0, 1.0)
    (narrow,) = bootstrap([0, 1], resamples=4000, confidence=0.4)  # from quantile .3 to .7
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    (same,) = bootstrap([1, 1, 1])
    assert (same.low, same.high) == (1, 1)


def test_the_bootstrap_against_a_plain_loop():
    values = np.array([0.1, 0.9, 0.4])
    drawn = Stream(0, "test").generator().integers(0, 3, size=(50, 3))
    expected = [np.mean([values[i] for i in row]) for row in drawn]
    actual = resampled_means(values[:, None], Stream(0, "test").generator(), 50)
    assert actual[:, 0] == pytest.approx(expected)


def test_equal_keys_give_equal_intervals_and_columns_share_their_draws():
    values = np.random.default_rng(0).random((30, 1))
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, seed=1)
    first, second = bootstrap(np.hstack([values, values]))
    assert first == second


def test_intervals_hold_the_truth_as_often_as_promised():
    """95 % intervals of 200 experiments of 100 problems each, right with chance .3. Standard error of the share: 1.5
    points."""
    hits = 0
    for experiment in range(200):
        right = np.random.default_rng(experiment).random(100) < 0.3
        (result,) = bootstrap(right, seed=experiment, resamples=1000)
        hits += result.low <= 0.3 <= result.high
    assert 0.90 <= hits / 200 <= 0.99
