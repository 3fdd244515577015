"""Batches as HTML for notebooks: responses token by token, coloured by their credit as in the report."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from creditgraph.pipeline.app.report.page import ASSETS
from creditgraph.pipeline.app.text import cut, visible
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Credit, Segments, Trajectories
from creditgraph.pipeline.core.shown import Shown

MOST_ROWS = 8  # of a batch that are shown
MOST_TOKENS = 600  # of a response that are shown
LEVELS = 5  # of a colour, as `shade` of the report's core.js

Pieces = Callable[[Batch], Mapping[int, list[str]]]
_SOURCES: WeakKeyDictionary[Batch, Pieces] = WeakKeyDictionary()


def show_with(batch: Batch, pieces: Pieces) -> None:
    """Remembers where the texts of a batch's tokens come from.

    Args:
        batch: any batch with rows of rollouts.
        pieces: given the batch, uid → its response as one string per token.
    """
    _SOURCES[batch] = pieces


def as_html(batch: Batch) -> str:
    """The first rows of a batch, those with credit before others: tokens in its colours, or its columns as a table."""
    source = _SOURCES.get(batch)
    pieces = {} if source is None else source(batch)
    head = f"<b>{html.escape(str(batch))}</b>"
    rows = min(len(batch), MOST_ROWS)
    more = f"<div>… {len(batch) - rows} more rows</div>" if len(batch) > rows else ""
    if isinstance(batch, Credit | Trajectories | Segments) and pieces:
        order = list(range(len(batch)))
        if isinstance(batch, Credit):
            lacks = [not bool(row.any()) for row in batch.advantage.rows()]
            order = sorted(order, key=lacks.__getitem__)
        body = "".join(_response(batch, i, pieces) for i in order[:rows])
    else:
        body = _table(batch, rows)
    return f'<div style="font-size:13px;line-height:1.7">{head}{body}{more}</div>'


def shade(value: float, scale: float) -> str:
    """Class of a token's colour in the report: p1 to p5 of positive credit, n1 to n5 of negative; "" for 0.

    >>> shade(0.5, 1.0), shade(-0.01, 1.0), shade(0.0, 1.0)
    ('p3', 'n1', '')
    """
    if not value or not scale or not math.isfinite(value):
        return ""
    level = min(LEVELS, max(1, math.ceil(LEVELS * abs(value) / scale)))
    return f"{'p' if value > 0 else 'n'}{level}"


@cache
def colours() -> dict[str, str]:
    """Name → colour of the report's style sheet (the light one): plus, minus, p1 … p5, n1 … n5."""
    css = (ASSETS / "report.css").read_text(encoding="utf-8")
    first = css[: css.index("}")]  # `:root`; later rules are the dark colours
    return dict(re.findall(r"--(plus|minus|[pn][1-5]): (#\w+)", first))


def token_spans(pieces: list[str], credit: list[float], scale: float) -> str:
    """Tokens as text with the report's colours; hovering shows the number."""
    spans = []
    for text, value in zip(pieces, credit, strict=True):
        name = shade(value, scale)
        shown = html.escape(visible(text)).replace("\n", "⏎<br>")
        if not name:
            spans.append(shown)
            continue
        line, kind = ("solid", "plus") if value > 0 else ("dotted", "minus")
        style = f"background:{colours()[name]};border-bottom:2px {line} {colours()[kind]};color:#1f2328"
        spans.append(f'<span title="{value:+.3g}" style="{style}">{shown}</span>')
    return "".join(spans)


def _response(batch: Batch, i: int, pieces: Mapping[int, list[str]]) -> str:
    uid = int(batch.uid[i])
    texts = pieces.get(uid, [])
    credit, scale, note = [0.0] * len(texts), 1.0, ""
    if isinstance(batch, Credit):
        credit = batch.advantage.row(i).tolist()
        scale = max([1e-12, *batch.advantage.values.abs().tolist()])
        note = f"Σ {sum(credit):+.3g}"
    ends = _ends(batch, i)
    if len(credit) != len(texts):
        return f"<div>{uid}: its tokens are not known</div>"
    parts, begin = [], 0
    for end in [e for e in ends if e < min(len(texts), MOST_TOKENS)] + [min(len(texts), MOST_TOKENS)]:
        parts.append(token_spans(texts[begin:end], credit[begin:end], scale))
        begin = end
    cut_off = f" … {len(texts) - begin} more tokens" if begin < len(texts) else ""
    border = "border-top:1px solid #d0d7de;padding:2px 0;white-space:pre-wrap"
    return f'<div style="{border}"><small>{i} {note}</small> {"<b> │ </b>".join(parts)}{cut_off}</div>'


def _ends(batch: Batch, i: int) -> list[int]:
    column = {Segments: "ends", Trajectories: "thought_ends"}.get(type(batch), "")
    return getattr(batch, column).row(i).tolist() if column else []


def _table(batch: Batch, rows: int) -> str:
    columns = {name: value for name, value in vars(batch).items() if isinstance(value, Jagged | list | torch.Tensor)}
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = (
        "".join(f"<td>{html.escape(visible(cut(_cell(value, i), 80)))}</td>" for value in columns.values())
        for i in range(rows)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any, i: int) -> str:
    row = value.row(i) if isinstance(value, Jagged) else value[i]
    row = row.tolist() if isinstance(row, torch.Tensor) else row
    numbers = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in (row if isinstance(row, list) else [row])]
    return " ".join(numbers)


Shown.viewer = staticmethod(as_html)
