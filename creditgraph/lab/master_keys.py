"""Searches for answers that a verifier accepts for references of different value: a policy in training will find them.

Thousands of odd answers (overflow, no value, towers of powers, empty sets, digits of other scripts, nested boxes, long
digit strings, random LaTeX, the references themselves) are graded against samples of the references, and against all of
them when one accepts. An answer that is right for more than two references of different value is a master key.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from creditgraph.components.verifier.base import Item, Verdict
from creditgraph.components.verifier.math_text import quantity, words

SAMPLE = 40  # references that each answer is graded against at first
_ALLOWED = 2  # values an answer may be right for: 50% is right for 50 and for 0.5
_CHUNK = 4  # answers graded at a time
_LARGE = [
    "2^{2000}",
    "10^{1000}",
    "1000!",
    "e^{1000}",
    "10^{10^{10}}",
    "9^{9^{9^{9}}}",
    "2^{2^{2^{2^{2}}}}",
    "((10^8)!)!",
    "1e308",
    "1e309",
    "-1e309",
    "1e999999999",
    "\\sum_{k=1}^{10^9} k",
    "\\prod_{k=1}^{10^9} k",
    "\\binom{10^9}{9}",
]
_NO_VALUE = [
    *("nan", "NaN", "inf", "-inf", "\\infty", "-\\infty", "\\frac{1}{0}", "\\frac{0}{0}", "\\infty-\\infty"),
    *("\\ln 0", "\\tan 90^\\circ", "0^{-1}", "0^0", "\\lim_{x\\to 0}\\frac{1}{x}", "\\sum_{n=1}^\\infty n"),
]
_EMPTY = [
    "",
    " ",
    "\\{\\}",
    "\\emptyset",
    "()",
    "[]",
    "{}",
    "\\text{}",
    "\\boxed{}",
    "$$",
    "\\",
    "{",
    "}",
    "?",
    "*",
    ".*",
]
_WORDS = ["A or B", "A, B, C, D", "ABCD", "yes no", "yes and no", "true false", "any", "none", "None", "null", "True"]
_WORDS += [
    "all of the above",
    "the answer",
    "correct",
    "x",
    "i",
    "e",
    "0=0",
    "x=x",
    "42=42",
    "\\forall x",
    "\\mathbb{R}",
]
_PROGRAMS = [
    "print(input())",
    "import sys; sys.exit(0)",
    "raise SystemExit",
    "print(float('nan'))",
    "print(1e400)",
    "0" * 50,
]
_WRAPPERS = [
    "({0},{0})",
    "[{0},{0}]",
    "\\{{{0}\\}}",
    "x={0}",
    "\\pm {0}",
    "-{0}",
    "{0}\\text{{ cm}}",
    "{0}\\%",
    "{0}, {0}",
]
_WRAPPERS += [
    "\\sqrt{{{0}}}",
    "{0}x",
    "x^{{{0}}}",
    "\\frac{{1}}{{{0}}}",
    "\\begin{{pmatrix}}{0}\\end{{pmatrix}}",
    "|{0}|",
]
_WRAPPERS += ["\\boxed{{{0}}}", "\\text{{{0}}}", "{0} \\text{{ or }} {0}", "x>{0}", "{0}i"]
_TOKENS = [
    "0",
    "1",
    "2",
    "9",
    ".",
    ",",
    "-",
    "+",
    "^",
    "_",
    "!",
    "=",
    "<",
    ">",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "x",
    "y",
    "\\frac",
    "\\sqrt",
    "\\pi",
    "\\pm",
    "\\infty",
    "\\cup",
    "\\text",
    "%",
    "e",
    "i",
]
_SCRIPTS = ["٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "⁰¹²³⁴⁵⁶⁷⁸⁹", "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"]


@dataclass(frozen=True, kw_only=True)
class MasterKey:
    """An answer and the references of different value that it is right for."""

    response: str
    references: list[str]


@dataclass(kw_only=True)
class Search:
    """What a search did.

    Attributes:
        answers: answers graded.
        graded: pairs of answer and reference graded.
        seconds: time it took.
        complete: whether all answers were graded before the time was up.
        keys: the master keys found.
    """

    answers: int = 0
    graded: int = 0
    seconds: float = 0.0
    complete: bool = False
    keys: list[MasterKey] = field(default_factory=list)


def search_master_keys(
    verdicts: Callable[[list[Item]], Sequence[Verdict]],
    references: Sequence[Item],
    seconds: float = 60.0,
    answers: int = 3000,
    max_keys: int = 5,
    given: Sequence[str] | None = None,
) -> Search:
    """Grades odd answers against references, and stops after `seconds`, or when `max_keys` keys are found.

    Args:
        verdicts: grades items, as `VerifierComponent.verdicts` does.
        references: items whose answer and metadata are a problem's; their text is not read.
        seconds: limit of wall time; the batch that is graded then is finished.
        answers: number of answers; each is a boxed and a free response.
        max_keys: keys after which to stop.
        given: grade these answers, against all references, in place of the odd ones.
    """
    search = Search()
    started = time.monotonic()
    draw = random.Random(0)
    unique = list({(item.answer, _tests(item)): item for item in references}.values())
    judge = _Judge(verdicts, unique, search)
    stream = odd_answers([item.answer for item in unique], draw) if given is None else iter(given)
    sample_size = len(unique) if given is not None else min(SAMPLE, len(unique))
    responses = (response for answer in islice(stream, answers) for response in _responses(answer))
    while chunk := list(islice(responses, 2 * _CHUNK)):
        samples = [draw.sample(range(len(unique)), sample_size) for _ in chunk]
        pairs = [(row, response) for response, sample in zip(chunk, samples, strict=True) for row in sample]
        right = [response for (_, response), correct in zip(pairs, judge.grade(pairs), strict=True) if correct]
        for response in dict.fromkeys(right):
            values = judge.different_values(response)
            if len(values) > min(_ALLOWED, len(unique) - 1):
                search.keys.append(MasterKey(response=response, references=values))
        search.answers += len(chunk) // 2
        search.seconds = time.monotonic() - started
        if search.seconds > seconds or len(search.keys) >= max_keys:
            return search
    search.complete = True
    return search


class _Judge:
    """Grades responses against numbered references, and decides which references differ in value."""

    def __init__(
        self, verdicts: Callable[[list[Item]], Sequence[Verdict]], references: Sequence[Item], search: Search
    ) -> None:
        self._verdicts = verdicts
        self._references = references
        self._search = search

    def grade(self, pairs: Sequence[tuple[int, str]]) -> list[bool]:
        """Whether each (reference, response) is right."""
        self._search.graded += len(pairs)
        items = [replace(self._references[row], text=response) for row, response in pairs]
        return [verdict.correct for verdict in self._verdicts(items)]

    def different_values(self, response: str) -> list[str]:
        """References that a response is right for, one of each value; at most three."""
        rows = range(len(self._references))
        right = [
            row for row, correct in zip(rows, self.grade([(row, response) for row in rows]), strict=True) if correct
        ]
        chosen: list[int] = []
        for row in right:
            if all(self._differ(row, other) for other in chosen):
                chosen.append(row)
            if len(chosen) > _ALLOWED:
                break
        return [self._references[row].answer or _tests(self._references[row])[:200] for row in chosen]

    def _differ(self, one: int, other: int) -> bool:
        """Whether two references differ in value: as plain numbers or words, or because the verifier says so."""
        first, second = (self._references[row].answer for row in (one, other))
        if not first or not second:
            return _tests(self._references[one]) != _tests(self._references[other])
        values = [_plain_value(text) for text in (first, second)]
        if None not in values:
            return values[0] != values[1]
        numbers = [quantity(text) for text in (first, second)]
        if all(numbers) and len({number.value for number in numbers if number}) == 1:
            return False  # 5, 5 cm and 50 % of 10: units and percent signs are optional
        pairs = [(one, second), (other, first)]
        return not all(self.grade([(row, _responses(text)[0]) for row, text in pairs]))


def _plain_value(text: str) -> object:
    """A number without a unit, or words; None for anything else."""
    number = quantity(text)
    if number:
        return None if number.unit or number.percent else number.value
    return words(text)


def _tests(item: Item) -> str:
    tests = item.metadata.get("tests") if not item.answer else None
    return json.dumps(tests, sort_keys=True, default=str) if tests else ""


def _responses(answer: str) -> list[str]:
    """A response with the answer in a box, and one with it in the places where other verifiers read it."""
    program = answer if answer in _PROGRAMS else f"print({answer!r})"
    free = f"```python\n{program}\n```\nThe answer is {answer}\n#### {answer}"
    return [f"The answer is \\boxed{{{answer}}}.", free]


def odd_answers(references: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Answers without end: the lists above, alone and wrapped; then references, digits and random LaTeX in turn."""
    fixed = _LARGE + _NO_VALUE + _EMPTY + _WORDS + _PROGRAMS
    yield from fixed
    yield from (wrapper.format(answer) for answer in _LARGE + _NO_VALUE for wrapper in _WRAPPERS)
    boxes = ["\\boxed{" * 50 + "1" + "}" * 50, "\\boxed{" * 1000, "(" * 1000 + ")" * 1000, "{" * 500 + "1" + "}" * 500]
    yield from boxes
    yield from (digit * length for digit in "1379" for length in (20, 309, 310, 400, 4000, 5000, 20_000))
    while True:
        if references:
            yield draw.choice(references)
            yield draw.choice(_WRAPPERS).format(draw.choice(references))
            yield f"{draw.choice(references)}, {draw.choice(references)}"
        yield "".join(draw.choice(draw.choice(_SCRIPTS)) for _ in range(draw.randint(1, 4)))
        yield str(draw.randint(-1000, 1000))
        yield f"{draw.randint(2, 99)}^{{{draw.randint(100, 10_000)}}}"
        yield " ".join(draw.choice(_TOKENS) for _ in range(draw.randint(1, 12)))
        yield "".join(chr(draw.randint(32, 0x2FFF)) for _ in range(draw.randint(1, 20)))
