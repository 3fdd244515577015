"""Where a run in Python shows its progress: in a notebook the last lines in one place, else the error stream."""

from __future__ import annotations

import html
import io
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

SHOWN = 12  # lines


class Lines(io.StringIO):
    """A stream whose last lines replace each other in the output of a notebook's cell."""

    def __init__(self, display: Any) -> None:
        super().__init__()
        self._last: deque[str] = deque(maxlen=SHOWN)
        self._handle = display(self, display_id=True)

    def write(self, text: str) -> int:
        """Adds whole lines; WARNING lines too."""
        self._last.extend(text.splitlines())
        self._handle.update(self)
        return len(text)

    def __repr__(self) -> str:
        return "\n".join(self._last)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


@contextmanager
def stream() -> Iterator[TextIO]:
    """The stream for `Progress`."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    if running is None or not hasattr(running, "kernel"):
        yield sys.stderr
        return
    yield Lines(shell.display.display)  # type: ignore[union-attr]
