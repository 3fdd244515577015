"""The smallest batch on which a property of advantages does not hold.

First some batches are drawn, always the same ones; only if one of them fails does hypothesis look for the smallest.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, Floats, make
from creditgraph.pipeline.app.audit.checks import Finding, passed, skipped
from creditgraph.pipeline.app.audit.targets import AdvantageTarget
from creditgraph.pipeline.core.errors import raised_text

DRAWN = 32  # batches per check
LEAST = 8  # of them that the function must take
EXAMPLES = 100  # batches among which hypothesis looks for a smaller one
REWARDS = (0.0, 1.0, 0.5, -1.0, 3.0)


def differ(a: Floats, b: Floats) -> float:
    """Largest difference beyond rounding of float32; 0 if there is none, infinite where only one is a number."""
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    gap = np.abs(np.nan_to_num(a) - np.nan_to_num(b))
    far = gap > 1e-5 + 2e-4 * np.abs(np.nan_to_num(a))
    return float(gap[far].max(initial=0.0))


@dataclass(frozen=True)
class Shape:
    """Which batches a function takes.

    Attributes:
        uneven: groups of different sizes.
        mixed: rows of different groups in any order.
        single: groups of one row.
    """

    uneven: bool
    mixed: bool
    single: bool


def shape_of(target: AdvantageTarget) -> Shape:
    """What the function takes; one without group ids needs equal groups, one after the other."""
    if "groups" not in target.reads:
        return Shape(uneven=False, mixed=False, single=False)

    def takes(batch: Batch) -> bool:
        try:
            target.advantages(batch)
        except Exception:  # what a function from outside raises is its refusal
            return False
        return True

    return Shape(
        uneven=takes(make([1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 1])),
        mixed=takes(make([1.0, 0.0, 0.0, 1.0], [0, 1, 0, 1])),
        single=takes(make([1.0, 0.0, 1.0], [0, 0, 1])),
    )


@dataclass(frozen=True)
class Kind:
    """Which batches a check needs.

    Attributes:
        shape: what the function takes.
        turns: rows of one to three turns with rewards of their own.
        groups, rows: least number of groups, and of rows in each.
    """

    shape: Shape
    turns: bool = False
    groups: int = 1
    rows: int = 2


@dataclass(frozen=True)
class Draws:
    """Where the numbers of a batch are from: a keyed generator, or hypothesis.

    Attributes:
        integer: a number from the first to the last.
        order: a permutation of 0 … n − 1.
    """

    integer: Callable[[int, int], int]
    order: Callable[[int], list[int]]

    def rewards(self, count: int, of: int = len(REWARDS)) -> list[float]:
        """Some of the first `of` rewards."""
        return [REWARDS[self.integer(0, of - 1)] for _ in range(count)]


def batch_of(draws: Draws, kind: Kind) -> Batch:
    """A batch of one to three groups of two to four rows of one to three tokens."""
    groups = draws.integer(kind.groups, 3)
    size = draws.integer(kind.rows, 4)
    sizes = [draws.integer(kind.rows, 4) if kind.shape.uneven else size for _ in range(groups)]
    ids = [g for g, n in enumerate(sizes) for _ in range(n)]
    rewards = draws.rewards(len(ids))
    rows = []
    for _ in ids:
        row: list[int] = []
        for turn in range(draws.integer(1, 3) if kind.turns else 1):
            row += ([-1] if turn else []) + [turn] * draws.integer(1, 2 if kind.turns else 3)
        rows.append(row)
    given = [draws.rewards(max(row) + 1, of=3) for row in rows] if kind.turns else None
    batch = make(rewards, ids, turns=rows, turn_rewards=given)
    if kind.shape.mixed and draws.integer(0, 1):
        batch = batch.rows(np.array(draws.order(len(ids))))
    return batch


@cache
def drawn(kind: Kind) -> tuple[Batch, ...]:
    """The batches that every function is tried on."""
    rng = np.random.Generator(np.random.Philox(key=0))
    draws = Draws(lambda low, high: int(rng.integers(low, high + 1)), lambda n: rng.permutation(n).tolist())
    return tuple(batch_of(draws, kind) for _ in range(DRAWN))


@dataclass(frozen=True)
class Case:
    """A batch, what was changed in it, and the two results that should agree."""

    batch: Batch
    change: str
    before: Floats
    after: Floats
    mask: Any

    @property
    def gap(self) -> float:
        """How far they are apart."""
        return differ(np.where(self.mask, self.before, 0.0), np.where(self.mask, self.after, 0.0))


CaseOf = Callable[[Batch, random.Random], Case | None]


@dataclass(frozen=True)
class Unjudged:
    """Too few batches could be tried.

    Attributes:
        raised: text of the first exception.
        count: batches on which the function raised.
    """

    raised: str
    count: int


def search(kind: Kind, case_of: CaseOf) -> Case | Unjudged | None:
    """The smallest batch whose case disagrees; None when there is none, Unjudged when fewer than `LEAST` were tried."""
    raised = []
    for batch in drawn(kind):
        try:
            case = case_of(batch, random.Random(0))
        except Exception as error:  # what a function from outside raises is its refusal
            raised.append(raised_text(error))
            continue
        if _wrong(case):
            return _smallest(kind, case_of) or case
    return Unjudged(raised[0], len(raised)) if DRAWN - len(raised) < LEAST else None


def _smallest(kind: Kind, case_of: CaseOf) -> Case | None:
    # Imported here: a function that passes needs no hypothesis.
    from hypothesis import HealthCheck, find, settings
    from hypothesis import strategies as st
    from hypothesis.errors import NoSuchExample

    @st.composite
    def batches(draw: Any) -> Batch:
        draws = Draws(lambda low, high: draw(st.integers(low, high)), lambda n: list(draw(st.permutations(range(n)))))
        return batch_of(draws, kind)

    quiet = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return _tried(case_of, find(batches(), lambda batch: _wrong(_tried(case_of, batch)), settings=quiet))
    except NoSuchExample:
        return None


def _wrong(case: Case | None) -> bool:
    return case is not None and case.gap > 0


def _tried(case_of: CaseOf, batch: Batch) -> Case | None:
    try:
        return case_of(batch, random.Random(0))
    except Exception:  # `contract` reports what the function raises
        return None


def judged(case: Case | Unjudged | None, meaning: str) -> Finding:
    """A finding with its counter-example."""
    if case is None:
        return passed()
    if isinstance(case, Unjudged):
        return skipped(f"not judged: raises {case.raised} on {case.count} of {DRAWN} batches")
    example = {
        "batch": case.batch.shown(),
        "change": case.change,
        "before": rounded(case.before),
        "after": rounded(case.after),
    }
    return Finding(
        verdict="fail", message=f"{case.change}: {meaning} by {case.gap:.3g}", example=example, size=case.gap
    )


def rounded(values: Floats) -> list[list[float]]:
    """For a counter-example."""
    return [[round(float(x), 4) for x in row] for row in values]


def compare(
    target: AdvantageTarget, batch: Batch, other: Batch, change: str, rows: Any = None, back: Any = None
) -> Case:
    """Advantages of a batch against those of a changed one.

    Args:
        target: the function.
        batch: the batch.
        other: the changed batch.
        change: what was changed.
        rows: bool [N], rows that must agree; None for all.
        back: int [N], the row of `other` that is row i of the batch; None for the same order.
    """
    before = target.advantages(batch)
    after = target.advantages(other)[np.arange(len(batch)) if back is None else back][:, : batch.width]
    mask = batch.mask if rows is None else batch.mask & np.asarray(rows)[:, None]
    return Case(batch, change, before, after, mask)
