"""Exact match of the extracted answer."""

from __future__ import annotations

from dataclasses import dataclass

from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong


def normalise(answer: str, ignore_case: bool) -> str:
    """Collapses white space, drops a final full stop, and lowers the case with `ignore_case`.

    >>> normalise("  Forty  Two. ", ignore_case=True)
    'forty two'
    """
    text = " ".join(answer.split()).removesuffix(".").strip()
    return text.casefold() if ignore_case else text


class Exact(VerifierComponent):
    """Verifies by string equality: integers, choices, yes/no. Equal values in different notation are wrong."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Comparison of strings."""

        ignore_case: bool = True
        """whether "Yes" equals "yes" in the comparison"""

    references = frozenset({"value", "choice", "boolean"})
    config: Config

    def verdict(self, item: Item) -> Verdict:
        """Compares the extracted answer with the reference after `normalise`."""
        if not item.answer.strip():
            return undecided("the prompt has no reference answer")
        answer = item.extracted()
        if answer is None:
            return wrong("no answer in the response")
        if normalise(answer, self.config.ignore_case) == normalise(item.answer, self.config.ignore_case):
            return RIGHT
        return wrong(f"answered '{answer[:40]}'")
