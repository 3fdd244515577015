"""Checks of recorded credit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Bools
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.records import Records

_DIFFERS = "credit differs within responses, so a group has no one advantage of each to compare"


def numbers(records: Records) -> Finding:
    """NaN and infinity."""
    bad: Any = ~np.isfinite(records.advantages) & records.inside
    if not bad.any():
        note = f"; {records.note}" if records.note else ""
        return passed(f"{len(records.rewards)} rows, {int(records.mask.sum())} trained tokens{note}")
    row = int(bad.any(1).nonzero()[0][0])
    example = {"row": row, "advantages": [None if not np.isfinite(x) else x for x in records.advantages[row]]}
    message = f"{int(bad.sum())} tokens of {int(bad.any(1).sum())} rows have no number as advantage"
    return Finding(verdict="fail", message=message, example=example, size=float(bad.sum()))


def outside(records: Records) -> Finding:
    """Credit outside the mask."""
    leak = ~records.mask & (np.nan_to_num(records.advantages) != 0)
    if records.mask.sum() == records.inside.sum():
        return skipped("every recorded token is trained")
    if not leak.any():
        return passed()
    row = int(leak.any(1).nonzero()[0][0])
    example = {"row": row, "advantages": records.advantages[row].tolist(), "mask": records.mask[row].tolist()}
    message = f"{int(leak.sum())} tokens that are not trained have credit, which a learner that forgets the mask uses"
    return Finding(verdict="fail", message=message, example=example, size=float(leak.sum()))


def turns(records: Records) -> Finding:
    """Turns without credit, in rows that have some."""
    last = int(records.turns.max(initial=0))
    if not last:
        return skipped("one turn per row, or no column `turn`")
    credited = (records.mask & (records.advantages != 0)).any(1)
    empty = []
    for turn in range(last + 1):
        here = (records.turns == turn) & credited[:, None]
        if here.any() and not (records.advantages[here] != 0).any():
            empty.append(turn)
    if not empty:
        return passed(f"{last + 1} turns")
    message = f"turns {', '.join(map(str, empty))} of {last + 1} have no credit in any row"
    return Finding(verdict="fail", message=message, example={"turns": empty}, size=len(empty))


def baseline(records: Records) -> Finding:
    """Responses of a group add up to nothing, as they do against the mean of their rewards."""
    worst, by_rows, judged = 0.0, False, False
    example: dict[str, Any] = {}
    for group, rows in records.members():
        if not records.alike(rows):
            continue
        judged = True
        own = records.per_row[rows]
        first = records.first_rows(rows)
        spread = float(np.abs(own).max())
        # Against the mean of the others, of all, and divided by whatever a group has: the sum is 0.
        gaps = [abs(float(x.mean())) / spread if spread > 1e-9 else 0.0 for x in (own[first], own)]
        by_rows = by_rows or gaps[1] <= 1e-3 < gaps[0]
        if min(gaps) > max(worst, 1e-3):
            worst = min(gaps)
            rewards = records.rewards[rows]
            example = {"group": group, "rewards": rewards[first].tolist(), "advantages": own[first].tolist()}
    if not judged:
        return skipped(_DIFFERS)
    if not example:
        return passed("the mean is one over rows, so an episode of more rows weighs more" if by_rows else "")
    return Finding(
        verdict="fail",
        message=f"the advantages of group {example['group']} have a mean of {worst:.2g} of the largest: its baseline "
        "is not the mean of its rewards (other groups, or rejected rows, are in it)",
        example=example,
        size=worst,
    )


def order(records: Records) -> Finding:
    """Within a group, a response with a higher reward has no lower advantage."""
    wrong = pairs = 0
    judged = False
    example: dict[str, Any] = {}
    for group, rows in records.members():
        if not records.alike(rows):
            continue
        judged = True
        first = records.first_rows(rows)
        reward, own = records.rewards[rows][first], records.per_row[rows][first]
        higher = reward[:, None] > reward[None, :] + 1e-9
        worse = higher & (own[:, None] < own[None, :] - 1e-6)
        pairs += int(higher.sum())
        wrong += int(worse.sum())
        if worse.any() and not example:
            example = {"group": group, "rewards": reward.tolist(), "advantages": own.tolist()}
    if not pairs:
        return skipped("no group has rewards that differ" if judged else _DIFFERS)
    if not wrong:
        return passed(f"{pairs} pairs")
    message = f"in {wrong} of {pairs} pairs of a group the response with the higher reward has the lower advantage"
    return Finding(verdict="fail", message=message, example=example, size=wrong / pairs)


def invalid(records: Records) -> Finding:
    """Rejected rows have no credit."""
    if records.valid.all():
        return skipped("no row is marked as invalid")
    leak: Bools = ~records.valid & np.asarray((records.mask & (records.advantages != 0)).any(axis=1))
    if not leak.any():
        return passed(f"{int((~records.valid).sum())} rejected rows")
    row = int(leak.nonzero()[0][0])
    example = {"row": row, "advantages": records.advantages[row].tolist()}
    message = f"{int(leak.sum())} of {int((~records.valid).sum())} rejected rows have credit"
    return Finding(verdict="fail", message=message, example=example, size=float(leak.sum()))


def silent(records: Records) -> Finding:
    """Groups whose rewards differ and that have no credit."""
    mute = []
    for group, rows in records.members():
        differ = np.ptp(records.rewards[rows]) > 1e-9
        if differ and not (np.abs(records.advantages[rows]) > 1e-9).any():
            mute.append(group)
    if not mute:
        return passed()
    message = f"{len(mute)} groups whose rewards differ have no credit (first: group {mute[0]})"
    return Finding(verdict="fail", message=message, example={"groups": mute[:20]}, size=len(mute))


def _of_credit(run: Callable[[Records], Finding], groups: bool = False) -> Callable[[Records], Finding]:
    """A check that needs advantages, rewards and groups; with `groups`, several rows of one."""

    def judged(records: Records) -> Finding:
        if not records.credited:
            return skipped("no advantages, rewards and groups are recorded")
        if not records.mask.any():
            return skipped("no token is trained on")
        if groups and len(np.unique(records.groups)) == len(records.groups) > 1:
            return skipped(
                "not judged: each row has a group id of its own; name the column that rows of one prompt share, "
                "--columns group=COLUMN (if there is none, each rollout is its own group, and has no baseline)"
            )
        return run(records)

    return judged


CREDIT = tuple(
    Check(name=name, layer="records", title=title, run=run)
    for name, title, run in (
        ("records_numbers", "Every advantage is a number.", _of_credit(numbers)),
        ("records_outside", "Only trained tokens have credit.", _of_credit(outside)),
        ("records_turns", "Every turn has credit.", _of_credit(turns)),
        ("records_baseline", "A group's advantages add up to nothing.", _of_credit(baseline, groups=True)),
        ("records_order", "A higher reward is not worse.", _of_credit(order, groups=True)),
        ("records_invalid", "Rejected rows have no credit.", _of_credit(invalid)),
        ("records_silent", "Groups with a signal have credit.", _of_credit(silent, groups=True)),
    )
)
