"""Reads answers or checks formats by a regular expression."""

from dataclasses import dataclass
from typing import Any

from creditgraph.components.verifier.base import RIGHT, Item, Verdict, VerifierComponent, undecided, wrong
from creditgraph.components.verifier.exact import normalise
from creditgraph.pipeline.core.errors import extra


def compile_pattern(pattern: str) -> Any:
    """The compiled pattern, whose dot matches line breaks and whose ^ and $ match at lines.

    The module `regex` is used instead of `re` because its matches support a timeout.

    Raises:
        ValueError: the pattern is empty or malformed.
    """
    with extra("train", "verifier.regex"):
        import regex

    if not pattern:
        raise ValueError("pattern is empty, expected a regular expression.")
    try:
        return regex.compile(pattern, regex.DOTALL | regex.MULTILINE)
    except regex.error as error:
        raise ValueError(f"pattern '{pattern}' is not a regular expression ({error}).") from error


class Regex(VerifierComponent):
    """Verifies by a regular expression: its last match must equal the reference, or it must just match.

    For answers after fixed words ("#### 42") and for formats ("<think>…</think>"). The pattern's first group is
    compared, or the whole match if it has none. A pattern that backtracks too long is stopped.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The pattern, and the use of its match."""

        pattern: str = r"####\s*(\S[^\n]*)"
        """regular expression; the dot matches line breaks, ^ and $ match at lines"""
        compare: bool = True
        """compare the match with the reference; off: right when the pattern matches, and no reference is needed"""
        seconds: float = 1.0
        """limit per response; beyond it the response is invalid"""

        def __post_init__(self) -> None:
            compile_pattern(self.pattern)
            if self.seconds <= 0:
                raise ValueError(f"expected seconds > 0, got {self.seconds}.")

    config: Config

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Text to compare with; any or none if it only matches."""
        return frozenset({"value", "choice", "boolean"}) if config.compare else None

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._pattern = compile_pattern(self.config.pattern)

    def verdict(self, item: Item) -> Verdict:
        """Compares the pattern's last match with the reference, or looks for any match."""
        if self.config.compare and not item.answer.strip():
            return undecided("the prompt has no reference answer")
        last = None
        try:
            for match in self._pattern.finditer(item.text, timeout=self.config.seconds):
                last = match
                if not self.config.compare:
                    return RIGHT
        except TimeoutError:
            return undecided(f"the pattern took more than {self.config.seconds:g} s")
        if last is None:
            return wrong("the pattern does not match the response")
        answer = str(last.group(1 if self._pattern.groups else 0) or "")
        if normalise(answer) == normalise(item.answer):
            return RIGHT
        return wrong(f"answered '{answer[:40]}'")
