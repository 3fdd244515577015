"""Exact values of what math-verify read, with limits on their size: numbers, formulas, sets, matrices, relations.

Rational numbers are compared exactly and other numbers to 600 digits. A number beyond `MAX_BITS` is never computed and
equals nothing, and so does whatever is not finite. Formulas are compared at rational points, where a polynomial's value
is exact; the points follow from the pair, so that no formula can be made to agree at them. Needs sympy, and nothing of
this project.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.evalf import evalf

MAX_BITS = 1 << 15  # of an integer, of both parts of a fraction, of an exponent; about 9,800 digits
MAX_STEPS = 3000  # factors of a factorial or a binomial coefficient, terms of a sum or a product
_ZERO_BITS = 2000  # a difference that vanishes to this precision (600 digits) is 0
_LOST_BITS = 20  # sympy stops at this accuracy only where the terms agree to the whole precision
_FACTORIALS = (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.gamma)
_WHOLE = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.factorial, sympy.factorial2, sympy.binomial)
_INDICES = frozenset("ijklmnpqN")
_CONSTANTS = {"i": sympy.I, "e": sympy.E}


class NoValueError(ValueError):
    """An expression has no finite value, or one too large to be computed."""


def same_object(gold: Any, answer: Any, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether two results of math-verify are equal: both numbers or formulas, sets, matrices, relations, or tuples.

    Args:
        gold: the reference.
        answer: the answer.
        tolerance: largest difference of two numbers; formulas and members of sets are compared exactly.
    """
    gold, answer = _as_set(gold), _as_set(answer)
    try:
        if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
            return gold.shape == answer.shape and _all_same(gold.flat(), answer.flat())
        if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
            return _all_same(gold.args, answer.args)
        if isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set):
            return _same_set(gold, answer)
        if isinstance(gold, sympy.core.relational.Relational) and isinstance(answer, type(gold)):
            equation = isinstance(gold, sympy.Eq | sympy.Ne)
            return proportional(gold.lhs - gold.rhs, answer.lhs - answer.rhs, positive=not equation)
    except NoValueError:
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        return same_expression(gold, answer, tolerance)
    return False


