"""Multiple choice: the letter a response settles on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong
from components.verifier.exact import normalise

_TAIL = 2000  # characters: an answer is at the end, and a response may be a megabyte long
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
# "answer is (B)", "Choice: **B**". The letter must be a capital and end the word: "the answer is a …" names no choice.
_STATED = re.compile(
    r"\b(?i:answer|choice|option)\b[^A-Za-z0-9\n(]*(?:is|are)?[^A-Za-z0-9\n(]*\(?\**([A-Z])\**\)?(?![A-Za-z'])"
)
_LAST_LINE = re.compile(r"^\W*\(?([A-Z])\)?\W*$")
_LETTER = re.compile(r"^\(?([A-Za-z])(?:\)|[).:](?=\s)|$)")


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
    texts = [normalise(choice, ignore_case=True) for choice in choices]
    text = normalise(bare, ignore_case=True)
    named = texts.count(text) == 1 and texts.index(text) < len(ascii_uppercase)
    return ascii_uppercase[texts.index(text)] if named else None


class Choice(VerifierComponent):
    """Verifies multiple choice by letter. A choice's text counts as its letter if the metadata lists "choices"."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where the answer may be."""

        free_form: bool = True
        """without a \\boxed{} take "the answer is B" or a last line that is one letter; off: such a response is
        wrong"""

    config: Config

    def verdict(self, item: Item) -> Verdict:
        """Compares the response's letter with the reference's."""
        choices = choices_of(item.metadata)
        reference = letter_of(item.answer, choices)
        if reference is None:
            return undecided(
                f"the reference '{item.answer[:40]}' names no choice, expected a letter or the text of a choice"
            )
        letter = self._letter(item, choices)
        if letter is None:
            return wrong("no choice in the response")
        if choices and ascii_uppercase.index(letter) >= len(choices):
            return wrong(f"answered '{letter}', of {len(choices)} choices")
        return RIGHT if letter == reference else wrong(f"answered '{letter}'")

    def _letter(self, item: Item, choices: list[str]) -> str | None:
        boxed = item.extracted()
        if boxed is not None:
            return letter_of(boxed, choices)
        if not self.config.free_form:
            return None
        tail = item.text[-_TAIL:]
        stated = _STATED.findall(tail)
        if stated:
            return str(stated[-1])
        lines = [line for line in tail.splitlines() if line.strip()]
        last = _LAST_LINE.match(lines[-1]) if lines else None
        return last.group(1) if last else None
