"""Exact match of the extracted answer."""

from __future__ import annotations

from dataclasses import dataclass

from components.verifier.base import RIGHT, Item, MemoVerifier, Verdict, unjudged, wrong
from pipeline.core.component import Component
from pipeline.core.payloads import Verifier


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


def normalise(answer: str, ignore_case: bool) -> str:
    """Collapses white space, drops a final full stop, and lowers the case if asked.

    >>> normalise("  Forty  Two. ", ignore_case=True)
    'forty two'
    """
    text = " ".join(answer.split()).removesuffix(".").strip()
    return text.casefold() if ignore_case else text


class ExactVerifier(MemoVerifier):
    """Right when the extracted answer equals the reference after `normalise`."""

    def __init__(self, ignore_case: bool) -> None:
        super().__init__()
        self._ignore_case = ignore_case

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item."""
        return [self._verdict(item) for item in items]

    def _verdict(self, item: Item) -> Verdict:
        if not item.answer.strip():
            return unjudged("the prompt has no reference answer")
        found = item.extracted()
        if found is None:
            return wrong("no answer in the response")
        if normalise(found, self._ignore_case) == normalise(item.answer, self._ignore_case):
            return RIGHT
        return wrong(f"answered '{found[:40]}'")


class Exact(Component):
    """Verifies by string equality: for integers, choices and yes/no answers. Fails on equal values in other notation."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How strings are compared."""

        ignore_case: bool = True
        """whether "Yes" equals "yes" in the comparison"""

    config: Config
    _judge: ExactVerifier | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            self._judge = ExactVerifier(self.config.ignore_case)
        return Outputs(verifier=self._judge)
