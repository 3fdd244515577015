"""Whether two mathematical answers are equal: text, exact numbers, lists, then math-verify, and text again where that cannot read them.

Runs in the worker processes of `verifier.math`. Needs math-verify and nothing of this project but `math_text`.
"""

from __future__ import annotations

import re
from typing import Any

from components.verifier.math_text import choice_letter, clean, parts, quantity, same_quantity, split, squeeze, words

MAX_LENGTH = 4000
MAX_PARTS = 60


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """(equal, fallback): whether the answer equals the reference, and whether only their text could be compared.

    Raises what math-verify raises on an expression it cannot compare.
    """
    if gold.strip() == answer.strip() or (squeeze(gold) == squeeze(answer) and squeeze(gold)):
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


def _without_algebra(gold: str, answer: str) -> bool | None:
    """The verdict on choices, phrases and plain numbers; None where algebra is needed."""
    wanted, found = quantity(gold), quantity(answer)
    if wanted is not None and found is not None:
        return same_quantity(wanted, found)
    letter = choice_letter(gold)
    if letter is not None:
        return choice_letter(answer) == letter
    gold_words, answer_words = words(gold), words(answer)
    if gold_words is not None and answer_words is not None:
        return _singular(gold_words) == _singular(answer_words)
    if (gold_words is not None and found is not None) or (answer_words is not None and wanted is not None):
        return False
    return None


def _singular(phrase: str) -> str:
    return {"none": "no solution", "no solutions": "no solution", "no real solutions": "no real solution"}.get(
        phrase, phrase
    )


def _same_values(golds: list[str], answers: list[str]) -> tuple[bool, bool]:
    """Lists of values, in any order, none left over; a value given twice counts once."""
    fallback = False

    def covered(left: list[str], right: list[str], swap: bool) -> bool:
        nonlocal fallback
        for one in left:
            for other in right:
                same, text_only = _same_value(other, one) if swap else _same_value(one, other)
                fallback |= text_only
                if same:
                    break
            else:
                return False
        return True

    equal = covered(golds, answers, swap=False) and covered(answers, golds, swap=True)
    return equal, fallback


def _same_value(gold: str, answer: str) -> tuple[bool, bool]:
    if squeeze(gold) == squeeze(answer) and squeeze(gold):
        return True, False
    quick = _without_algebra(gold, answer)
    if quick is not None:
        return quick, False
    if gold.count("=") == answer.count("=") == 1 and not (_NAMED.match(gold) and _NAMED.match(answer)):
        return _same_equation(gold, answer)
    bare_gold, bare_answer = _bare(gold), _bare(answer)
    shape_gold, shape_answer = _brackets(bare_gold), _brackets(bare_answer)
    if shape_gold != shape_answer and (
        (shape_gold and shape_answer) or not re.search(r"[<>]|\\[lg]e|\\cup|\\pm", bare_gold + bare_answer)
    ):
        return False, False
    if shape_gold and shape_gold == shape_answer:
        return _same_members(bare_gold, bare_answer)
    read_gold, read_answer = _parse(bare_gold), _parse(bare_answer)
    if not _is_expression(read_gold) or not _is_expression(read_answer):
        return False, True
    return _verify(read_gold, read_answer), False


def _same_members(gold: str, answer: str) -> tuple[bool, bool]:
    """Tuples or intervals with the same brackets and number of members: equal when their members are, in order."""
    pairs = list(zip(split(gold[1:-1]), split(answer[1:-1]), strict=True))
    found = [_same_value(one, other) for one, other in pairs if one and other]
    return len(found) == len(pairs) and all(same for same, _ in found), any(text_only for _, text_only in found)


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


def _bare(text: str) -> str:
    """Without units, text around a formula, the base of a number, and the name before an equals sign; inequalities as intervals."""
    text = clean(text)
    text = re.sub(r"\s*\\(?:text|mathrm|textrm|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?\s*$", "", text) or text
    text = re.sub(r"^(\d+)_\{?\d+\}?$", r"\1", text)
    text = re.sub(rf"^{_NAMED.pattern[:-1]}(?:=|\\in(?![a-z]))\s*(?=\S)", "", text) if text.count("=") <= 1 else text
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\\circ\}?", r"{(\1\\cdot\\frac{\\pi}{180})}", text)
    return _as_interval(text.removesuffix("^\\circ").strip())


def _as_interval(text: str) -> str:
    """a < x ≤ b as (a,b]; anything else as it is."""
    text = re.sub(r"\\lt(?![a-z])", "<", re.sub(r"\\gt(?![a-z])", ">", text))
    if ">" in text or re.search(r"\\ge(?![a-z])", text):
        if "<" in text or re.search(r"\\le(?![a-z])", text):
            return text
        pieces = re.split(r"(>|\\ge(?![a-z]))", text)
        text = "".join({">": "<", "\\ge": "\\le "}.get(piece, piece) for piece in reversed(pieces))
    found = _LESS.match(text.strip())
    if not found or not (found.group(2) or found.group(4)):
        return text
    low, less, _, more, high = found.groups()
    left = ("[" if less == "\\le" else "(") + (low or "-\\infty").strip()
    right = (high or "\\infty").strip() + ("]" if more == "\\le" else ")")
    return f"{left},{right}" if low or high else text


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


def _is_expression(parsed: list[Any]) -> bool:
    return any(not isinstance(value, str) for value in parsed)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    if _letters(gold) != _letters(answer) and not _comparable(gold, answer):
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

    found = next((v for v in parsed if isinstance(v, sympy.Expr)), None)
    if found is None:
        return None
    constants = {"i": sympy.I, "e": sympy.E}
    return found.subs({symbol: constants[symbol.name] for symbol in found.free_symbols if symbol.name in constants})


# Points of both signs and with no symmetry, so that |x| differs from x and n! from its neighbours.
_POINTS = ("0.7310585786", "2.6651441427", "-1.3247179572", "3.3598856662", "-0.5671432904")


def _values(expression: Any, symbols: list[Any]) -> list[complex | None]:
    """The expression at five points, or once when there are no symbols; None where it has no finite value."""
    import sympy

    found: list[complex | None] = []
    for shift in range(len(_POINTS) if symbols else 1):
        point = {
            symbol: sympy.Float(_POINTS[(i + shift) % len(_POINTS)], 30) + i // len(_POINTS)
            for i, symbol in enumerate(symbols)
        }
        value = expression.subs(point).evalf(20, maxn=60)
        finite = bool(value.is_number and value.is_finite)
        try:
            found.append(complex(value) if finite else None)
        except (TypeError, OverflowError):
            found.append(None)
    return found


def _agree(first: Any, second: Any) -> bool | None:
    """Whether two expressions have the same values; None where too few points tell.

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


def _letters(parsed: list[Any]) -> set[str]:
    symbols: set[Any] = getattr(next(v for v in parsed if not isinstance(v, str)), "free_symbols", set())
    return {str(symbol) for symbol in symbols} - {"i", "e"}


def _comparable(gold: list[Any], answer: list[Any]) -> bool:
    # "x > 2" and "(2, ∞)" mean the same with other letters, and so do n!/(n-1)! and n; two formulas in other letters do
    # not.
    kinds = [type(next(v for v in parsed if not isinstance(v, str))).__mro__ for parsed in (gold, answer)]
    relations = [any(k.__name__ in ("Relational", "Set", "BooleanFunction") for k in mro) for mro in kinds]
    return any(relations) or not _letters(gold) or not _letters(answer)
