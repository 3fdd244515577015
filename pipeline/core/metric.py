"""Definitions of logged numbers: name, unit and meaning, declared next to the class that logs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Metric:
    """One definition.

    Attributes:
        name: name as passed to `context.log`; <part> is a placeholder for a part that varies.
        unit: unit of the number, such as "tokens", "s", "share" (0 to 1), "nats".
        text: the definition, one sentence.
        alarm: of a share, what it means that it is 1 in every iteration, and what to do: a sentence or two that follow
            "… was 1 in iterations 0 to 9: "; "" where that is nothing to warn of. The run warns as it does of
            iterations that train nothing.

    >>> Metric("pass_at_<k>", "share", "").fits("pass_at_8")
    True
    """

    name: str
    unit: str
    text: str
    alarm: str = ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        literal = re.split(r"<\w+>", self.name)
        return re.compile(".+".join(re.escape(part) for part in literal))

    def fits(self, name: str) -> bool:
        """Whether a logged name matches this definition."""
        return self._pattern.fullmatch(name) is not None
