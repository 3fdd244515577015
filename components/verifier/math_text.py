"""Reading answers as text, numbers, quantities and lists, before and beside the symbolic comparison. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Factors to a unit of the same dimension, by dimension. One entry per spelling that problems use.
_UNITS: dict[str, dict[str, str]] = {
    "length": {
        "mm": "1/1000",
        "cm": "1/100",
        "dm": "1/10",
        "m": "1",
        "km": "1000",
        "in": "127/5000",
        "ft": "381/1250",
        "yd": "1143/1250",
    },
    "mass": {"mg": "1/1000", "g": "1", "kg": "1000"},
    "time": {"ms": "1/1000", "s": "1", "min": "60", "h": "3600"},
    "volume": {"ml": "1/1000", "l": "1"},
    "angle": {"deg": "1"},
    "money": {"dollar": "1", "cent": "1/100"},
    "rate": {"km/h": "5/18", "m/s": "1"},
}
_SPELLINGS = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km",
    "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "milligram": "mg", "gram": "g",
    "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "milliliter": "ml",
    "millilitre": "ml", "degree": "deg", "mph": "mph", "kmh": "km/h", "kph": "km/h",
}  # fmt: skip
_OTHER_UNITS = (
    "unit|units|square|sq|cubic|cu|mile|miles|mph|day|days|week|weeks|month|months|year|years|people|person|students|student|ways|way|"
    "points|point|apples|balls|boys|girls|times|percent|pounds|pound|lb|lbs|ounces|ounce|oz|gallons|gallon|hz|pa|kpa|mol|ev|joules|joule|"
    "newtons|watts|watt|volts|volt|amps|ohms|euros|euro|rubles|yuan|pieces|bags|boxes|cups|pages|books|games|eggs|cookies|rad|radians"
)
_FACTORS = {
    unit: (dimension, Fraction(factor)) for dimension, units in _UNITS.items() for unit, factor in units.items()
}
_WORDS = re.compile(r"^[^\W\d_]+(?:[ '-]+[^\W\d_]+)*[.!]?$")
_NUMBER = re.compile(r"^([-+]?)(?:(\d+(?:\.\d*)?|\.\d+))(?:[eE]([-+]?\d{1,4}))?$")
_DIGITS_AND_COMMAS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\{,\}\\!|,\\!)\d{3})+(?![\d])")
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "log",
    "ln",
    "exp",
    "arcsin",
    "arccos",
    "arctan",
    "sqrt",
    "max",
    "min",
    "gcd",
    "lcm",
}
_GREEK = {
    "alpha",
    "beta",
    "gamma",
    "delta",
    "theta",
    "lambda",
    "omega",
    "sigma",
    "phi",
    "pi",
    "inf",
    "infty",
    "infinity",
}
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad|~|\\hspace\{[^{}]*\}|\\phantom\{[^{}]*\}")
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|limits|mathstrut|left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?(?=[^a-zA-Z]|\b)"
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|operatorname|mbox|hbox|boldsymbol|bm|bf|rm)\s*\{([^{}]*)\}"
)


def clean(text: str) -> str:
    """LaTeX with the same meaning and less variety: no styles, one spelling of fractions, signs, spaces and thousands."""
    text = (
        text.strip()
        .replace("−", "-")
        .replace("–", "-")
        .replace("∞", "\\infty")
        .replace("π", "\\pi")
        .replace("°", "^\\circ")
    )
    text = (
        text.replace("×", "\\times")
        .replace("·", "\\cdot")
        .replace("≤", "\\le")
        .replace("≥", "\\ge")
        .replace("∪", "\\cup")
    )
    text = (
        text.replace("±", "\\pm")
        .replace("√", "\\sqrt")
        .replace("²", "^2")
        .replace("³", "^3")
        .replace("½", "\\frac{1}{2}")
    )
    text = _DIGITS_AND_COMMAS.sub(lambda m: re.sub(r"[^\d]", "", m.group()), text)
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)]
    text = (
        _STYLE.sub("", text)
        .replace("\\$", "$")
        .replace("\\tfrac", "\\frac")
        .replace("\\dfrac", "\\frac")
        .replace("\\cfrac", "\\frac")
    )
    text = (
        text.replace("\\geqslant", "\\ge")
        .replace("\\leqslant", "\\le")
        .replace("\\geq", "\\ge")
        .replace("\\leq", "\\le")
    )
    text = (
        re.sub(r"\\(?:degree|degrees)(?![a-z])", "^\\\\circ", text)
        .replace("\\lbrace", "\\{")
        .replace("\\rbrace", "\\}")
    )
    text = (
        re.sub(r"\\neq?(?![a-zA-Z])", "\\\\ne", text)
        .replace("\\varnothing", "\\emptyset")
        .replace("^{\\circ}", "^\\circ")
    )
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = _SPACES.sub(" ", text)
    return " ".join(text.strip().rstrip(".;,").split())


def squeeze(text: str) -> str:
    """`clean` without spaces, text commands and braces around one character: what two equal strings share."""
    text = re.sub(r"\s+", " ", _TEXT.sub(r"\1", clean(text)))
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", re.sub(r" ?([^a-zA-Z ]) ?", r"\1", text))


def words(text: str) -> str | None:
    """The words of an answer that is a phrase and no formula, lower case; None for anything else.

    >>> words("\\\\text{No solution}"), words("xy"), words("Tuesday."), words("\\\\sin x")
    ('no solution', None, 'tuesday', None)
    """
    text = clean(text)
    whole = _TEXT.fullmatch(text)
    bare = (whole.group(1) if whole else _TEXT.sub(r" \1 ", text)).strip()
    if not _WORDS.match(bare):
        return None
    letters = bare.rstrip(".!").casefold()
    if whole is None and (len(letters) < 3 or letters in _FUNCTIONS | _GREEK) and letters not in ("no",):
        return None
    return " ".join(letters.split())


@dataclass(frozen=True)
class Quantity:
    """An exact number with what was written around it.

    Attributes:
        value: the number as written.
        unit: its unit in the spelling of this module, "" for none.
        percent: whether a percent sign followed.
        decimal: whether it was written with a decimal point.
    """

    value: Fraction
    unit: str = ""
    percent: bool = False
    decimal: bool = False


def quantity(text: str) -> Quantity | None:
    """Reads a number, maybe with a unit, a currency or a percent sign, exactly; None for anything else.

    >>> quantity("\\\\frac{3}{4}"), quantity("1\\\\frac{1}{2}\\\\text{ cm}").value, quantity("x")
    (Quantity(value=Fraction(3, 4), unit='', percent=False, decimal=False), Fraction(3, 2), None)
    """
    text = clean(text)
    if len(text) > 300:
        return None
    text, unit, percent = _split_unit(text)
    text = text.strip().removeprefix("+").strip()
    found = _value(text)
    return None if found is None else Quantity(found, unit, percent, "." in text)


def _split_unit(text: str) -> tuple[str, str, bool]:
    """Text without unit, currency and percent sign; the unit; whether there was a percent sign."""
    percent = re.search(r"\\?%\s*$|\\?\s*percent\s*$|\\text\s*\{\s*(?:percent|\\?%)\s*\}\s*$", text)
    if percent:
        return text[: percent.start()], "", True
    if text.startswith(("$", "\\$", "-$", "-\\$")):
        return text.replace("\\$", "").replace("$", ""), "dollar", False
    if text.endswith("^\\circ"):
        return text.removesuffix("^\\circ"), "deg", False
    found = re.search(
        r"(?:(?<=[\d}\s)])|^)\s*(\\(?:text|mathrm|textrm|mbox|rm)\s*\{[^{}]*\}|[a-zA-Z]+(?:[ /][a-zA-Z]+)*)\s*(\^\s*\{?([23])\}?)?$",
        text,
    )
    if not found or not found.start():
        return text, "", False
    inner = found.group(1)
    bare = _TEXT.sub(r"\1", inner).strip().strip(".").casefold()
    unit = _unit_name(bare)
    if not unit and (bare == inner.casefold() or not bare):
        return text, "", False
    return text[: found.start()], (unit + (found.group(3) or "")) if unit else "other", False


def _unit_name(bare: str) -> str:
    single = bare.removesuffix("s") if len(bare) > 2 else bare
    for name in (bare, single):
        name = _SPELLINGS.get(name, name)
        if name in _FACTORS and (len(name) > 1 or name in ("m", "g", "s", "h", "l")):
            return name
    return "other" if re.fullmatch(rf"(?:{_OTHER_UNITS})(?: [a-z]+)?", bare) else ""


def _value(text: str) -> Fraction | None:
    text = text.replace("{", "{").strip()
    if text.startswith("-"):
        inner = _value(text[1:].strip())
        return None if inner is None or text[1:].strip().startswith(("-", "+")) else -inner
    plain = _NUMBER.match(text)
    if plain:
        value = Fraction(plain.group(2) + ("0" if plain.group(2).endswith(".") else ""))
        exponent = int(plain.group(3) or 0)
        return None if abs(exponent) > 400 else value * Fraction(10) ** exponent
    power = re.fullmatch(
        r"(?:(\d+(?:\.\d+)?|\.\d+)\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))", text
    )
    if power:
        return Fraction(power.group(1) or 1) * Fraction(10) ** int(power.group(2) or power.group(3))
    part = re.fullmatch(r"(?:(\d+)\s*)?\\frac\s*\{\s*([-+]?\d+(?:\.\d+)?)\s*\}\s*\{\s*([-+]?\d+(?:\.\d+)?)\s*\}", text)
    part = part or re.fullmatch(r"(?:(\d+)\s+)?\(?(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\)?", text)
    if part and Fraction(part.group(3)) != 0:
        return Fraction(part.group(1) or 0) + Fraction(part.group(2)) / Fraction(part.group(3))
    return None


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two quantities are equal; a unit or percent sign that only one of them has is taken as understood."""
    a, b = gold.value, answer.value
    if gold.percent != answer.percent:
        return _near(gold, a, b) or _near(gold, a / 100 if gold.percent else a, b / 100 if answer.percent else b)
    if gold.unit and answer.unit and gold.unit != answer.unit and "other" not in (gold.unit, answer.unit):
        one, other = (_FACTORS.get(u.rstrip("23")) for u in (gold.unit, answer.unit))
        powers = [int(u[-1]) if u[-1] in "23" else 1 for u in (gold.unit, answer.unit)]
        if one is None or other is None or one[0] != other[0] or powers[0] != powers[1]:
            return False
        return _near(gold, a * one[1] ** powers[0], b * other[1] ** powers[1])
    return _near(gold, a, b) if gold.decimal or answer.decimal else a == b


