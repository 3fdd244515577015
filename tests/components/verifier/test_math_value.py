"""Exact comparison and its limits."""

from fractions import Fraction

import pytest
import sympy

from creditgraph.components.verifier.math_equal import compare
from creditgraph.components.verifier.math_text import quantity, unit_factor
from creditgraph.components.verifier.math_value import proportional, same_expression, same_object
from tests.components.verifier.pairs import frozen, score

x, y, n = sympy.symbols("x y n")
HUGE = ["2^{2000}", "10^{1000}", "1000!", "e^{1000}", "10^{10^{10}}", "9^{9^{9^{9}}}", "2^{40000}", "4000!"]
REFERENCES = ["42", "1/2", "\\sqrt{2}", "-7", "\\pi", "x^2+1", "\\{1,2\\}", "3,5", "5\\text{ cm}", "Tuesday", "3+4i"]
REFERENCES += ["y=2x", "n(n+1)/2", "0.5", "50\\%", "x>2", "(1,2)", "\\infty", "0", "1.2345678"]


@pytest.mark.slow
def test_pairs_of_somebody_who_has_not_read_the_verifier():
    pairs = frozen()
    assert len(pairs) == 400
    precision, recall, _ = score(pairs, [compare(gold, answer)[0] for gold, answer, _ in pairs])
    assert precision >= 0.98
    assert recall >= 0.85


def test_points_follow_from_the_pair():
    # Zero at the five points of an earlier version, whatever the pair.
    poly = sympy.sympify("(26*x-19)*(3*x-8)*(25*x+33)*(11*x-37)*(30*x+17)")
    assert not same_expression(x**2, x**2 + poly)
    assert same_expression(x**2, sympy.expand((x + 1) ** 2 - 2 * x - 1))
    # A verdict does not depend on the order of the sides, and repeats.
    assert [same_expression(a, b) for a, b in ((n * (n + 1) / 2, sympy.binomial(n + 1, 2)),) * 2] == [True, True]
    assert not same_expression(sympy.ceiling(n / 2), sympy.floor(n / 2) + 1)
    assert same_expression(sympy.ceiling(n / 2), sympy.floor((n + 1) / 2))
    assert not same_expression(sympy.floor(x), x)


def test_huge_numbers_equal_no_other_reference():
    equal = [(gold, answer) for gold in REFERENCES for answer in HUGE if compare(gold, answer)[0]]
    assert equal == []
    # Computed up to the limit; beyond it, equal as text alone.
    assert compare("2^{2000}", "4^{1000}") == (True, False)
    assert compare("2^{40000}", "4^{20000}") == (False, False)
    assert compare("2^{40000}", " 2^{40000} ") == (True, False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2^{100}", "2^{100}-1"),
        ("2^{31}", "2^{31}-1"),
        ("20!", "20!+1"),
        ("0", "2^{-50}"),
        ("1", "1-2^{-40}"),
        ("\\frac{1}{51!}", "\\frac{1}{52!}"),
        ("\\sqrt{2^{200}+1}", "2^{100}"),
        ("\\{2^{100},\\sqrt{2}\\}", "\\{2^{100}-1,\\sqrt{2}\\}"),
    ],
)
def test_near_is_not_equal(one, other):
    assert not compare(one, other)[0]
    assert not compare(other, one)[0]


def test_what_is_not_finite_equals_nothing():
    values = ["\\frac{1}{0}", "\\infty-\\infty", "\\ln 0", "\\tan 90^\\circ", "\\frac{0}{0}"]
    for gold in [*REFERENCES, "\\infty"]:
        for value in values:
            assert compare(gold, value)[0] is False, (gold, value)
    assert not same_expression(sympy.zoo, sympy.zoo)
    assert not same_expression(sympy.nan, sympy.nan)


def test_a_tolerance_only_for_a_reference_with_six_digits_and_a_point():
    # Half a unit of the last digit: 0.5e-6 for 0.333333; nothing for integers, powers of ten and short numbers.
    texts = ["0.333333", "0.000000123456", "1.23456e-7", "123456", "3.14", "12345.5", "0.33333333"]
    tolerances = [quantity(text).tolerance for text in texts]
    half = Fraction(1, 2)
    assert tolerances == [half / 10**6, half / 10**12, 0, 0, 0, half / 10, half / 10**6]
    assert compare("0.333333", "\\frac{1}{3}")[0]
    assert not compare("\\frac{1}{3}", "0.333333")[0]
    assert compare("1.414214", "\\sqrt{2}")[0]
    assert not compare("1.414217", "\\sqrt{2}")[0]


def test_formulas_and_equations():
    assert same_expression((x - 1) * (x + 1), x**2 - 1)
    assert not same_expression(x**2, x**2 + sympy.Rational(1, 10**30))
    assert same_expression(sympy.log(x**2), 2 * sympy.log(x))
    assert not same_expression(sympy.Abs(x), x)
    assert not same_expression(x**40000, x)
    assert proportional(2 * x - 2 * y, y - x)
    assert not proportional(2 * x - 2 * y, y - x, positive=True)
    assert not proportional(x - y, x - x)
    assert same_object(sympy.Interval(0, sympy.sqrt(4, evaluate=False)), sympy.Interval(0, 2))
    assert not same_object(sympy.Interval(0, 2), sympy.Interval.open(0, 2))


def test_units_measure_something():
    assert unit_factor("m2", "cm2") == Fraction(1, 10_000)
    assert unit_factor("m2", "cm3") is None
    assert unit_factor("h", "kg") is None
    assert unit_factor("", "kg") == unit_factor("other", "kg") == 1
