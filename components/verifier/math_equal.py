"""Compares two mathematical answers: as text, as exact numbers, as lists, then by computer algebra.

Expressions are compared by their values at five points, sets and relations by math-verify. Runs in the worker processes
of `verifier.math`; needs math-verify, and of this project nothing but `math_text`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from components.verifier.math_text import choice_letter, clean, parts, quantity, same_quantity, split, squeeze, words

MAX_LENGTH = 4000  # characters; longer answers are compared as text alone
MAX_PARTS = 60  # values of a list; each is compared with each


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """(equal, text_only): whether the answer equals the reference, and whether only their text could be compared.

    Raises what math-verify raises on an expression it cannot compare.
    """
    if gold.strip() == answer.strip() or _same_text(gold, answer):
        return True, False
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return False, True
    quick = _without_algebra(gold, answer)
    if quick is not None:
        return quick, False
    golds, answers = parts(gold), parts(answer)
    if (len(golds) > 1 or len(answers) > 1) and max(len(golds), len(answers)) <= MAX_PARTS:
        return _same_values(golds, answers)
    if not golds or not answers:
        return False, True
    return _same_value(golds[0], answers[0])


def _same_text(gold: str, answer: str) -> bool:
    return squeeze(gold) == squeeze(answer) != ""


def _without_algebra(gold: str, answer: str) -> bool | None:
    """Whether choices, phrases and plain numbers are equal; None where algebra is needed."""
    gold_quantity, answer_quantity = quantity(gold), quantity(answer)
    if gold_quantity is not None and answer_quantity is not None:
        return same_quantity(gold_quantity, answer_quantity)
    letter = choice_letter(gold)
    if letter is not None:
        return choice_letter(answer) == letter
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None and answer_words is not None:
        return _PHRASES.get(gold_words, gold_words) == _PHRASES.get(answer_words, answer_words)
    phrase_and_number = (gold_words and answer_quantity) or (answer_words and gold_quantity)
    return False if phrase_and_number else None


_PHRASES = {"none": "no solution", "no solutions": "no solution", "no real solutions": "no real solution"}


def _same_values(golds: list[str], answers: list[str]) -> tuple[bool, bool]:
    """Lists of values, in any order, none left over; a repeated value counts once."""
    text_only = False

    @cache
    def same(gold: str, answer: str) -> bool:
        nonlocal text_only
        equal, as_text = _same_value(gold, answer)
        text_only |= as_text
        return equal

    equal = all(any(same(gold, answer) for answer in answers) for gold in golds) and all(
        any(same(gold, answer) for gold in golds) for answer in answers
    )
    return equal, text_only


def _same_value(gold: str, answer: str) -> tuple[bool, bool]:
    if _same_text(gold, answer):
        return True, False
    quick = _without_algebra(gold, answer)
    if quick is not None:
        return quick, False
    if gold.count("=") == answer.count("=") == 1 and not (_NAMED.match(gold) and _NAMED.match(answer)):
        return _same_equation(gold, answer)
    gold, answer = _bare(gold), _bare(answer)
    gold_brackets, answer_brackets = _brackets(gold), _brackets(answer)
    if gold_brackets != answer_brackets:
        # An interval may equal an inequality or a union, never another tuple or an expression.
        if (gold_brackets and answer_brackets) or not _RELATION_OR_UNION.search(gold + answer):
            return False, False
    elif gold_brackets:
        return _same_members(gold, answer)
    gold_parsed, answer_parsed = _parse(gold), _parse(answer)
    if _read(gold_parsed) is None or _read(answer_parsed) is None:
        return False, True
    return _verify(gold_parsed, answer_parsed), False


_RELATION_OR_UNION = re.compile(r"[<>]|\\[lg]e|\\cup|\\pm")


def _same_members(gold: str, answer: str) -> tuple[bool, bool]:
    """Tuples or intervals with the same brackets and number of members: equal when their members are, in order."""
    pairs = list(zip(split(gold[1:-1]), split(answer[1:-1]), strict=True))
    results = [_same_value(one, other) for one, other in pairs if one and other]
    equal = len(results) == len(pairs) and all(same for same, _ in results)
    return equal, any(text_only for _, text_only in results)


# The name before an equals sign: x, a_1, f(x).
_NAMED = re.compile(r"[a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=")


def _same_equation(gold: str, answer: str) -> tuple[bool, bool]:
    """Equations are equal when the differences of their sides are multiples of each other."""
    sides = [[_expression(_parse(side)) for side in text.split("=")] for text in (gold, answer)]
    if any(side is None for pair in sides for side in pair):
        return False, True
    first, second = (left - right for left, right in sides)
    return first.free_symbols == second.free_symbols and second != 0 and _constant(first / second), False


_SIDE = r"([^<>]+?)"
_LESS = re.compile(rf"^(?:{_SIDE}\s*(<|\\le)\s*)?([a-zA-Z])\s*(?:(<|\\le)\s*{_SIDE})?$")
_UNIT = re.compile(r"\s*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$")
_BASE = re.compile(r"^(\d+)_\{?\d+\}?$")
_NAME = re.compile(rf"^{_NAMED.pattern[:-1]}(?:=|\\in(?![a-z]))\s*(?=\S)")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\}?")


def _bare(text: str) -> str:
    """Removes units, the base of a number and the name before an equals sign.

    Degrees become radians, and inequalities become intervals.
    """
    text = clean(text)
    text = _UNIT.sub("", text) or text
    text = _BASE.sub(r"\1", text)
    if text.count("=") <= 1:
        text = _NAME.sub("", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"{(\1\\cdot\\frac{\\pi}{180})}", text)
    return _as_interval(text.removesuffix("^\\circ").strip())


def _as_interval(text: str) -> str:
    """Rewrites a < x ≤ b as (a,b]; returns anything else unchanged."""
    text = re.sub(r"\\lt(?![a-z])", "<", re.sub(r"\\gt(?![a-z])", ">", text))
    if ">" in text or re.search(r"\\ge(?![a-z])", text):
        if "<" in text or re.search(r"\\le(?![a-z])", text):
            return text
        pieces = re.split(r"(>|\\ge(?![a-z]))", text)
        text = "".join({">": "<", "\\ge": "\\le "}.get(piece, piece) for piece in reversed(pieces))
    inequality = _LESS.match(text.strip())
    if not inequality:
        return text
    low, less, _, more, high = inequality.groups()
    if not low and not high:
        return text
    left = ("[" if less == "\\le" else "(") + (low or "-\\infty").strip()
    right = (high or "\\infty").strip() + ("]" if more == "\\le" else ")")
    return f"{left},{right}"


def _brackets(text: str) -> str:
    """The shape of a tuple or an interval, such as "(,]", "" for anything else."""
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return ""
    depth, commas = 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and i < len(text) - 1:
            return ""
        commas += char == "," and depth == 1
    return f"{text[0]}{',' * commas}{text[-1]}" if commas else ""


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return list(parse(f"\\boxed{{{text}}}", parsing_timeout=None))


def _read(parsed: list[Any]) -> Any:
    """The result of math-verify: an expression, a set, a relation or a matrix; None if it only returned the text."""
    return next((value for value in parsed if not isinstance(value, str)), None)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    gold_value, answer_value = _read(gold), _read(answer)
    if _letters(gold_value) != _letters(answer_value) and not _comparable(gold_value, answer_value):
        return False
    first, second = _expression(gold), _expression(answer)
    if first is not None and second is not None:
        agree = _agree(first, second)
        if agree is not None:
            return agree
    return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))


def _expression(parsed: list[Any]) -> Any:
    """The expression that was read, with i as the imaginary unit; None for a set, a relation or a matrix."""
    import sympy

    expression = next((value for value in parsed if isinstance(value, sympy.Expr)), None)
    if expression is None:
        return None
    constants = {"i": sympy.I, "e": sympy.E}
    return expression.subs({s: constants[s.name] for s in expression.free_symbols if s.name in constants})


# Points of both signs and with no symmetry, so that |x| differs from x and n! from its neighbours.
_POINTS = ("0.7310585786", "2.6651441427", "-1.3247179572", "3.3598856662", "-0.5671432904")


def _values(expression: Any, symbols: list[Any]) -> list[complex | None]:
    """The expression at five points, or once when there are no symbols; None where it has no finite value."""
    import sympy

    values: list[complex | None] = []
    for shift in range(len(_POINTS) if symbols else 1):
        # Each symbol has another point; beyond five symbols the points are shifted by 1, 2 …
        point = {
            symbol: sympy.Float(_POINTS[(i + shift) % len(_POINTS)], 30) + i // len(_POINTS)
            for i, symbol in enumerate(symbols)
        }
        value = expression.subs(point).evalf(20, maxn=60)
        finite = bool(value.is_number and value.is_finite)
        try:
            values.append(complex(value) if finite else None)
        except (TypeError, OverflowError):
            values.append(None)
    return values


def _agree(first: Any, second: Any) -> bool | None:
    """Whether two expressions have the same values; None if too few points can be compared.

    Points where one of them is not real are left out: ln x² and 2 ln x are one answer. Decimal constants are left to
    math-verify, which rounds them.
    """
    import sympy

    symbols: list[Any] = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols and (first.has(sympy.Float) or second.has(sympy.Float)):
        return None
    used = 0
    for a, b in zip(_values(first, symbols), _values(second, symbols), strict=True):
        if a is None or b is None or (symbols and max(abs(a.imag), abs(b.imag)) > 1e-12 and not first.has(sympy.I)):
            continue
        used += 1
        if abs(a - b) > 1e-9 * max(abs(a), abs(b), 1e-3):
            return False
    return True if used >= (2 if symbols else 1) else None


def _constant(expression: Any) -> bool:
    """Whether an expression has the same value, and not 0, at all points where it has one."""
    values = [v for v in _values(expression, sorted(expression.free_symbols, key=str)) if v is not None]
    return bool(values) and abs(values[0]) > 1e-12 and all(abs(v - values[0]) < 1e-9 * abs(values[0]) for v in values)


def _letters(value: Any) -> set[str]:
    symbols: set[Any] = getattr(value, "free_symbols", set())
    return {str(symbol) for symbol in symbols} - {"i", "e"}


def _comparable(gold: Any, answer: Any) -> bool:
    """Whether values in different letters may be equal.

    "x > 2" and "(2, ∞)" are, and so are n!/(n-1)! and n; two formulas in other letters are not.
    """
    bases = {base.__name__ for value in (gold, answer) for base in type(value).__mro__}
    return bool(bases & {"Relational", "Set", "BooleanFunction"}) or not _letters(gold) or not _letters(answer)
