"""Answers of one letter or word: multiple choice, and yes or no."""

import re
from collections.abc import Callable
from string import ascii_uppercase
from typing import Any, TypeVar

from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong
from creditgraph.components.verifier.exact import normalise

T = TypeVar("T")
_TAIL = 2000  # characters: an answer is at the end, and a response may be a megabyte long
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
# "answer is (B)", "Choice: **B**". The letter must be a capital and end the word: "the answer is a …" names no choice.
_STATED_LETTER = re.compile(
    r"\b(?i:answer|choice|option)\b[^A-Za-z0-9\n(]*(?:is|are)?[^A-Za-z0-9\n(]*\(?\**([A-Z])\**\)?(?![A-Za-z'])"
)
_LAST_LINE = re.compile(r"^\W*\(?([A-Z])\)?\W*$")
_LETTER = re.compile(r"^\(?([A-Za-z])(?:\)|[).:](?=\s)|$)")
_TRUE = ("yes", "true", "1", "correct")
_FALSE = ("no", "false", "0", "incorrect")
_STATED_TRUTH = re.compile(r"\banswer\b\W*(?:is)?\W*(yes|no|true|false)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


def short_answer(
    item: Item,
    read: Callable[[str], T | None],
    stated: re.Pattern[str],
    read_line: Callable[[str], T | None],
) -> T | None:
    """The answer in a response: in its last \\boxed{}, else after "the answer is", else in its last line.

    Args:
        item: the response.
        read: an answer's text as a value; None for text that is no answer.
        stated: matches a statement; its first group is the answer's text.
        read_line: the last line as a value.
    """
    boxed = item.extracted()
    if boxed is not None:
        return read(boxed)
    tail = item.text[-_TAIL:]
    statements = stated.findall(tail)
    if statements:
        return read(statements[-1])
    lines = [line for line in tail.splitlines() if line.strip()]
    return read_line(lines[-1]) if lines else None


def choices_of(metadata: dict[str, Any]) -> list[str]:
    """The texts of metadata["choices"] in order: a list, or {"text": […]} as many datasets have it; [] without."""
    choices = metadata.get("choices")
    choices = choices.get("text") if isinstance(choices, dict) else choices
    return [str(choice) for choice in choices] if isinstance(choices, list | tuple) else []


def letter_of(answer: str, choices: list[str]) -> str | None:
    """The letter an answer names: B, (B), \\text{B}, "B. because", or the text of a choice; None for anything else.

    >>> letter_of("(b)", []), letter_of("Paris", ["Rome", "Paris"]), letter_of("both", [])
    ('B', 'B', None)
    """
    bare = _TEXT_COMMAND.sub(r"\1", answer).strip(" $*.\n\t")
    letter = _LETTER.match(bare)
    if letter:
        return letter.group(1).upper()
    texts = [normalise(choice) for choice in choices]
    text = normalise(bare)
    named = texts.count(text) == 1 and texts.index(text) < len(ascii_uppercase)
    return ascii_uppercase[texts.index(text)] if named else None


def truth_of(answer: str) -> bool | None:
    """Whether an answer means true; None if it means neither true nor false.

    >>> truth_of("\\\\text{Yes}."), truth_of("FALSE"), truth_of("maybe")
    (True, False, None)
    """
    bare = _TEXT_COMMAND.sub(r"\1", answer).strip(" $*.!\n\t").casefold()
    return True if bare in _TRUE else False if bare in _FALSE else None


def _last_letter(line: str) -> str | None:
    match = _LAST_LINE.match(line)
    return match.group(1) if match else None


def _only_truth(line: str) -> bool | None:
    words = {truth_of(word) for word in _WORD.findall(line)}
    return words.pop() if len(words) == 1 else None


class Choice(VerifierComponent):
    """Verifies multiple choice by letter. A choice's text counts as its letter if the metadata lists "choices".

    Without a \\boxed{}, "the answer is B" or a last line that is one letter is the answer.
    """

    references = frozenset({"choice"})

    def verdict(self, item: Item) -> Verdict:
        """Compares the response's letter with the reference's."""
        choices = choices_of(item.metadata)
        reference = letter_of(item.answer, choices)
        if reference is None:
            return undecided(
                f"the reference '{item.answer[:40]}' names no choice, expected a letter or the text of a choice"
            )
        letter = short_answer(item, lambda text: letter_of(text, choices), _STATED_LETTER, _last_letter)
        if letter is None:
            return wrong("no choice in the response")
        if choices and ascii_uppercase.index(letter) >= len(choices):
            return wrong(f"answered '{letter}', of {len(choices)} choices")
        return RIGHT if letter == reference else wrong(f"answered '{letter}'")


class Boolean(VerifierComponent):
    """Verifies yes/no and true/false questions. A last line with both words is no answer.

    Without a \\boxed{}, "the answer is yes" or the only such word of the last line is the answer.
    """

    references = frozenset({"boolean"})

    def verdict(self, item: Item) -> Verdict:
        """Compares the truth value of the response with the reference's."""
        reference = truth_of(item.answer)
        if reference is None:
            return undecided(f"the reference '{item.answer[:40]}' is neither yes nor no")
        answer = short_answer(item, truth_of, _STATED_TRUTH, _only_truth)
        if answer is None:
            return wrong("neither yes nor no in the response")
        return RIGHT if answer == reference else wrong(f"answered '{'yes' if answer else 'no'}'")
