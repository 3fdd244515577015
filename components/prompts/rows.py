"""One raw row becomes one problem, or a sentence saying why it cannot be used."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from hashlib import blake2b
from typing import Any

from components.prompts.code_rows import livecodebench_tests
from components.prompts.sources import Source
from components.prompts.store import Row
from components.text.templates import extract_answer, solve_prompt
from components.verifier.code_tests import read_tests

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FOREIGN = 0.1  # share of letters
_SURROGATE = re.compile("[\ud800-\udfff]")


def column_of(row: dict[str, Any], column: str) -> Any:
    """The value of a column; "a.b" is the field b of column a where no column has that name. None when there is none.

    >>> column_of({"details": {"level": "L3"}}, "details.level")
    'L3'
    """
    found: Any = row
    for part in [column] if column in row else column.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def has_column(row: dict[str, Any], column: str) -> bool:
    """Whether the row has it, perhaps as None."""
    head, _, rest = column.partition(".")
    return column in row or (
        bool(rest) and head in row and (row[head] is None or (isinstance(row[head], dict) and rest in row[head]))
    )


def dropped_by(row: dict[str, Any], source: Source) -> str:
    """The column by whose value `keep` leaves this row out; "" when it stays."""
    for column, wanted in source.keep.items():
        if str(column_of(row, column)) not in ([wanted] if isinstance(wanted, str) else wanted):
            return column
    return ""


def question_key(question: str) -> bytes:
    """The same 16 bytes for questions that differ by white space, case or the form of their characters alone.

    >>> question_key("What is  1 + 1?") == question_key("what is 1 + 1? ")
    True
    """
    text = " ".join(unicodedata.normalize("NFKC", question).casefold().split())
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def make_row(found: dict[str, Any], source: Source, template: str, tokenizer: Any, number: int) -> Row | str:
    """The problem in a raw row, or why it cannot be used."""
    question = _text(found, source.question)
    answer: tuple[str, str] = _answer(found, source) if source.answer else ("", "")
    if question[1] or answer[1]:
        return question[1] or answer[1]
    shown, wanted = question[0].strip(), answer[0]
    further: dict[str, Any] = {name: column_of(found, column) for name, column in source.metadata.items()}
    if source.choices:
        listed = _choices(column_of(found, source.choices), source.choices)
        if isinstance(listed, str):
            return listed
        texts, labels = listed
        if wanted in labels:
            wanted = LETTERS[labels.index(wanted)]
        elif wanted not in LETTERS[: len(texts)] and wanted not in texts:
            return f"{source.answer} names none of the {len(texts)} choices"
        shown += "\n\n" + "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
        further["choices"] = texts
    if source.script == "latin" and foreign_share(shown) > _FOREIGN:
        return f"{source.question} is not in the Latin script"
    if source.starter_code:
        code = column_of(found, source.starter_code)
        shown += (
            f"\n\nThe program begins with:\n```python\n{code.rstrip()}\n```"
            if isinstance(code, str) and code.strip()
            else ""
        )
    if source.tests:
        tests = livecodebench_tests(found)
        if isinstance(tests, str):
            return tests
        further |= {"tests": tests[0], "fn_name": tests[1]}
    if source.answer_kind == "code":
        readable = read_tests(further, "all")
        if isinstance(readable, str):
            return readable
        if not (
            readable.function or further.get("fn_name") or (source.starter_code and "The program begins with" in shown)
        ):
            shown += "\n\nThe program reads standard input and writes standard output."
    metadata = {"task": source.name or source.path, "template": template, "question": shown, "source_row": number}
    return Row(
        text=solve_prompt(template, shown, tokenizer, source.answer_kind), answer=wanted, metadata=further | metadata
    )


def foreign_share(text: str) -> float:
    """Share of letters that are neither Latin nor Greek.

    >>> foreign_share("Sei α = 2"), foreign_share("求 x")
    (0.0, 0.5)
    """
    letters = [c for c in text if c.isalpha()]
    foreign = sum(
        not (c.isascii() or unicodedata.name(c, "").startswith(("LATIN", "GREEK", "MATHEMATICAL"))) for c in letters
    )
    return foreign / max(len(letters), 1)


def _text(found: dict[str, Any], column: str) -> tuple[str, str]:
    """(text, "") or ("", reason)."""
    value = column_of(found, column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return "", f"no {column}"
    if not isinstance(value, str):
        return "", f"{column} is a {type(value).__name__}; wanted text"
    if _SURROGATE.search(value):
        return "", f"{column} is not UTF-8"
    return value, ""


def _answer(found: dict[str, Any], source: Source) -> tuple[str, str]:
    value = column_of(found, source.answer)
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, float):
        if not math.isfinite(value):
            return "", f"{source.answer} is {value}; wanted a number"
        value = str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    elif isinstance(value, int):
        value = str(value)
    elif isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        value = ", ".join(v.strip() for v in value)  # several answers, all of which are wanted
    text, reason = _text({source.answer: value}, source.answer)
    if reason:
        return "", reason
    if source.answer_boxed:
        text = extract_answer("plain", text) or ""
        if not text:
            return "", f"no \\boxed{{}} in {source.answer}"
    if source.answer_after:
        _, mark, text = text.rpartition(source.answer_after)
        text = text.strip().partition("\n")[0].strip()
        if not mark or not text:
            return "", f"nothing after '{source.answer_after}' in {source.answer}"
    text = text.strip()
    if source.max_answer and len(text) > source.max_answer:
        return "", f"an answer of {len(text)} characters; at most {source.max_answer} are taken"
    return text, ""


def _choices(value: Any, column: str) -> tuple[list[str], list[str]] | str:
    """(texts, labels as the dataset has them), or why there are none. Takes a list, {"text": […], "label": […]}, or
    either as JSON."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return f"{column} is text that is not JSON; wanted a list"
    texts = value.get("text") if isinstance(value, dict) else value
    labels = value.get("label") if isinstance(value, dict) else None
    if (
        not isinstance(texts, list)
        or not 2 <= len(texts) <= len(LETTERS)
        or not all(isinstance(t, str) and t.strip() for t in texts)
    ):
        return f"{column}: wanted 2 to {len(LETTERS)} texts"
    if not isinstance(labels, list) or len(labels) != len(texts):
        labels = list(LETTERS[: len(texts)])
    return [t.strip() for t in texts], [str(label) for label in labels]