def _near(gold: Quantity, a: Fraction, b: Fraction) -> bool:
    # Decimal notation is compared to six decimals, as math-verify does.
    return a == b or (
        abs(a - b) < Fraction(1, 2_000_000) and (gold.decimal or b.denominator != 1) and abs(a) >= Fraction(1, 1000)
    )


def choice_letter(text: str) -> str | None:
    """The letter of an answer that names a choice, such as A, (A), \\text{(A)} or "A. 12"; None for anything else."""
    bare = re.sub(r"[{}$\\]", "", _TEXT.sub(r"\1", clean(text))).strip()
    found = re.fullmatch(r"\(?([A-J])\)?[.:]?|\(([A-J])\)\s*.+|([A-J])\s*[).:]\s*.+", bare)
    return next((g for g in found.groups() if g), None) if found else None


def parts(text: str) -> list[str]:
    """The values of an answer with several: split at commas outside brackets, "and", "or"; ± gives two values. One value stays one.

    >>> parts("x=1 \\\\text{ or } x=2"), parts("(1,2)"), parts("\\\\pm 3")
    (['1', '2'], ['(1,2)'], ['3', '-3'])
    """
    text = clean(text)
    text = re.sub(
        r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|\\(?:vee|lor|wedge|land)(?![a-z])",
        ",",
        text,
    )
    if len(text) > 4 and text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        text = text[2:-2]
    found = [part for part in split(text) if part]
    names = [re.match(r"([a-zA-Z])(?:_\{?\d+\}?)?\s*(?:=|\\in(?![a-z]))\s*(?=\S)", part) for part in found]
    if len(found) > 1 and all(names) and len({m.group(1) for m in names if m}) == 1:
        found = [part[m.end() :] for part, m in zip(found, names, strict=True) if m]
    out = []
    for part in found:
        signs = ("", "-") if part.startswith("\\pm") else ("+", "-")
        out += (
            [re.sub(r"^- +", "-", part.replace("\\pm", sign, 1).strip()) for sign in signs]
            if part.count("\\pm") == 1
            else [part]
        )
    return out