def same_expression(gold: Any, answer: Any, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether two numbers are equal, or two formulas at all points where both are real.

    ln x² and 2 ln x are one answer, because the points where one of them is not real are left out.
    """
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols} - set(_CONSTANTS))
    if not names:
        try:
            return _vanishes(_value(gold, {}) - _value(answer, {}), tolerance)
        except NoValueError:
            return False
    compared = 0
    for point in _points(names, gold, answer):
        try:
            first, second = _value(gold, point), _value(answer, point)
        except NoValueError:
            continue
        if not gold.has(sympy.I, sympy.Symbol("i")) and not (_real(first) and _real(second)):
            continue
        if not _vanishes(first - second):
            return False
        compared += 1
    return compared >= 2


def proportional(gold: Any, answer: Any, positive: bool = False) -> bool:
    """Whether two formulas are multiples of each other by a constant other than 0, or by a positive one.

    Two equations are equal when the differences of their sides are.
    """
    names = sorted({symbol.name for symbol in gold.free_symbols} - set(_CONSTANTS))
    if names != sorted({symbol.name for symbol in answer.free_symbols} - set(_CONSTANTS)):
        return False
    pairs = []
    for point in _points(names, gold, answer):
        try:
            pairs.append((_value(gold, point), _value(answer, point)))
        except NoValueError:
            continue
    pairs = [(first, second) for first, second in pairs if not (_vanishes(first) and _vanishes(second))]
    if not pairs:
        return False
    gold_start, answer_start = pairs[0]
    if _vanishes(gold_start) or _vanishes(answer_start):
        return False
    if positive and not (gold_start / answer_start).evalf(10).is_positive:
        return False
    return all(_vanishes(first * answer_start - second * gold_start) for first, second in pairs)


def _points(names: Sequence[str], gold: Any, answer: Any) -> list[dict[str, Any]]:
    """Values for each name, drawn with the pair as the key: fractions of both signs, of one for each name.

    Where a floor, a ceiling, a factorial or (−1)^n stands there are also whole ones, and only those if all names are
    those of whole numbers (n, k, m, …), as ⌈n/2⌉ = ⌊(n+1)/2⌋ holds for them alone.
    """
    if not names:
        return [{}]
    key = hashlib.blake2b("\n".join(sorted(map(sympy.srepr, (gold, answer)))).encode()).digest()
    draw = random.Random(key)
    points = []
    whole = _has_whole(gold) or _has_whole(answer)
    if whole:
        # Neighbours, so that odd and even ones are among them, and small ones, which factorials reach.
        starts = [draw.randint(1, 6) for _ in names]
        points = [{n: sympy.Integer(s + i) for n, s in zip(names, starts, strict=True)} for i in (0, 1, 2, 5, 8)]
    if not whole or not _INDICES.issuperset(name[0] for name in names):
        signs = (1, 1, -1, 1, -1)
        points += [
            {n: sign * sympy.Rational(draw.randint(11, 97), draw.randint(13, 37)) for n in names} for sign in signs
        ]
    return points


def _has_whole(expression: Any) -> bool:
    signs = (p for p in expression.atoms(sympy.Pow) if p.base.is_negative and p.exp.free_symbols)
    return bool(expression.has(*_WHOLE)) or any(True for _ in signs)


def _value(node: Any, point: dict[str, Any]) -> Any:
    """The expression with numbers for its symbols, computed from the leaves so that no step exceeds the limits.

    Raises:
        NoValueError: a step is too large or not finite.
    """
    if node.is_Symbol:
        return point.get(node.name, _CONSTANTS.get(node.name, node))
    if isinstance(node, sympy.Float):
        return sympy.Rational(str(node))  # the digits that were written
    if isinstance(node, sympy.Sum | sympy.Product):
        return _unrolled(node, point)
    if isinstance(node, sympy.Integral | sympy.Limit | sympy.Derivative):
        done = node.doit()
        if isinstance(done, type(node)):
            raise NoValueError("sympy finds no closed form")
        return _value(done, point)
    args = [_value(arg, point) for arg in node.args]
    _check_size(node.func, args)
    value = node.func(*args) if args else node
    if value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        raise NoValueError("not finite")
    if value.is_Rational and max(int(value.p).bit_length(), int(value.q).bit_length()) > MAX_BITS:
        raise NoValueError(f"more than {MAX_BITS} bits")
    return value


def _unrolled(node: Any, point: dict[str, Any]) -> Any:
    name, low, high = (*node.limits[0], None, None)[:3] if len(node.limits) == 1 else (None, None, None)
    if low is None or high is None or low.has(sympy.oo, -sympy.oo) or high.has(sympy.oo):
        done = node.doit()  # an infinite series
        if done.has(sympy.Sum, sympy.Product):
            raise NoValueError("sympy finds no closed form")
        return _value(done, point)
    first, last = _value(low, point), _value(high, point)
    if not (first.is_Integer and last.is_Integer):  # up to n: its closed form, at the points
        done = node.doit()
        if done.has(sympy.Sum, sympy.Product):
            raise NoValueError("sympy finds no closed form")
        return _value(done, point)
    if last - first > MAX_STEPS:
        raise NoValueError(f"more than {MAX_STEPS} terms")
    terms = [_value(node.function, {**point, name.name: sympy.Integer(i)}) for i in range(int(first), int(last) + 1)]
    return (sympy.Add if isinstance(node, sympy.Sum) else sympy.Mul)(*terms)


def _check_size(func: Callable[..., Any], args: list[Any]) -> None:
    """Refuses a power, a factorial or a binomial coefficient that is too large to be computed.

    Raises:
        NoValueError: it is.
    """
    if func is sympy.exp:
        func, args = sympy.Pow, [sympy.E, *args]
    limit = 0
    cost: Any = 0
    if func is sympy.Pow:
        base, exponent = args
        limit = MAX_BITS
        cost = _bits(base) * _size(exponent)
    elif func in _FACTORIALS:
        limit = MAX_STEPS
        cost = _size(args[0])
    elif func is sympy.binomial:
        limit = MAX_STEPS
        cost = min(_size(args[1]), _size(args[0] - args[1]))
    if cost > limit:
        raise NoValueError("too large to be computed")


def _bits(number: Any) -> float:
    """log2 of a number's size, or of its larger part if it is a fraction; at least 1, because roots cost too."""
    if number.is_Rational:
        return float(max(int(number.p).bit_length(), int(number.q).bit_length()) - (abs(number) == 1))
    return max(1.0, abs(float(sympy.log(_size(number) or 1, 2).evalf(5))))


def _size(number: Any) -> Any:
    """|number| as a sympy Float, whose exponent has no limit; 0 for what is no number, such as f(2)."""
    return abs(number).evalf(5) if number.is_number else sympy.Integer(0)


def _parts(number: Any) -> list[tuple[Any, int | None]]:
    """(value, accurate bits) of the real and of the imaginary part, without those that are exactly 0."""
    try:
        real, imaginary, real_bits, imaginary_bits = evalf(number, 53, {"maxprec": _ZERO_BITS})
    except (NotImplementedError, ArithmeticError, sympy.core.evalf.PrecisionExhausted) as error:
        raise NoValueError(str(error)) from error
    return [(real, real_bits), (imaginary, imaginary_bits)]


def _real(number: Any) -> bool:
    if number.is_real:
        return True
    if not number.is_number:
        return True
    value, bits = _parts(number)[1]
    return value is None or (bits or 0) <= _LOST_BITS


def _vanishes(difference: Any, tolerance: Fraction = Fraction(0)) -> bool:
    """Whether a number is 0: exactly if it is rational, to `_ZERO_BITS` otherwise; or at most the tolerance."""
    if difference.is_Rational:
        return bool(abs(Fraction(int(difference.p), int(difference.q))) <= tolerance)
    if not difference.is_number:  # an unknown function
        return bool(sympy.expand(difference) == 0)
    if tolerance:
        return bool(abs(difference).evalf(30) <= sympy.Rational(tolerance.numerator, tolerance.denominator))
    # A part without accurate bits was lost to cancellation: the terms agree to the full precision.
    try:
        return all(value is None or (bits or 0) <= _LOST_BITS for value, bits in _parts(difference))
    except NoValueError:
        return False


def _all_same(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    return len(golds) == len(answers) and all(
        same_object(gold, answer) for gold, answer in zip(golds, answers, strict=True)
    )


def _as_set(value: Any) -> Any:
    """A condition on one letter as the set of its solutions; anything else unchanged."""
    conditions = sympy.core.relational.Relational | sympy.And | sympy.Or
    if isinstance(value, conditions) and len(value.free_symbols) == 1 and not isinstance(value, sympy.Eq):
        try:
            return value.as_set()
        except (NotImplementedError, ValueError, TypeError):
            return value
    return value


def _same_set(gold: sympy.Set, answer: sympy.Set) -> bool:
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = ((gold.start, answer.start), (gold.end, answer.end))
        return (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open) and all(
            a == b or same_expression(a, b) for a, b in ends
        )
    for kind in (sympy.FiniteSet, sympy.Union):
        if isinstance(gold, kind) and isinstance(answer, kind) and len(gold.args) == len(answer.args):
            return all(any(same_object(a, b) for b in answer.args) for a in gold.args) and all(
                any(same_object(a, b) for a in gold.args) for b in answer.args
            )
    first, second = _computed(gold), _computed(answer)
    if (type(first), type(second)) != (type(gold), type(answer)) and type(first) is type(second):
        return _same_set(first, second)
    return bool(first == second)


def _computed(part: Any) -> Any:
    """A set with its ends computed, and the unions, intersections and complements in it."""
    if isinstance(part, sympy.Expr):
        return part if part in (sympy.oo, -sympy.oo) else _value(part, {})
    if isinstance(part, sympy.Interval | sympy.FiniteSet | sympy.Union | sympy.Intersection | sympy.Complement):
        return part.func(*map(_computed, part.args))
    return part
