"""Answers read as text, numbers, quantities and lists, without computer algebra. Standard library only."""

import re
from dataclasses import dataclass
from fractions import Fraction

# Unit → (dimension, factor to the dimension's base unit).
_UNITS = {
    "mm": ("length", Fraction(1, 1000)),
    "cm": ("length", Fraction(1, 100)),
    "dm": ("length", Fraction(1, 10)),
    "m": ("length", Fraction(1)),
    "km": ("length", Fraction(1000)),
    "in": ("length", Fraction(127, 5000)),
    "ft": ("length", Fraction(381, 1250)),
    "yd": ("length", Fraction(1143, 1250)),
    "mg": ("mass", Fraction(1, 1000)),
    "g": ("mass", Fraction(1)),
    "kg": ("mass", Fraction(1000)),
    "ms": ("time", Fraction(1, 1000)),
    "s": ("time", Fraction(1)),
    "min": ("time", Fraction(60)),
    "h": ("time", Fraction(3600)),
    "ml": ("volume", Fraction(1, 1000)),
    "l": ("volume", Fraction(1)),
    "deg": ("angle", Fraction(1)),
    "dollar": ("money", Fraction(1)),
    "cent": ("money", Fraction(1, 100)),
    "mi": ("length", Fraction(201168, 125)),
    "lb": ("mass", Fraction(45359237, 100_000)),
    "oz": ("mass", Fraction(45359237, 1_600_000)),
    "day": ("time", Fraction(86_400)),
    "week": ("time", Fraction(604_800)),
    "month": ("months", Fraction(1)),
    "year": ("months", Fraction(12)),
    "gal": ("volume", Fraction(473176473, 125_000_000)),
    "rad": ("radians", Fraction(1)),
    "mph": ("speed", Fraction(1397, 3125)),
    "euro": ("euros", Fraction(1)),
    "%": ("percent", Fraction(1)),
    "km/h": ("speed", Fraction(5, 18)),
    "m/s": ("speed", Fraction(1)),
}
# A final s is dropped before a word is looked up.
_SPELLINGS = {
    "millimeter": "mm", "millimetre": "mm", "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m",
    "kilometer": "km", "kilometre": "km", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd",
    "milligram": "mg", "gram": "g", "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h",
    "hr": "h", "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml", "degree": "deg", "kmh": "km/h",
    "kph": "km/h", "mile": "mi", "pound": "lb", "lbs": "lb", "ounce": "oz", "gallon": "gal", "radian": "rad",
}  # fmt: skip
# Known as units, but never converted: a number with one equals the same number with another or with none.
_OTHER_UNITS = (
    "unit|units|square|sq|cubic|cu|people|person|students|student|ways|way|points|point|apples|balls|boys|girls|times|"
    "hz|pa|kpa|mol|ev|joules|joule|newtons|watts|watt|volts|volt|amps|ohms|rubles|yuan|pieces|bags|boxes|cups|pages|"
    "books|games|eggs|cookies"
)
_POWER_WORD = re.compile(r"^(?:(sq(?:uare)?)|cu(?:bic)?)\.? ")
# Names that are formulas although they are spelled with letters.
_FORMULA_NAME = re.compile(
    "sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|sqrt|max|min|gcd|lcm|"
    "alpha|beta|gamma|delta|theta|lambda|omega|sigma|phi|pi|inf|infty|infinity"
)
_WORDS = re.compile(r"^[^\W\d_]+(?:[ '-]+[^\W\d_]+)*[.!]?$")
# At most four digits of an exponent: 1e999999999 would be computed exactly.
_NUMBER = re.compile(r"^([-+]?)(?:(\d+(?:\.\d*)?|\.\d+))(?:[eE]([-+]?\d{1,4}))?$")
# Thousands: groups of three digits between commas in any of LaTeX's spellings. "1,23" is a list.
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\{,\}\\!|,\\!)\d{3})+(?![\d])")
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad|~|\\hspace\{[^{}]*\}|\\phantom\{[^{}]*\}")
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|limits|mathstrut|left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?(?=[^a-zA-Z]|\b)"
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|operatorname|mbox|hbox|boldsymbol|bm|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_PERCENT = re.compile(r"\\?%\s*$|\\?\s*percent\s*$|\\text\s*\{\s*(?:percent|\\?%)\s*\}\s*$")
# A word, or a \text command, with its power, after a digit, a bracket or a space.
_UNIT_AT_END = re.compile(
    r"(?:(?<=[\d}\s)])|^|(?=\s*\\(?:text|mathrm|mbox)\b))\s*"
    r"(\\(?:text|mathrm|textrm|mbox|rm)\s*\{[^{}]*\}|[a-zA-Z]+(?:[ /][a-zA-Z]+)*)"
    r"\s*(\^\s*\{?([23])\}?)?$"
)
_POWER_OF_TEN = re.compile(
    r"(?:(\d+(?:\.\d+)?|\.\d+)\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))"
)
_FRACTION = re.compile(r"(?:(\d+)\s*)?\\frac\s*\{\s*([-+]?\d+(?:\.\d+)?)\s*\}\s*\{\s*([-+]?\d+(?:\.\d+)?)\s*\}")
_SLASH_FRACTION = re.compile(r"(?:(\d+)\s+)?\(?(\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\)?")
_AND_OR = re.compile(
    r"\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
    r"|\\(?:vee|lor|wedge|land)(?![a-z])"
)
_NAME_OF_VALUE = re.compile(r"([a-zA-Z])(?:_\{?\d+\}?)?\s*(?:=|\\in(?![a-z]))\s*(?=\S)")
_FREE_FORM = 4000  # characters at the end of a response in which an answer without a box is searched
_ANSWER_IS = re.compile(r"(?:answer|result|solution)\s*(?:is|are|=|:)\s*:?\s*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[^.])\.(?:\s|$)")
_LAST_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")
_UNICODE = {
    "−": "-", "–": "-", "∞": "\\infty", "π": "\\pi", "°": "^\\circ", "×": "\\times", "·": "\\cdot", "≤": "\\le",
    "≥": "\\ge", "∪": "\\cup", "±": "\\pm", "√": "\\sqrt", "²": "^2", "³": "^3", "½": "\\frac{1}{2}",
}  # fmt: skip
# Replaced in this order: \leqslant before \leq, which it begins with.
_SYNONYMS = {
    "\\$": "$", "\\tfrac": "\\frac", "\\dfrac": "\\frac", "\\cfrac": "\\frac", "\\geqslant": "\\ge",
    "\\leqslant": "\\le", "\\geq": "\\ge", "\\leq": "\\le", "\\lbrace": "\\{", "\\rbrace": "\\}",
    "\\varnothing": "\\emptyset", "^{\\circ}": "^\\circ",
}  # fmt: skip
# Applied in this order. LaTeX needs no braces around one digit: \frac12 is \frac{1}{2}.
_REWRITES = (
    (re.compile(r"\\degrees?(?![a-z])"), r"^\\circ"),
    (re.compile(r"\\neq?(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\\langle(?![a-zA-Z])(.*)\\rangle(?![a-zA-Z])"), r"(\1)"),
    (re.compile(r"^([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)$"), r"\1\\times 10^{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\})\s*(\d)"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt\s*(\w)"), r"\\sqrt{\1}"),
    (_SPACES, " "),
)


# 0.1\overline{6}, 0.\dot{3}: the digits that do not recur, and those that do.
_RECURRING = re.compile(
    r"(?<![\d.])(\d{1,40})\.(\d{0,40})\s*\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,40})\s*\}|(\d))(?![\d\\])"
)


def _recurring(match: re.Match[str]) -> str:
    whole, fixed, *period = match.groups()
    digits = period[0] or period[1]
    numerator = int(whole + fixed + digits) - int(whole + fixed)
    return f"\\frac{{{numerator}}}{{{(10 ** len(digits) - 1) * 10 ** len(fixed)}}}"


def clean(text: str) -> str:
    """LaTeX of the same meaning in fewer spellings: no styles; one form of fractions, signs, spaces and thousands."""
    text = text.strip()
    for character, command in _UNICODE.items():
        text = text.replace(character, command)
    text = _THOUSANDS.sub(lambda m: re.sub(r"[^\d]", "", m.group()), text)
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)]
    text = _STYLE.sub("", text)
    for spelling, command in _SYNONYMS.items():
        text = text.replace(spelling, command)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _RECURRING.sub(_recurring, text)
    return " ".join(text.strip().rstrip(".;,").split())