def split(text: str) -> list[str]:
    """Text cut at commas and semicolons outside brackets, stripped."""
    found, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char in ",;" and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()]


_ANSWER_IS = re.compile(r"(?:answer|result|solution)\s*(?:is|are|=|:)\s*:?\s*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_LAST_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_FREE_FORM = 4000


def free_answer(text: str) -> str | None:
    """The answer of a response without a box: after the last "answer is", else the last formula, else the last number; None for none.

    >>> free_answer("So the answer is $x = 3$."), free_answer("Adding up gives 1,200 and 14."), free_answer("I do not know")
    ('x = 3', '14', None)
    """
    tail = text[-_FREE_FORM:]
    said = _ANSWER_IS.findall(tail)
    if said:
        last = said[-1].strip().strip("*").strip()
        formula = _FORMULA.search(last)
        sentence = re.split(r"(?<=[^\d.])\.(?:\s|$)|(?<=\d)\.(?:\s|$)", last)[0].strip().strip("*").strip()
        return (next(g for g in formula.groups() if g) if formula else sentence).strip() or None
    formulas = _FORMULA.findall(tail)
    if formulas:
        return str(next(g for g in formulas[-1] if g)).strip()
    numbers = _LAST_NUMBER.findall(tail)
    return str(numbers[-1]) if numbers else None
