"""Formulas with their numbers, as the components of this folder state them in `explain`."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit

MOST_REWARDS = 32  # of a group that are listed
MOST_SEGMENTS = 60  # of a response that are listed
INVALID = "its reward is invalid, so it gets no credit"


def decimal(value: float) -> str:
    """A number as a formula shows it: three significant digits, a true minus, no zero before the point.

    >>> decimal(0.4330127), decimal(-1.0), decimal(1e-6), decimal(1234.5), decimal(0.9999)
    ('.433', '−1', '1e-06', '1234', '1')
    """
    size = abs(value)
    text = f"{size:.0f}" if size >= 100 else f"{size:.3g}".removeprefix("0") or "0"
    return ("−" if value < 0 and text != "0" else "") + text


def signed(value: float) -> str:
    """The same with a plus before positive numbers.

    >>> signed(1.732), signed(-0.577), signed(0.0)
    ('+1.73', '−.577', '0')
    """
    return ("+" if value > 0 and decimal(value) != "0" else "") + decimal(value)


def minus(left: float, right: float) -> str:
    """A difference, not computed.

    >>> minus(1.0, 0.25), minus(0.5, -0.25)
    ('1 − .25', '.5 − (−.25)')
    """
    return f"{decimal(left)} − {decimal(right) if right >= 0 else f'({decimal(right)})'}"


def rewards_of_groups(reward: Tensor, valid: Tensor, group: Tensor, name: str = "rewards of its group") -> list[str]:
    """The list of the rewards of each row's group, as text per row; invalid ones are named."""
    members: dict[int, list[str]] = {}
    for g, r, v in zip(group.tolist(), reward.tolist(), valid.tolist(), strict=True):
        members.setdefault(g, []).append(decimal(r) if v else "invalid")
    texts = {}
    for g, items in members.items():
        rest = f" … ({len(items)} in all)" if len(items) > MOST_REWARDS else ""
        texts[g] = f"{name}: {', '.join(items[:MOST_REWARDS])}{rest}"
    return [texts[g] for g in group.tolist()]


def lines_of_segments(segments: Jagged, head: str, line: Callable[[int], str]) -> list[str]:
    """Per row: `head`, then a numbered line per segment.

    Args:
        segments: any Jagged with one entry per segment.
        head: the formula.
        line: text of the segment at a place of `segments.values`.
    """
    offsets = segments.offsets.tolist()
    texts = []
    for begin, end in pairwise(offsets):
        shown = range(begin, min(end, begin + MOST_SEGMENTS))
        rest = [f"… {end - begin - MOST_SEGMENTS} more segments"] if end - begin > MOST_SEGMENTS else []
        texts.append("\n".join([head, *(f"segment {p - begin + 1}: {line(p)}" for p in shown), *rest]))
    return texts


def lines_of_changed_credit(
    head: str, inputs: Mapping[str, Any], left: Credit, line: Callable[[float, float, float, float], str]
) -> list[str]:
    """`lines_of_segments` of a component that changes the credit of each segment by its values; invalid rows say so.

    Args:
        head: the formula.
        inputs: the component's rewards, values, segments and credit, by name.
        left: its output.
        line: text from the value before a segment, the value after it, the credit that arrived and the credit that
            left, both of the segment's last token.
    """
    values = inputs["values"].values
    arrived = inputs["credit"].advantage
    ends = inputs["segments"].ends
    last_token = (ends.values + arrived.offsets[:-1][ends.row_ids] - 1).tolist()
    first_value = (ends.positions + values.offsets[:-1][ends.row_ids]).tolist()

    def numbers(place: int) -> str:
        before, after = values.values[first_value[place] : first_value[place] + 2].tolist()
        token = last_token[place]
        return line(before, after, float(arrived.values[token]), float(left.advantage.values[token]))

    lines = lines_of_segments(ends, head, numbers)
    return [text if ok else INVALID for text, ok in zip(lines, inputs["rewards"].valid.tolist(), strict=True)]
