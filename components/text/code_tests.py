"""The tests of a programming problem, and the check of an output against a test; runs outside the sandbox."""

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from itertools import zip_longest
from typing import Any, Literal

_LANGUAGE = re.compile(r"[ \t]*([\w+#.-]*)")
_PYTHON = ("python", "python3", "py", "")
_MAX_DIGITS = 2000
MAX_TESTS = 10_000  # of one problem
MAX_CHARACTERS = 256 << 20  # of all inputs and outputs of a problem that are text
MAX_DEPTH = 100  # of lists in lists in an argument or a value


@dataclass(frozen=True, kw_only=True)
class CodeTest:
    """One test: its input and the expected output.

    Attributes:
        input: text for standard input; or, for a function, its arguments.
        output: expected standard output; or the expected value (JSON).
        public: whether the problem statement shows it.
    """

    input: Any
    output: Any
    public: bool = False


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of one problem; `function` is "" for programs that read standard input."""

    tests: tuple[CodeTest, ...]
    function: str = ""


def extract_code(text: str) -> str | None:
    """The last fenced block of Python in a response, or the last one without a language; None when there is none.

    >>> extract_code("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    lines = text.replace("\r\n", "\n").split("\n")
    fence = ""
    start = 0
    python = False
    found: tuple[int, int] | None = None
    for number, line in enumerate(lines):
        run, rest = _fence(line)
        if not fence and run and not (run[0] == "`" and "`" in rest) and number + 1 < len(lines):
            fence = run
            start = number + 1
            language = _LANGUAGE.match(rest)
            python = language is not None and language.group(1).lower() in _PYTHON
        elif fence and run.startswith(fence) and not rest.strip(" \t"):
            found = (start, number) if python else found
            fence = ""
    if fence and python:  # unclosed: to the end
        return "\n".join(lines[start:])
    return None if found is None else "".join(line + "\n" for line in lines[found[0] : found[1]])


def _fence(line: str) -> tuple[str, str]:
    """The three or more ` or ~ at the beginning of a line, "" for none, and the rest of the line."""
    line = line.lstrip(" \t")
    rest = line.lstrip(line[:1])
    run = line[: len(line) - len(rest)]
    return (run, rest) if len(run) >= 3 and run[0] in "`~" else ("", line)


def read_tests(metadata: dict[str, Any], which: Literal["all", "public", "private"]) -> CodeTests:
    """The tests in a prompt's metadata under "tests".

    Reads a list of {"input": …, "output": …, "public": bool}, or the columns {"inputs": […], "outputs": […], "fn_name":
    name} of APPS, TACO and LiveCodeBench; either may be JSON text. A function's name may also be in
    metadata["fn_name"]; its arguments are a list, or text with one JSON value per line.

    Raises:
        ValueError: there are none, they cannot be read, or they exceed a limit; the text gives the reason.
    """
    tests = metadata.get("tests")
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
    except RecursionError:
        raise ValueError(f"the prompt's tests are nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise ValueError(f"the prompt's tests are not JSON ({error})") from None
    if not tests:
        raise ValueError("the prompt has no tests")
    function = str(metadata.get("fn_name") or "")
    if isinstance(tests, dict):
        function = str(tests.get("fn_name") or function)
        tests = _rows_of(tests)
    if not isinstance(tests, list) or any(
        not isinstance(t, dict) or "input" not in t or "output" not in t for t in tests
    ):
        raise ValueError("each of the prompt's tests needs an input and an output")
    chosen = [
        CodeTest(input=t["input"], output=t["output"], public=bool(t.get("public")))
        for t in tests
        if which == "all" or bool(t.get("public")) == (which == "public")
    ]
    if not chosen:
        raise ValueError("the prompt has no tests" if which == "all" else f"the prompt has no {which} tests")
    if len(chosen) > MAX_TESTS:
        raise ValueError(f"the prompt has {len(chosen)} tests; at most {MAX_TESTS} are run")
    texts = [text for test in chosen for text in (test.input, test.output) if isinstance(text, str)]
    if (characters := sum(map(len, texts))) > MAX_CHARACTERS:
        raise ValueError(f"the prompt's tests have {characters} characters; at most {MAX_CHARACTERS} are read")
    try:
        return CodeTests(tests=tuple(_as_call(t) if function else _as_text(t) for t in chosen), function=function)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"a test of the prompt cannot be read ({error})") from None


def _rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    inputs = columns.get("inputs")
    outputs = columns.get("outputs")
    public = columns.get("public")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the prompt's tests need as many inputs as outputs")
    flags = public[: len(inputs)] if isinstance(public, list) else []
    return [{"input": i, "output": o, "public": p} for i, o, p in zip_longest(inputs, outputs, flags, fillvalue=False)]


def _as_text(test: CodeTest) -> CodeTest:
    _check_depth([test.input, test.output])
    lines = [("\n".join(map(str, part)) if isinstance(part, list) else str(part)) for part in (test.input, test.output)]
    return CodeTest(input=lines[0], output=lines[1], public=test.public)


def _as_call(test: CodeTest) -> CodeTest:
    arguments = test.input
    value = test.output
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(arguments, list):
        raise ValueError(f"arguments are a {type(arguments).__name__}, expected a list")
    _check_depth([arguments, value])
    if not (isinstance(test.input, str) and isinstance(test.output, str)):
        json.dumps([arguments, value])  # raises for what is no JSON value: a date, bytes
    return CodeTest(input=arguments, output=value, public=test.public)


def _check_depth(values: list[Any]) -> None:
    inside = values
    for _ in range(MAX_DEPTH + 1):
        nested = [value for value in inside if isinstance(value, list | tuple | dict)]
        inside = [child for value in nested for child in (value.values() if isinstance(value, dict) else value)]
        if not nested:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")


def mismatch(test: CodeTest, function: str, out: str, result: str, tolerance: float) -> str:
    """How the output of a test that ended normally differs from the expected one, "" if it agrees.

    Args:
        test: the test.
        function: name of the function that was called, "" for a program that read standard input.
        out: standard output.
        result: JSON text of the value that the function returned.
        tolerance: as for `same_output` and `same_value`.
    """
    if not function:
        return "" if same_output(out, test.output, tolerance) else f"wrong output '{out.strip()[:60]}'"
    if not result:
        return "the function was not reached"
    return "" if same_value(result, test.output, tolerance) else f"wrong value {result[:60]}"


def same_output(output: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs agree line by line; within a line as text, or as equal numbers between the spaces.

    White space at the ends of lines and empty lines at the end do not count. Only ASCII digits make numbers. The
    tolerance is for expected numbers with a decimal point or a negative exponent; others are compared exactly.

    >>> same_output("1 2.50\\n", "1 2.5", 0.0), same_output("1\\n2", "1 2", 0.0), same_output("0.3333", "0.33333", 1e-3)
    (True, False, True)
    >>> same_output("1000000006", "1000000007", 1e-6)
    False
    """
    ours, theirs = (text.rstrip().split("\n") for text in (output, expected))
    return len(ours) == len(theirs) and all(
        _same_line(a.strip(), b.strip(), tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    if line == expected:
        return True
    ours = line.split()
    theirs = expected.split()
    return len(ours) == len(theirs) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _same_number(number: str, expected: str, tolerance: float) -> bool:
    # Converting longer numbers is slow; only Python accepts 1_0 and digits of other scripts.
    if not number.isascii() or "_" in number or len(number) > _MAX_DIGITS or len(expected) > _MAX_DIGITS:
        return False
    try:
        ours = Decimal(number)
        theirs = Decimal(expected)
        if ours == theirs:
            return True
        decimal = "." in expected or "e-" in expected.lower()
        if not decimal or not ours.is_finite() or not theirs.is_finite():
            return False
        return abs(ours - theirs) <= Decimal(tolerance) * max(Decimal(1), abs(theirs))
    except DecimalException:
        return False


def same_value(text: str, expected: Any, tolerance: float) -> bool:
    """Whether the JSON text of a returned value is the expected value; lists equal tuples, true is not 1.

    The tolerance is for expected floating-point numbers.
    """
    try:
        return _same(json.loads(text), json.loads(json.dumps(expected)), tolerance)
    except (ValueError, TypeError, RecursionError):
        return False


def _same(value: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or (isinstance(expected, float) and _close(value, expected, tolerance))
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(_same(a, b, tolerance) for a, b in zip(value, expected, strict=True))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key], tolerance) for key in value)
    return bool(value == expected)


def _close(value: float, expected: float, tolerance: float) -> bool:
    try:
        return math.isfinite(value - expected) and abs(value - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:
        return False
