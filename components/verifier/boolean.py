"""Yes or no, true or false."""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong

_TAIL = 2000  # characters: an answer is at the end, and a response may be a megabyte long
_TRUE = ("yes", "true", "1", "correct")
_FALSE = ("no", "false", "0", "incorrect")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")
_STATED = re.compile(r"\banswer\b\W*(?:is)?\W*(yes|no|true|false)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


def truth_of(answer: str) -> bool | None:
    """What an answer says; None when it says neither.

    >>> truth_of("\\\\text{Yes}."), truth_of("FALSE"), truth_of("maybe")
    (True, False, None)
    """
    bare = _TEXT_COMMAND.sub(r"\1", answer).strip(" $*.!\n\t").casefold()
    return True if bare in _TRUE else False if bare in _FALSE else None


class Boolean(VerifierComponent):
    """Verifies yes/no and true/false questions. A last line that says both says neither."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where the answer may be."""

        free_form: bool = True
        """without a \\boxed{} take "the answer is yes" or the only such word of the last line; off: such a response is
        wrong"""

    config: Config

    def verdict(self, item: Item) -> Verdict:
        """Compares what the response says with the reference."""
        reference = truth_of(item.answer)
        if reference is None:
            return undecided(f"the reference '{item.answer[:40]}' is neither yes nor no")
        answer = self._answer(item)
        if answer is None:
            return wrong("neither yes nor no in the response")
        return RIGHT if answer == reference else wrong(f"answered '{'yes' if answer else 'no'}'")

    def _answer(self, item: Item) -> bool | None:
        boxed = item.extracted()
        if boxed is not None:
            return truth_of(boxed)
        if not self.config.free_form:
            return None
        tail = item.text[-_TAIL:]
        stated = _STATED.findall(tail)
        if stated:
            return truth_of(stated[-1])
        lines = [line for line in tail.splitlines() if line.strip()]
        words = {truth_of(word) for word in _WORD.findall(lines[-1])} if lines else set()
        return words.pop() if len(words) == 1 else None
