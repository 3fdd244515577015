"""Converts a raw row into a problem, or rejects it with a reason."""

import json
import math
import re
import unicodedata
from hashlib import blake2b
from string import ascii_uppercase
from typing import Any

from creditgraph.components.data.livecodebench import half_of_private, livecodebench_tests
from creditgraph.components.data.sources import Source
from creditgraph.components.data.store import Row
from creditgraph.components.text.code_tests import read_tests
from creditgraph.components.text.messages import conversation, read_messages
from creditgraph.components.text.templates import AnswerKind, extract_answer, solve_prompt
from creditgraph.pipeline.core.streams import Stream

_SURROGATE = re.compile("[\ud800-\udfff]")  # bytes that are not UTF-8 were read as these
_COMMAND = re.compile(r"\\[A-Za-z]+")  # of LaTeX
_UNSURE = re.compile(r"\\(?:text|mathrm)|^[};.,;:~\-*]\s?|%|~|\*\*|\b(?:or|sq|cm|yd|km|kg|lb|oz|ft|mi)\b|m[²³]")
_BEGINS_WITH = "The program begins with:"


def column_of(row: dict[str, Any], column: str) -> Any:
    """The value of a column, None if missing; "a.b" is the field b of column a unless a column has that name.

    >>> column_of({"details": {"level": "L3"}}, "details.level")
    'L3'
    """
    value: Any = row
    for part in [column] if column in row else column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def has_column(row: dict[str, Any], column: str) -> bool:
    """Whether the row has the column, even if its value is None."""
    head, _, rest = column.partition(".")
    return column in row or (
        bool(rest) and head in row and (row[head] is None or (isinstance(row[head], dict) and rest in row[head]))
    )


def dropped_by(row: dict[str, Any], source: Source) -> str:
    """The column by whose value `keep` filters this row out; "" if the row is kept."""
    for column, kept in source.keep.items():
        if str(column_of(row, column)) not in ([kept] if isinstance(kept, str) else kept):
            return column
    return ""


def question_key(question: str) -> bytes:
    """16 bytes that are equal for questions that differ only by white space, case or the form of their characters.

    >>> question_key("What is  1 + 1?") == question_key("what is 1 + 1? ")
    True
    """
    text = " ".join(unicodedata.normalize("NFKC", question).casefold().split())
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def make_row(raw: dict[str, Any], source: Source, template: str, tokenizer: Any, number: int) -> Row:
    """The problem in a raw row.

    Raises:
        ValueError: it cannot be used; the text gives the reason.
    """
    value = column_of(raw, source.question)
    messages = read_messages(value, source.question) if isinstance(value, list) else None
    problem = _text(value if messages is None else conversation(messages), source.question).strip()
    question = problem
    choices = column_of(raw, source.choices) if source.choices else None
    # A row without choices in a section that says what such rows are asked for.
    is_open = bool(source.open_answer) and not (choices.get("text") if isinstance(choices, dict) else choices)
    kind: AnswerKind = "value" if is_open else source.answer_kind
    answer = _answer(raw, source, source.open_answer if is_open else source.answer) if source.answer else ""
    further: dict[str, Any] = {name: column_of(raw, column) for name, column in source.metadata.items()}
    if source.choices and not is_open:
        texts, labels = _choices(choices, source.choices)
        if answer in labels:
            answer = ascii_uppercase[labels.index(answer)]
        elif answer not in ascii_uppercase[: len(texts)] and answer not in texts:
            raise ValueError(f"{source.answer} names none of the {len(texts)} choices")
        listed = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, texts, strict=False)]
        question += "\n\n" + "\n".join(listed)
        further["choices"] = texts
    code = column_of(raw, source.starter_code) if source.starter_code else None
    if isinstance(code, str) and code.strip():
        question += f"\n\n{_BEGINS_WITH}\n```python\n{code.rstrip()}\n```"
    if source.tests:
        tests, function = livecodebench_tests(raw)
        if source.private_tests:
            tests = half_of_private(tests, source.private_tests, Stream(source.seed, "data", "tests"), number)
        further |= {"tests": tests, "fn_name": function}
    if kind == "code":
        calls_function = read_tests(further, "all").function or further.get("fn_name")
        if not calls_function and not (source.starter_code and _BEGINS_WITH[:-1] in question):
            question += "\n\nThe program reads standard input and writes standard output."
    metadata: dict[str, Any] = {
        "task": source.name or source.path,
        "template": template,
        "question": question,
        "source_row": number,
        "answer_kind": kind,
    }
    if messages is not None:
        messages[-1]["content"] += question.removeprefix(problem)  # choices, and what a program begins with
        metadata["messages"] = messages
    text = solve_prompt(
        template,
        question,
        tokenizer,
        kind,
        system_prompt=source.system_prompt,
        user_prompt=source.user_prompt,
        messages=messages,
    )
    return Row(text=text, answer=answer, metadata=further | metadata, solution=_solution(raw, source))


