"""Compares two mathematical answers: as text, as exact numbers, as lists, then by computer algebra.

math-verify reads what is not plain text, and `math_value` compares the results. Runs in the worker processes of
`verifier.math`; needs math-verify, and of this project nothing but `math_text` and `math_value`.
"""

import re
from fractions import Fraction
from functools import cache
from typing import Any

from creditgraph.components.verifier.math_text import (
    choice_letter,
    clean,
    parts,
    quantity,
    same_quantity,
    separated,
    split,
    split_unit,
    squeeze,
    unit_factor,
    words,
)

MAX_LENGTH = 4000  # characters; longer answers are compared as text alone
MAX_PARTS = 60  # values of a list; each is compared with each


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """(equal, text_only): whether the answer equals the reference, and whether only their text could be compared.

    Raises what math-verify raises on an expression it cannot compare.
    """
    if gold.strip() == answer.strip():
        return True, False
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return _same_text(gold, answer), True
    if _TWO_NUMBERS.search(clean(answer)) and not _TWO_NUMBERS.search(clean(gold)):
        return False, True
    gold, answer = _paired(_without_commas_of_lists(gold, answer))
    if _same_text(gold, answer):
        return True, False
    quick = _without_algebra(gold, answer)
    if quick is not None:
        return quick, False
    if _unreadable(answer, gold):
        return False, True
    golds, answers = _values_of(gold), _values_of(answer)
    if (len(golds) > 1 or len(answers) > 1) and max(len(golds), len(answers)) <= MAX_PARTS:
        return _same_values(golds, answers)
    if not golds or not answers:
        return False, True
    return _same_value(golds[0], answers[0])


def _without_commas_of_lists(gold: str, answer: str) -> tuple[str, str]:
    """Both texts with spaces after commas that separate: those in brackets, and, where the other text is a list, all.

    So 10,100 is the number 10100 beside 10100, and two numbers beside 100,10.
    """
    gold, answer = separated(gold), separated(answer)
    lists = [len(parts(text)) > 1 for text in (gold, answer)]
    return separated(gold, outside=lists[1]), separated(answer, outside=lists[0])


def _paired(texts: tuple[str, str]) -> tuple[str, str]:
    """Both texts in one form where one of them is a tuple, and the other says the same as x=1, y=2; or m/n = 3/7."""
    gold, answer = (_as_tuple(text) if _brackets(clean(other)) else text for text, other in (texts, texts[::-1]))
    counts = gold.count("="), answer.count("=")
    if counts == (0, 1):
        answer = _LETTERS_EQUAL.sub("", clean(answer))
    elif counts == (1, 0):
        gold = _LETTERS_EQUAL.sub("", clean(gold))
    return gold, answer


def _as_tuple(text: str) -> str:
    """(1,2) for x = 1, y = 2; anything else unchanged."""
    named = [re.fullmatch(r"([a-z])\s*=\s*([^=]+)", value) for value in split(_AND.sub(",", clean(text)))]
    letters = [match.group(1) for match in named if match]
    if len(letters) < 2 or len(letters) < len(named) or letters != sorted(set(letters)):
        return text
    return f"({', '.join(match.group(2).strip() for match in named if match)})"


_AND = re.compile(r"\\text\s*\{\s*,?\s*and\s*\}|(?<![a-zA-Z])and(?![a-zA-Z])")
_LETTERS_EQUAL = re.compile(r"^[^\d=<>()\[\]|_^]*[a-zA-Z][^\d=<>()\[\]|_^]*=\s*(?=\S)")
# Numbers with two points, or beside each other; thousands may be set apart, and 1 1/2 is one number.
_TWO_NUMBERS = re.compile(r"\d\.\d+\.\d|(?<![\d.])(?!\d{1,3}(?: \d{3})+(?!\d))\d+ +\d+(?!\d* *[/\\])")
_PROSE = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{([^{}]*)\}|(?<![\\a-zA-Z])([a-zA-Z]{4,})(?![a-zA-Z])")


def _unreadable(answer: str, gold: str) -> bool:
    """Whether an answer is no single answer: words around a number, or a number in a union."""
    answer = clean(answer)
    bare = split_unit(answer)[0]
    if "\\cup" in answer and any(quantity(part) is not None for part in answer.split("\\cup")):
        return True
    if quantity(gold) is None:
        return False
    words_of = ["".join(match.groups("")) for match in _PROSE.finditer(_AND_OR_TEXT.sub(",", bare))]
    return any(len(word.strip()) > 3 and not _MATHEMATICS.fullmatch(word.strip()) for word in words_of)


_AND_OR_TEXT = re.compile(r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}")
_MATHEMATICS = re.compile(r"sqrt|frac|arcsin|arccos|arctan|sinh|cosh|tanh|floor|ceil|infty|theta|alpha|beta|pi", re.I)


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
    gold_words, answer_words = _phrase(gold), _phrase(answer)
    if gold_words is not None and answer_words is not None:
        return gold_words == answer_words or {gold_words, answer_words} in _SETS_IN_WORDS
    phrase_and_number = (gold_words and answer_quantity) or (answer_words and gold_quantity)
    return False if phrase_and_number else None


_OR = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-z])")


def _values_of(text: str) -> list[str]:
    """The values of an answer; the cases of "x < 1 or x > 3" are one value, a union."""
    values = parts(text)
    intervals = [_bare(value)[0] for value in values] if len(values) > 1 and _OR.search(text) else []
    return ["\\cup ".join(intervals)] if intervals and all(map(_brackets, intervals)) else values


