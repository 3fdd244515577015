"""Formats text for a terminal or a page: makes foreign text safe, shortens it, or puts it into a table."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_INVISIBLE = re.compile(r"[^\n\t\x20-\x7e]")


def visible(text: Any) -> str:
    """Text with invisible characters (control, direction) written out, so that they do not affect other text.

    >>> visible("a\\u202eb\\x1b[31m")
    'a[U+202E]b␛[31m'
    """

    def spell(match: re.Match[str]) -> str:
        char = match.group()
        if ord(char) < 32:
            return chr(0x2400 + ord(char))
        category = unicodedata.category(char)
        if category == "Cs":
            return "\ufffd"
        return f"[U+{ord(char):04X}]" if category in ("Cc", "Cf", "Co") or char in "\u2028\u2029" else char

    return _INVISIBLE.sub(spell, str(text))


def cut(text: str, longest: int) -> str:
    """The text, or its first `longest` characters and how many there were."""
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text):,} characters)"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of even width."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
        for r in [head, *rows]
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lines with columns of even width for a terminal; a row of one cell is a heading and takes no part in the widths.

    >>> print(columns([["run", "reward"], ["toy"], ["  a", ".5"]]))
    run  reward
    toy
      a  .5
    """
    shown = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row for row in shown if len(row) > 1), strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in shown
    )
