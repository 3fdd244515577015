"""What the tests of a programming problem are, and whether an output passes one. Runs outside the sandbox."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal, DecimalException
from itertools import zip_longest
from typing import Any, Literal

_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_PYTHON = ("python", "python3", "py", "")


@dataclass(frozen=True, kw_only=True)
class CodeTest:
    """One test: what goes in and what must come out.

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
    blocks = [m.group(3) for m in _FENCE.finditer(text.replace("\r\n", "\n")) if m.group(2).lower() in _PYTHON]
    return blocks[-1] if blocks else None


def read_tests(metadata: dict[str, Any], which: Literal["all", "public", "private"]) -> CodeTests | str:
    """The tests in a prompt's metadata under "tests", or a sentence saying why there are none.

    Takes a list of {"input": …, "output": …, "public": bool}, or the columns {"inputs": […], "outputs": […], "fn_name":
    name} of APPS, TACO and LiveCodeBench; either may be JSON text. A function's name may also stand in
    metadata["fn_name"]; its arguments are a list, or text with one JSON value per line.
    """
    found = metadata.get("tests")
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError as error:
        return f"the prompt's tests are not JSON ({error})"
    if not found:
        return "the prompt has no tests"
    function = str(metadata.get("fn_name") or "")
    if isinstance(found, dict):
        inputs, outputs, shown = found.get("inputs"), found.get("outputs"), found.get("public")
        function = str(found.get("fn_name") or function)
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            return "the prompt's tests need as many inputs as outputs"
        flags = shown if isinstance(shown, list) else [False] * len(inputs)
        found = [
            {"input": i, "output": o, "public": p}
            for i, o, p in zip_longest(inputs, outputs, flags[: len(inputs)], fillvalue=False)
        ]
    if not isinstance(found, list) or any(
        not isinstance(t, dict) or "input" not in t or "output" not in t for t in found
    ):
        return "each of the prompt's tests needs an input and an output"
    tests = [CodeTest(input=t["input"], output=t["output"], public=bool(t.get("public"))) for t in found]
    if which != "all":
        tests = [t for t in tests if t.public == (which == "public")]
        if not tests:
            return f"the prompt has no {which} tests"
    try:
        return CodeTests(tests=tuple(_as_call(t) if function else _as_text(t) for t in tests), function=function)
    except ValueError as error:
        return f"a test of the prompt cannot be read ({error})"


def _as_text(test: CodeTest) -> CodeTest:
    lines = [("\n".join(map(str, part)) if isinstance(part, list) else str(part)) for part in (test.input, test.output)]
    return CodeTest(input=lines[0], output=lines[1], public=test.public)


def _as_call(test: CodeTest) -> CodeTest:
    arguments, value = test.input, test.output
    if isinstance(arguments, str):
        arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
        value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(arguments, list):
        raise ValueError(f"arguments are a {type(arguments).__name__}; wanted a list")
    return CodeTest(input=arguments, output=value, public=test.public)


def same_output(found: str, wanted: str, tolerance: float) -> bool:
    """Whether two outputs agree line by line; within a line as text, or as equal numbers between the spaces.

    White space at the ends of lines and empty lines at the end do not count. Only ASCII digits make numbers.

    >>> same_output("1 2.50\\n", "1 2.5", 0.0), same_output("1\\n2", "1 2", 0.0), same_output("0.3333", "0.33333", 1e-3)
    (True, False, True)
    """
    ours, theirs = (text.rstrip().split("\n") for text in (found, wanted))
    return len(ours) == len(theirs) and all(
        _same_line(a.strip(), b.strip(), tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _same_line(found: str, wanted: str, tolerance: float) -> bool:
    if found == wanted:
        return True
    ours, theirs = found.split(), wanted.split()
    return len(ours) == len(theirs) and all(
        a == b or _same_number(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _same_number(found: str, wanted: str, tolerance: float) -> bool:
    if not found.isascii() or "_" in found or len(found) > 2000 or len(wanted) > 2000:
        return False
    try:
        if Decimal(found) == Decimal(wanted):
            return True
        return tolerance > 0 and abs(float(found) - float(wanted)) <= tolerance * max(1.0, abs(float(wanted)))
    except (DecimalException, ValueError, OverflowError):
        return False


def same_value(found: str, wanted: Any, tolerance: float) -> bool:
    """Whether the JSON text of a returned value is the expected value; lists and tuples are the same, true is not 1."""
    try:
        return _same(json.loads(found), json.loads(json.dumps(wanted)), tolerance)
    except (ValueError, RecursionError):
        return False


def _same(found: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return found == wanted or (isinstance(wanted, float) and _close(found, wanted, tolerance))
    if type(found) is not type(wanted):
        return False
    if isinstance(found, list):
        return len(found) == len(wanted) and all(_same(a, b, tolerance) for a, b in zip(found, wanted, strict=True))
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(_same(found[key], wanted[key], tolerance) for key in found)
    return bool(found == wanted)


def _close(found: float, wanted: float, tolerance: float) -> bool:
    try:
        return math.isfinite(found) and abs(found - wanted) <= tolerance * max(1.0, abs(wanted))
    except OverflowError:
        return False