def squeeze(text: str) -> str:
    """`clean` without spaces, text commands and braces around one character, for comparing strings."""
    text = re.sub(r"\s+", " ", _TEXT.sub(r"\1", clean(text)))
    return re.sub(r"(?<!\\)\{(\w)\}", r"\1", re.sub(r" ?([^a-zA-Z ]) ?", r"\1", text)).removeprefix("+")


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
    if whole is None and (len(letters) < 3 or _FORMULA_NAME.fullmatch(letters)) and letters != "no":
        return None
    return " ".join(letters.split())


@dataclass(frozen=True)
class Quantity:
    """An exact number with its unit and notation.

    Attributes:
        value: the number as written.
        unit: its unit in the spelling of this module, "" for none.
        percent: whether a percent sign followed.
        tolerance: largest difference of an equal number, if this is the reference: 0, or for a decimal number
            of at least six significant digits half a unit of its last digit. At most six digits count after the
            point's leading zeros.
    """

    value: Fraction
    unit: str = ""
    percent: bool = False
    tolerance: Fraction = Fraction(0)


def quantity(text: str) -> Quantity | None:
    """Reads a number, maybe with a unit, a currency or a percent sign, exactly; None for anything else.

    >>> quantity("\\\\frac{3}{4}"), quantity("1\\\\frac{1}{2}\\\\text{ cm}").value, quantity("x")
    (Quantity(value=Fraction(3, 4), unit='', percent=False, tolerance=Fraction(0, 1)), Fraction(3, 2), None)
    """
    text = clean(text)
    if len(text) > 300:
        return None
    text, unit, percent = split_unit(text)
    text = text.strip().removeprefix("+").strip()
    value = _value(text)
    return None if value is None else Quantity(value, unit, percent, _tolerance(text))


