"""Answers found, or formats checked, by a regular expression."""

from __future__ import annotations

from dataclasses import dataclass

import regex

from components.verifier.base import RIGHT, Item, MemoVerifier, Verdict, unjudged, wrong
from components.verifier.exact import normalise
from pipeline.core.component import Component
from pipeline.core.payloads import Verifier


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


def check_pattern(pattern: str) -> None:
    """Raises ValueError for a pattern that is empty or malformed."""
    if not pattern:
        raise ValueError("pattern is empty; wanted a regular expression.")
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"pattern '{pattern}' is not a regular expression ({error}).") from error


class RegexVerifier(MemoVerifier):
    """Right when the pattern's last match gives the reference, or when it matches at all."""

    def __init__(self, pattern: str, compare: bool, ignore_case: bool, seconds: float) -> None:
        super().__init__()
        self._pattern = regex.compile(pattern, regex.DOTALL | regex.MULTILINE)
        self._compare, self._ignore_case, self._seconds = compare, ignore_case, seconds

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item."""
        return [self._verdict(item) for item in items]

    def _verdict(self, item: Item) -> Verdict:
        if self._compare and not item.answer.strip():
            return unjudged("the prompt has no reference answer")
        last = None
        try:
            for match in self._pattern.finditer(item.text, timeout=self._seconds):
                last = match
                if not self._compare:
                    return RIGHT
        except TimeoutError:
            return unjudged(f"the pattern took more than {self._seconds:g} s")
        if last is None:
            return wrong("the pattern does not match the response")
        found = str(last.group(1 if self._pattern.groups else 0) or "")
        if normalise(found, self._ignore_case) == normalise(item.answer, self._ignore_case):
            return RIGHT
        return wrong(f"answered '{found[:40]}'")


class Regex(Component):
    """Verifies by a regular expression: the first group of its last match must equal the reference, or it must just match.

    For answers behind fixed words ("#### 42") and for formats ("<think>…</think>"). A pattern that backtracks is cut
    off.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The pattern, and what its match means."""

        pattern: str = r"####\s*(\S[^\n]*)"
        """regular expression; the dot matches line breaks, ^ and $ match at lines"""
        compare: bool = True
        """compare the match with the reference; off: right when the pattern matches, and no reference is needed"""
        ignore_case: bool = True
        """whether "Yes" equals "yes" in the comparison"""
        seconds: float = 1.0
        """limit per response; beyond it the response is invalid"""

        def __post_init__(self) -> None:
            check_pattern(self.pattern)
            if self.seconds <= 0:
                raise ValueError("seconds must be above 0.")

    config: Config
    _judge: RegexVerifier | None = None

    def run(self) -> Outputs:
        """Returns the verifier, the same one every iteration."""
        if self._judge is None:
            settings = self.config
            self._judge = RegexVerifier(settings.pattern, settings.compare, settings.ignore_case, settings.seconds)
        return Outputs(verifier=self._judge)