_PHRASES = {
    "none": "no solution",
    "no solutions": "no solution",
    "no real solutions": "no real solution",
    "no real root": "no real solution",
    "no real roots": "no real solution",
    "all reals": "all real numbers",
    "any real number": "all real numbers",
    "every real number": "all real numbers",
}
_EMPTY, _REALS = "the empty set", "the real numbers"
_SETS = {squeeze(text): _EMPTY for text in ("\\emptyset", "\\{\\}")} | {
    squeeze(text): _REALS for text in ("\\mathbb{R}", "\\mathbb R", "\\R")
}
_SETS_IN_WORDS = ({_EMPTY, "no solution"}, {_EMPTY, "no real solution"}, {_REALS, "all real numbers"})


def _phrase(text: str) -> str | None:
    """An answer in words, or a set that has a name, in one spelling; None for anything else."""
    found = _SETS.get(squeeze(text)) or words(text)
    return None if found is None else _PHRASES.get(found, found)


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
    gold_name, answer_name = (_NAME.match(text) if text.count("=") <= 1 else None for text in (gold, answer))
    names = {match.group(1) for match in (gold_name, answer_name) if match}
    # x = 5 is not y = 5, and y = x is x = y; but f(x) = x² is y = x².
    both_named = bool(gold_name and answer_name) and (len(names) == 1 or any("(" in name for name in names))
    if gold.count("=") == answer.count("=") == 1 and not both_named:
        return _same_equation(gold, answer)
    gold, gold_unit, gold_base = _bare(gold)
    answer, answer_unit, answer_base = _bare(answer)
    if {gold_unit, answer_unit} in ({"deg", ""}, {"deg", "rad"}) and "\\pi" in gold + answer:
        gold, answer = (
            f"({text})\\cdot\\frac{{\\pi}}{{180}}" if unit == "deg" else text
            for text, unit in ((gold, gold_unit), (answer, answer_unit))
        )
        gold_unit = answer_unit = ""
    factor = unit_factor(gold_unit, answer_unit)
    if factor is None or (gold_base and answer_base and gold_base != answer_base):
        return False, False
    gold_brackets, answer_brackets = _brackets(gold), _brackets(answer)
    if gold_brackets != answer_brackets:
        # An interval may equal an inequality or a union, never another tuple or an expression.
        other = answer if gold_brackets else gold
        if (gold_brackets and answer_brackets) or not _RELATION_OR_SET.search(other):
            return False, False
    elif gold_brackets:
        return _same_members(gold, answer)
    return _same_mathematics(gold, answer, factor)


_RELATION_OR_SET = re.compile(r"[<>]|\\(?:[lg]e|ne|cup|cap|pm|setminus|mathbb)")


def _same_members(gold: str, answer: str) -> tuple[bool, bool]:
    """Tuples or intervals with the same brackets and number of members: equal when their members are, in order."""
    pairs = list(zip(split(gold[1:-1]), split(answer[1:-1]), strict=True))
    results = [_same_value(one, other) for one, other in pairs if one and other]
    equal = len(results) == len(pairs) and all(same for same, _ in results)
    return equal, any(text_only for _, text_only in results)


def _same_mathematics(gold: str, answer: str, factor: Fraction) -> tuple[bool, bool]:
    """Compares what math-verify reads; the answer's unit is `factor` of the reference's."""
    from sympy import Expr, Rational

    from creditgraph.components.verifier.math_value import same_object

    gold_value, answer_value = _parse(gold), _parse(answer)
    if gold_value is None or answer_value is None:
        return False, True
    if factor != 1:
        if not isinstance(answer_value, Expr):
            return False, False
        answer_value *= Rational(factor.numerator, factor.denominator)
    number = quantity(gold)
    return same_object(gold_value, answer_value, number.tolerance if number else Fraction(0)), False


def _same_equation(gold: str, answer: str) -> tuple[bool, bool]:
    """Equations are equal when the differences of their sides are multiples of each other."""
    from sympy import Expr

    from creditgraph.components.verifier.math_value import proportional

    sides = [[_parse(side) for side in text.split("=")] for text in (gold, answer)]
    if not all(isinstance(side, Expr) for pair in sides for side in pair):
        return False, True
    first, second = (left - right for left, right in sides)
    return proportional(first, second), False


_SIDE = r"([^<>]+?)"
_LESS = re.compile(rf"^(?:{_SIDE}\s*(<|\\le)\s*)?([a-zA-Z])\s*(?:(<|\\le)\s*{_SIDE})?$")
_BASE = re.compile(r"^(\d+)_\{?(\d+)\}?$")
# A name before an equals sign or "∈": x, a_1, f(x).
_NAME = re.compile(
    r"^\s*([a-zA-Z](?:_\{?\w+\}?)?(?:\([a-z]\))?|\([a-z](?:,\s*[a-z])+\))\s*(?:=|\\in(?![a-z]))\s*(?=\S)"
)
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\}?")


def _bare(text: str) -> tuple[str, str, str]:
    """Text without its unit, the base of a number and the name before an equals sign; the unit; the base.

    Degrees inside trigonometric functions become radians, and inequalities become intervals.
    """
    text = clean(text)
    if text.count("=") <= 1:
        text = _NAME.sub("", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = _DEGREES.sub(r"{(\1\\cdot\\frac{\\pi}{180})}", text)
    text, unit, percent = split_unit(text)
    base = _BASE.match(text.strip())
    if base:
        text = base.group(1)
    return _as_interval(text.strip()), "%" if percent else unit, base.group(2) if base else ""


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


def _parse(text: str) -> Any:
    """The expression, set, relation or matrix that math-verify reads; None if it only returns the text."""
    from math_verify import parse

    parsed = parse(f"\\boxed{{{text}}}", parsing_timeout=None)
    return next((value for value in parsed if not isinstance(value, str)), None)