def _tolerance(text: str) -> Fraction:
    plain = _NUMBER.match(text.removeprefix("-").strip())
    whole, _, decimals = plain.group(2).partition(".") if plain else ("", "", "")
    if not plain or plain.group(3) or not decimals or len((whole + decimals).lstrip("0")) < 6:
        return Fraction(0)
    zeros = 0 if whole.strip("0") else len(decimals) - len(decimals.lstrip("0"))
    return Fraction(1, 2 * int("1" + "0" * min(len(decimals), zeros + 6)))


def split_unit(text: str) -> tuple[str, str, bool]:
    """Text without unit, currency and percent sign; the unit; whether there was a percent sign."""
    percent = _PERCENT.search(text)
    if percent:
        return text[: percent.start()], "", True
    if text.startswith(("$", "\\$", "-$", "-\\$")):
        return text.replace("\\$", "").replace("$", ""), "dollar", False
    if text.endswith("^\\circ"):
        return text.removesuffix("^\\circ"), "deg", False
    unit_at_end = _UNIT_AT_END.search(text)
    if not unit_at_end or not unit_at_end.start():
        return text, "", False
    word, _, power = unit_at_end.groups()
    bare = _TEXT.sub(r"\1", word).strip().strip(".").casefold()
    named_power = _POWER_WORD.match(bare)
    unit = _unit_name(bare[named_power.end() :]) if named_power else _unit_name(bare)
    if named_power and unit not in ("", "other"):
        return text[: unit_at_end.start()], unit + ("2" if named_power.group(1) else "3"), False
    # Letters of a formula, not in a \text command; or a remark with a number of its own.
    if not unit and (bare == word.casefold() or not bare or re.search(r"\d", bare)):
        return text, "", False
    return text[: unit_at_end.start()], unit + (power or "") if unit else "other", False


def _unit_name(bare: str) -> str:
    single = bare.removesuffix("s") if len(bare) > 2 else bare
    for name in (bare, single):
        name = _SPELLINGS.get(name, name)
        if name in _UNITS:
            return name
    return "other" if re.fullmatch(rf"(?:{_OTHER_UNITS})(?: [a-z]+)?", bare) else ""


