"""Multiple choice: the letter a response settles on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from components.verifier.base import RIGHT, Item, MemoVerifier, Verdict, unjudged, wrong
from components.verifier.exact import normalise
from pipeline.core.component import Component
from pipeline.core.payloads import Verifier

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TAIL = 2000
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_SAID = re.compile(
    r"\b(?i:answer|choice|option)\b[^A-Za-z0-9\n(]*(?:is|are)?[^A-Za-z0-9\n(]*\(?\**([A-Z])\**\)?(?![A-Za-z'])"
)
_LAST_LINE = re.compile(r"^\W*\(?([A-Z])\)?\W*$")


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


def choices_of(metadata: dict[str, Any]) -> list[str]:
    """The texts of the choices in order, from metadata["choices"]: a list, or {"text": […]} as many datasets have it; [] without."""
    found = metadata.get("choices")
    found = found.get("text") if isinstance(found, dict) else found
    return [str(choice) for choice in found] if isinstance(found, list | tuple) else []


def letter_of(answer: str, choices: list[str]) -> str | None:
    """The letter that an answer names: B, (B), \\text{B}, "B. because", or the text of a choice; None for anything else.

    >>> letter_of("(b)", []), letter_of("Paris", ["Rome", "Paris"]), letter_of("both", [])
    ('B', 'B', None)
    """
    bare = _WRAPPED.sub(r"\1", answer).strip(" $*.\n\t")
    found = re.match(r"^\(?([A-Za-z])(?:\)|[).:](?=\s)|$)", bare)
    if found:
        return found.group(1).upper()
    texts = [normalise(choice, ignore_case=True) for choice in choices]
    wanted = normalise(bare, ignore_case=True)
    return LETTERS[texts.index(wanted)] if texts.count(wanted) == 1 and texts.index(wanted) < len(LETTERS) else None


class ChoiceVerifier(MemoVerifier):
    """Right when the response's letter is the reference's."""

    def __init__(self, free_form: bool) -> None:
        super().__init__()
        self._free_form = free_form

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item."""
        return [self._verdict(item) for item in items]

    def _verdict(self, item: Item) -> Verdict:
        choices = choices_of(item.metadata)
        wanted = letter_of(item.answer, choices)
        if wanted is None:
            return unjudged(
                f"the reference '{item.answer[:40]}' names no choice; wanted a letter or the text of one of its choices"
            )
        found = self._found(item, choices)
        if found is None:
            return wrong("no choice in the response")
        if choices and LETTERS.index(found) >= len(choices):
            return wrong(f"answered '{found}', of {len(choices)} choices")
        return RIGHT if found == wanted else wrong(f"answered '{found}'")

    def _found(self, item: Item, choices: list[str]) -> str | None:
        boxed = item.extracted()
        if boxed is not None:
            return letter_of(boxed, choices)
        if not self._free_form:
            return None
        tail = item.text[-_TAIL:]
        said = _SAID.findall(tail)
        if said:
            return str(said[-1])
        lines = [line for line in tail.splitlines() if line.strip()]
        last = _LAST_LINE.match(lines[-1]) if lines else None
        return last.group(1) if last else None


class Choice(Component):
    """Verifies multiple choice by letter. The text of a choice counts as its letter where the prompt's metadata lists "choices"."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where the answer may stand."""

        free_form: bool = True
        """without a \\boxed{} take "the answer is B" or a last line that is one letter; off: such a response is
        wrong"""

    config: Config
    _judge: ChoiceVerifier | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            self._judge = ChoiceVerifier(self.config.free_form)
        return Outputs(verifier=self._judge)
