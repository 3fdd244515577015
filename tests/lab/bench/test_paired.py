"""Paired differences: numbers by hand, and quantiles of a printed table."""

import math

import pytest

from creditgraph.lab.bench.paired import holm, paired, t_quantile, t_two_sided


# Two-sided 5 % and 10 % quantiles as printed in any table of Student's t.
@pytest.mark.parametrize(
    ("freedom", "five", "ten"), [(1, 12.706, 6.314), (2, 4.303, 2.920), (7, 2.365, 1.895), (9, 2.262, 1.833)]
)
def test_quantiles_of_the_table(freedom, five, ten):
    assert t_quantile(0.05, freedom) == pytest.approx(five, abs=6e-4)
    assert t_quantile(0.10, freedom) == pytest.approx(ten, abs=6e-4)


def test_one_degree_of_freedom_is_cauchy():
    assert t_two_sided(1.0, 1) == pytest.approx(0.5)
    assert t_two_sided(-1.0, 1) == pytest.approx(0.5)
    assert t_two_sided(0.0, 5) == 1.0


def test_interval_by_hand():
    # mean .2, s .1, error .1/√3 = .057735; t_.975(2) = 4.30265 → ± .24841; t_.80(2) = 1.06066 → + .06124
    result = paired([0.1, 0.2, 0.3, math.nan])
    assert (result.difference, result.pairs) == (pytest.approx(0.2), 3)
    assert (result.low, result.high) == (pytest.approx(-0.04841, abs=1e-4), pytest.approx(0.44841, abs=1e-4))
    assert result.detectable == pytest.approx(0.24841 + 0.06124, abs=1e-4)
    # for 2 degrees of freedom P(|T| ≥ t) = 1 − t/√(2 + t²), t = 3.4641
    assert result.p == pytest.approx(1 - 3.4641 / math.sqrt(2 + 12), abs=1e-4)
    assert result.text() == "+0.200 [-0.048, +0.448]"


def test_what_cannot_be_tested_shows_nothing():
    assert paired([0.5]).p == 1
    assert paired([]).text() == "–"
    assert (paired([0.0, 0.0]).p, paired([0.1, 0.1]).p) == (1, 0)


def test_holm_steps_down_and_counts_planned_tests():
    # .01 · 3, then max(.03, .03 · 2), then max(.06, .04 · 1)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.01, 0.04], tests=5) == pytest.approx([0.05, 0.16])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