def _value(text: str) -> Fraction | None:
    """The exact value of a decimal number, a power of ten, or a fraction, maybe mixed; None for anything else."""
    text = text.strip()
    if text.startswith("-"):
        inner = _value(text[1:].strip())
        return None if inner is None or text[1:].strip().startswith(("-", "+")) else -inner
    plain = _NUMBER.match(text)
    if plain:
        value = Fraction(plain.group(2) + ("0" if plain.group(2).endswith(".") else ""))
        return value * Fraction(10) ** int(plain.group(3) or 0)
    power = _POWER_OF_TEN.fullmatch(text)
    if power:
        return Fraction(power.group(1) or 1) * Fraction(10) ** int(power.group(2) or power.group(3))
    fraction = _FRACTION.fullmatch(text) or _SLASH_FRACTION.fullmatch(text)
    if fraction and Fraction(fraction.group(3)) != 0:
        whole, numerator, denominator = fraction.groups()
        return Fraction(whole or 0) + Fraction(numerator) / Fraction(denominator)
    return None


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Whether two quantities are equal; a unit or percent sign that only one of them has is optional."""
    factor = unit_factor(gold.unit, answer.unit)
    if factor is None:
        return False
    difference = abs(gold.value - answer.value * factor)
    if difference <= gold.tolerance or gold.percent == answer.percent:
        return difference <= gold.tolerance
    if gold.percent:
        return abs(gold.value - answer.value * 100) <= gold.tolerance
    return abs(gold.value - answer.value / 100) <= gold.tolerance


def unit_factor(gold: str, answer: str) -> Fraction | None:
    """The answer's unit as a multiple of the reference's: 1 if they are equal, or if one is none or a counted thing.

    None if they measure different things.
    """
    if not gold or not answer or gold == answer or "other" in (gold.rstrip("23"), answer.rstrip("23")):
        return Fraction(1)
    (dimension, size), (other, other_size) = (_UNITS[unit.rstrip("23")] for unit in (gold, answer))
    powers = {int(unit[-1]) if unit[-1] in "23" else 1 for unit in (gold, answer)}
    return (other_size / size) ** powers.pop() if dimension == other and len(powers) == 1 else None


def choice_letter(text: str) -> str | None:
    """The letter of an answer that names a choice, such as A, (A), \\text{(A)} or "A. 12"; None for anything else."""
    bare = re.sub(r"[{}$\\]", "", _TEXT.sub(r"\1", clean(text))).strip()
    choice = re.fullmatch(r"\(?([A-J])\)?[.:]?|\(([A-J])\)\s*.+|([A-J])\s*[).:]\s*.+", bare)
    return next((g for g in choice.groups() if g), None) if choice else None


def parts(text: str) -> list[str]:
    """The values of an answer: split at commas outside brackets, "and" and "or"; ± gives two. One value stays one.

    >>> parts("x=1 \\\\text{ or } x=2"), parts("(1,2)"), parts("\\\\pm 3")
    (['1', '2'], ['(1,2)'], ['3', '-3'])
    """
    text = _AND_OR.sub(",", clean(text))
    if len(text) > 4 and text.startswith("\\{") and text.endswith("\\}") and text.count("\\{") == 1:
        text = text[2:-2]
    values = [value for value in split(text) if value]
    names = [_NAME_OF_VALUE.match(value) for value in values]
    if len(values) > 1 and all(names) and len({m.group(1) for m in names if m}) == 1:
        values = [value[m.end() :] for value, m in zip(values, names, strict=True) if m]
    out = []
    for value in values:
        if value.count("\\pm") != 1:
            out.append(value)
            continue
        signs = ("", "-") if value.startswith("\\pm") else ("+", "-")
        out += [re.sub(r"^- +", "-", value.replace("\\pm", sign, 1).strip()) for sign in signs]
    return out


def split(text: str) -> list[str]:
    """Text cut at commas and semicolons outside brackets, stripped."""
    pieces = []
    depth, start = 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char in ",;" and depth == 0:
            pieces.append(text[start:i].strip())
            start = i + 1
    return [*pieces, text[start:].strip()]


def separated(text: str, outside: bool = False) -> str:
    """Text with a space after each comma between digits that separates values, so that it is not taken for thousands.

    Such commas are those in brackets, and with `outside` all. 1{,}000 and 1,\\!000 are numbers everywhere.

    >>> separated("(0,100)"), separated("10,100"), separated("10,100", outside=True), separated("[1{,}000,200]")
    ('(0, 100)', '10,100', '10, 100', '[1{,}000, 200]')
    """
    out, depth = [], 0
    for i, char in enumerate(text):
        bracket = char in "()[]" or (char in "{}" and text[i - 1 : i] == "\\")
        depth += ((char in "([{") - (char in ")]}")) if bracket else 0
        out.append(char)
        if char == "," and (depth > 0 or outside) and text[i - 1 : i].isdigit() and text[i + 1 : i + 2].isdigit():
            out.append(" ")
    return "".join(out)


def free_answer(text: str) -> str | None:
    """The answer of a response without a box: after the last "answer is", else the last formula, else the last number.

    >>> free_answer("So the answer is $x = 3$."), free_answer("Adding up gives 1,200 and 14."), free_answer("Unknown.")
    ('x = 3', '14', None)
    """
    tail = text[-_FREE_FORM:]
    stated = _ANSWER_IS.findall(tail)
    if stated:
        last = stated[-1].strip().strip("*").strip()
        formula = _FORMULA.search(last)
        sentence = _SENTENCE_END.split(last)[0].strip().strip("*").strip()
        return (next(g for g in formula.groups() if g) if formula else sentence).strip() or None
    formulas = _FORMULA.findall(tail)
    if formulas:
        return str(next(g for g in formulas[-1] if g)).strip()
    numbers = _LAST_NUMBER.findall(tail)
    return str(numbers[-1]) if numbers else None
