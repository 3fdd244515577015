"""Yes or no, true or false."""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.verifier.base import RIGHT, Item, MemoVerifier, Verdict, unjudged, wrong
from pipeline.core.component import Component
from pipeline.core.payloads import Verifier

_TAIL = 2000
_TRUE, _FALSE = ("yes", "true", "1", "correct"), ("no", "false", "0", "incorrect")
_SAID = re.compile(r"\banswer\b\W*(?:is)?\W*(yes|no|true|false)\b", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no|true|false)\b", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


def truth_of(answer: str) -> bool | None:
    """What an answer says; None when it says neither.

    >>> truth_of("\\\\text{Yes}."), truth_of("FALSE"), truth_of("maybe")
    (True, False, None)
    """
    bare = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", answer).strip(" $*.!\n\t").casefold()
    return True if bare in _TRUE else False if bare in _FALSE else None


class BooleanVerifier(MemoVerifier):
    """Right when response and reference say the same."""

    def __init__(self, free_form: bool) -> None:
        super().__init__()
        self._free_form = free_form

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item."""
        return [self._verdict(item) for item in items]

    def _verdict(self, item: Item) -> Verdict:
        wanted = truth_of(item.answer)
        if wanted is None:
            return unjudged(f"the reference '{item.answer[:40]}' is neither yes nor no")
        found = self._found(item)
        if found is None:
            return wrong("neither yes nor no in the response")
        return RIGHT if found == wanted else wrong(f"answered '{'yes' if found else 'no'}'")

    def _found(self, item: Item) -> bool | None:
        boxed = item.extracted()
        if boxed is not None or not self._free_form:
            return None if boxed is None else truth_of(boxed)
        tail = item.text[-_TAIL:]
        said = _SAID.findall(tail)
        if said:
            return truth_of(said[-1])
        lines = [line for line in tail.splitlines() if line.strip()]
        words = {truth_of(word) for word in _WORD.findall(lines[-1])} if lines else set()
        return words.pop() if len(words) == 1 else None


class Boolean(Component):
    """Verifies yes/no and true/false questions. A last line that says both says neither."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Where the answer may stand."""

        free_form: bool = True
        """without a \\boxed{} take "the answer is yes" or the only such word of the last line; off: such a response is
        wrong"""

    config: Config
    _judge: BooleanVerifier | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            self._judge = BooleanVerifier(self.config.free_form)
        return Outputs(verifier=self._judge)