def _text(value: Any, column: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"no {column}")
    if not isinstance(value, str):
        raise ValueError(f"{column} is a {type(value).__name__}, expected text")
    if _SURROGATE.search(value):
        raise ValueError(f"{column} is not UTF-8")
    return value


def is_short_answer(answer: str) -> bool:
    """Whether an answer is of a form that can be verified reliably, as 2605.25507's release filters its problems.

    One of A to E, or: a digit; no word of three letters, LaTeX commands aside; balanced brackets; no text command, no
    unit, percent sign, "or" or markdown; no punctuation in front.

    >>> [is_short_answer(a) for a in ("\\\\frac{3}{7}", "C", "12 cm", "x = y", "3 apples", "50\\\\%")]
    [True, True, False, False, False, False]
    """
    if re.fullmatch("[A-E]", answer):
        return True
    balanced = answer.count("{") == answer.count("}") and answer.count("(") == answer.count(")")
    words = re.search(r"[A-Za-z]{3}", _COMMAND.sub("", answer))
    return balanced and bool(re.search(r"\d", answer)) and not (words or _UNSURE.search(answer))


def _answer(raw: dict[str, Any], source: Source, column: str) -> str:
    value = column_of(raw, column)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{column} is {value}, expected a number")
        value = str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    elif isinstance(value, int):
        value = str(value)
    elif isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        value = ", ".join(v.strip() for v in value)  # several answers, all of which are required
    text = _text(value, column)
    if source.answer_boxed:
        text = extract_answer(text) or ""
        if not text:
            raise ValueError(f"no \\boxed{{}} in {column}")
    if source.answer_after:
        _, mark, text = text.rpartition(source.answer_after)
        text = text.strip().partition("\n")[0].strip()
        if not mark or not text:
            raise ValueError(f"nothing after '{source.answer_after}' in {column}")
    text = text.strip()
    if source.max_answer and len(text) > source.max_answer:
        raise ValueError(f"an answer of {len(text)} characters; at most {source.max_answer} are taken")
    if source.short_answer and not is_short_answer(text):
        raise ValueError("an answer that is no short one")
    return text


def _solution(raw: dict[str, Any], source: Source) -> str:
    column = source.solution_column
    value = column_of(raw, column) if column else None
    if isinstance(value, list | tuple) and value:
        value = value[0]  # several solutions: one is enough as a reference
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return _text(value, column).strip()


def _choices(value: Any, column: str) -> tuple[list[str], list[str]]:
    """(texts, labels in the dataset), read from a list, {"text": […], "label": […]}, or either as JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError(f"{column} is text that is not JSON, expected a list") from None
    texts = value.get("text") if isinstance(value, dict) else value
    labels = value.get("label") if isinstance(value, dict) else None
    if (
        not isinstance(texts, list)
        or not 2 <= len(texts) <= len(ascii_uppercase)
        or not all(isinstance(t, str) and t.strip() for t in texts)
    ):
        raise ValueError(f"{column}: expected 2 to {len(ascii_uppercase)} texts")
    if not isinstance(labels, list) or len(labels) != len(texts):
        labels = list(ascii_uppercase[: len(texts)])
    return [t.strip() for t in texts], [str(label) for label in labels]
