"""Properties that right advantages keep when a batch is changed in a way that must not matter, or must.

No model and no gradient: a batch is changed, the function is called again, and the two results are compared. Batches
are drawn and made small by hypothesis, always the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from pipeline.app.audit.batch import Batch, Floats, make, stacked
from pipeline.app.audit.checks import Check, Finding, passed, skipped
from pipeline.app.audit.targets import AdvantageTarget

EXAMPLES = 60  # batches per check
REWARDS = (0.0, 1.0, 0.5, -1.0, 3.0)
_SETTINGS = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


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


@st.composite
def batches(draw: Any, shape: Shape, turns: bool = False, least_groups: int = 1, least_rows: int = 2) -> Batch:
    """Batches of one to three groups."""
    groups = draw(st.integers(least_groups, 3))
    size = draw(st.integers(least_rows, 4))
    sizes = [draw(st.integers(least_rows, 4)) if shape.uneven else size for _ in range(groups)]
    ids = [g for g, n in enumerate(sizes) for _ in range(n)]
    count = len(ids)
    rewards = draw(st.lists(st.sampled_from(REWARDS), min_size=count, max_size=count))
    rows = []
    for _ in range(count):
        if turns:
            row: list[int] = []
            for turn in range(draw(st.integers(1, 3))):
                row += ([-1] if turn else []) + [turn] * draw(st.integers(1, 2))
            rows.append(row)
        else:
            rows.append([0] * draw(st.integers(1, 3)))
    given = (
        [draw(st.lists(st.sampled_from(REWARDS[:3]), min_size=3, max_size=3)) for _ in range(count)] if turns else None
    )
    kinds = max(max(row) for row in rows) + 1
    batch = make(rewards, ids, turns=rows, turn_rewards=[g[:kinds] for g in given] if given else None)
    if shape.mixed and draw(st.booleans()):
        batch = batch.rows(np.array(draw(st.permutations(range(count)))))
    return batch


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


def search(target: AdvantageTarget, strategy: Any, case_of: Callable[[Batch, Any], Case | None]) -> Case | None:
    """The smallest batch whose case disagrees; None when there is none."""
    cases = st.tuples(strategy, st.randoms(use_true_random=False, note_method_calls=False))

    def wrong(drawn: Any) -> bool:
        case = _tried(case_of, *drawn)
        return case is not None and case.gap > 0

    try:
        drawn = find(cases, wrong, settings=_SETTINGS)
    except NoSuchExample:
        return None
    return _tried(case_of, *drawn)


def _tried(case_of: Callable[[Batch, Any], Case | None], batch: Batch, random: Any) -> Case | None:
    random.seed(0)
    try:
        return case_of(batch, random)
    except Exception:  # `contract` reports what the function raises
        return None


def judged(case: Case | None, meaning: str) -> Finding:
    """A finding with its counter-example."""
    if case is None:
        return passed()
    example = {
        "batch": case.batch.shown(),
        "change": case.change,
        "before": _rounded(case.before),
        "after": _rounded(case.after),
    }
    return Finding(
        verdict="fail", message=f"{case.change}: {meaning} by {case.gap:.3g}", example=example, size=case.gap
    )


def _rounded(values: Floats) -> list[list[float]]:
    return [[round(float(x), 4) for x in row] for row in values]


def _compare(
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


def row_order(target: AdvantageTarget) -> Finding:
    """Rows in another order."""
    shape = shape_of(target)

    def case(batch: Batch, random: Any) -> Case:
        if shape.mixed:
            order = np.array(random.sample(range(len(batch)), len(batch)))
        else:  # within groups
            size = int(batch.group_sizes[0])
            order = np.concatenate([g * size + np.arange(size)[::-1] for g in range(len(batch) // size)])
        back = np.argsort(order)
        return _compare(target, batch, batch.rows(order), f"rows in the order {order.tolist()}", back=back)

    return judged(search(target, batches(shape), case), "a row's advantage depends on its place")


def relabelled_groups(target: AdvantageTarget) -> Finding:
    """Groups with other ids."""
    if "groups" not in target.reads:
        return skipped("takes no group ids")

    def case(batch: Batch, _: Any) -> Case:
        return _compare(target, batch, batch.with_(groups=7 * (3 - batch.groups)), "group ids g became 7 · (3 − g)")

    return judged(search(target, batches(shape_of(target)), case), "an advantage depends on the ids of groups")


def other_groups(target: AdvantageTarget) -> Finding:
    """Rewards of another group of the same size."""
    shape = shape_of(target)
    even = Shape(uneven=False, mixed=shape.mixed, single=False)

    def case(batch: Batch, _: Any) -> Case:
        mine = batch.groups == batch.groups[0]
        rewards = np.where(mine, batch.rewards, 2 * batch.rewards + 1)
        return _compare(
            target, batch, batch.with_(rewards=rewards), "rewards r of the other groups became 2 r + 1", rows=mine
        )

    return judged(search(target, batches(even, least_groups=2), case), "rewards of other prompts move an advantage")


def uneven_groups(target: AdvantageTarget) -> Finding:
    """Groups of different sizes, together and alone."""
    shape = shape_of(target)
    if not shape.uneven:
        return skipped("takes groups of one size only" if "groups" in target.reads else "takes no group ids")

    def case(batch: Batch, _: Any) -> Case:
        mine = batch.groups == batch.groups[0]
        alone = target.advantages(batch.rows(mine))
        before = target.advantages(batch)
        after = before.copy()
        after[mine] = alone
        return Case(batch, f"group {batch.groups[0]} alone", before, after, batch.mask & mine[:, None])

    return judged(
        search(target, batches(shape, least_groups=2), case),
        "a group's advantages depend on which groups are beside it",
    )


def reward_shift(target: AdvantageTarget) -> Finding:
    """A constant added to all rewards of a group."""

    def case(batch: Batch, _: Any) -> Case:
        mine = batch.groups == batch.groups[0]
        other = batch.with_(rewards=batch.rewards + 2.0 * mine)
        return _compare(target, batch, other, f"2 was added to every reward of group {batch.groups[0]}")

    return judged(search(target, batches(shape_of(target)), case), "an advantage depends on a constant in the rewards")


def reward_scale(target: AdvantageTarget) -> Finding:
    """All rewards scaled: advantages stay, or are scaled too."""

    def case(batch: Batch, _: Any) -> Case:
        scaled = batch.with_(rewards=4.0 * batch.rewards, turn_rewards=4.0 * batch.turn_rewards)
        before, after = target.advantages(batch), target.advantages(scaled)
        # Standard deviations with an epsilon are scaled by a little less than their rewards.
        degree = 0 if np.allclose(before, after, rtol=1e-2, atol=1e-4) else 1
        return Case(batch, "every reward times 4", 4.0**degree * before, after, batch.mask)

    return judged(
        search(target, batches(shape_of(target)), case), "advantages neither stay nor are 4 times as large; they differ"
    )


def invalid_rows(target: AdvantageTarget) -> Finding:
    """The reward of a row that was rejected."""
    by_flag = "valid" in target.reads
    if not by_flag and "mask" not in target.reads:
        return skipped("takes neither `valid` nor a mask, so it cannot know of rejected rows")

    def case(batch: Batch, _: Any) -> Case:
        first = np.arange(len(batch)) == 0
        rejected = (
            batch.with_(valid=~first) if by_flag else batch.with_(turns=np.where(first[:, None], -1, batch.turns))
        )
        other = rejected.with_(rewards=np.where(first, 3.0 - rejected.rewards, rejected.rewards))
        how = "marked as invalid" if by_flag else "masked whole"
        return _compare(target, rejected, other, f"row 0 is {how}, and its reward r became 3 − r")

    shape = shape_of(target)
    return judged(
        search(target, batches(Shape(shape.uneven, shape.mixed, False), least_rows=3), case),
        "the reward of a rejected row moves advantages",
    )


def no_signal(target: AdvantageTarget) -> Finding:
    """Groups whose rewards are equal, and groups of one."""
    shape = shape_of(target)
    equal = make([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1])
    result = target.advantages(equal)
    if not np.isfinite(result).all() or np.abs(result).max() > 1e-3:
        bad = _rounded(result)
        example = {"batch": equal.shown(), "advantages": bad}
        size = float(np.abs(np.nan_to_num(result, nan=np.inf)).max())
        return Finding(verdict="fail", message="groups with equal rewards have advantages", example=example, size=size)
    if shape.single:
        single = make([1.0, 0.0, 1.0], [0, 0, 1])
        result = target.advantages(single)
        if not np.isfinite(result).all():
            example = {"batch": single.shown(), "advantages": _rounded(result)}
            return Finding(verdict="fail", message="a group of one has no number as advantage", example=example)
    return passed()


def padding(target: AdvantageTarget) -> Finding:
    """More padding."""

    def case(batch: Batch, _: Any) -> Case:
        return _compare(target, batch, batch.padded(batch.width + 3), "three more tokens of padding")

    return judged(search(target, batches(shape_of(target)), case), "an advantage depends on the width of the batch")


def credit_outside(target: AdvantageTarget) -> Finding:
    """Credit on tokens that the policy did not choose."""
    if "mask" not in target.reads:
        return skipped("takes no mask")
    shape = shape_of(target)

    def case(batch: Batch, _: Any) -> Case:
        result = target.advantages(batch)
        return Case(batch, "observations and padding", result, np.where(batch.mask, result, 0.0), ~batch.mask)

    return judged(search(target, batches(shape, turns=True), case), "tokens outside the mask have credit")


def credited_turns(target: AdvantageTarget) -> Finding:
    """Turns that never get any credit."""
    rows = [[0, 0, -1, 1, 1, -1, 2, 2]] * 4
    found = np.zeros(3)
    for rewards in ([1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]):
        batch = make(rewards, [0, 0, 0, 0], turns=rows, turn_rewards=[[0.5 * i, 0.0, 0.2 * i] for i in range(4)])
        result = np.abs(np.nan_to_num(target.advantages(batch)))
        found += [result[batch.turns == turn].sum() for turn in range(3)]
    if not found.any():
        return Finding(verdict="fail", message="no token has credit, whatever the rewards", size=3.0)
    empty = [turn for turn in range(3) if not found[turn]]
    if not empty:
        return passed()
    example = {"batch": batch.shown(), "advantages": _rounded(result)}
    message = f"turns {', '.join(map(str, empty))} of 3 never have credit, although all led to the outcome"
    return Finding(verdict="fail", message=message, example=example, size=len(empty))


def monotone(target: AdvantageTarget) -> Finding:
    """A row's own reward raised."""

    def case(batch: Batch, _: Any) -> Case:
        higher = batch.rewards.copy()
        higher[0] += 1.0
        before, after = target.advantages(batch), target.advantages(batch.with_(rewards=higher))
        first = batch.mask & (np.arange(len(batch)) == 0)[:, None]
        lower = np.where(first & (after < before - 1e-4), before, after)
        return Case(batch, "the reward of row 0 was raised by 1", lower, after, first)

    return judged(search(target, batches(shape_of(target)), case), "a higher reward lowers the row's advantage")


def idle_settings(target: AdvantageTarget) -> Finding:
    """Settings that change nothing."""
    changes = {name: changed for name, value in target.settings.items() if (changed := _changed(value)) is not None}
    if not changes or target.with_settings is None:
        return skipped("has no settings that are numbers or switches")
    shape = shape_of(target)
    tried = [
        make([1.0, 0.0, 0.5, 3.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1, 1, 1], lengths=[1, 2, 3, 4, 4, 3, 2, 1]),
        make([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], turns=[[0, 0, -1, 1]] * 4, turn_rewards=[[0.5, 1.0]] * 4),
        make([0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0], truncated=[True, False, True, False], lengths=[6, 1, 6, 2]),
    ]
    if shape.single:
        tried.append(make([1.0, 0.0, 1.0], [0, 0, 1]))
    idle = []
    for name, values in changes.items():
        if not any(_moves(target, {name: value}, tried) for value in values):
            idle.append(name)
    if not idle:
        return passed(f"{len(changes)} settings")
    text = ", ".join(f"{name} ({target.settings[name]} → {changes[name][0]})" for name in idle)
    return Finding(
        verdict="fail", message=f"changing {text} changes no advantage", size=len(idle), example={"settings": idle}
    )


def _changed(value: Any) -> list[Any] | None:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 3, 0]
    if isinstance(value, float):
        return [2 * value + 0.5, value / 4, 0.0]
    return None


def _moves(target: AdvantageTarget, change: dict[str, Any], tried: list[Batch]) -> bool:
    assert target.with_settings is not None
    for batch in tried:
        try:
            if not np.array_equal(target.advantages(batch), target.with_settings(change).advantages(batch)):
                return True
        except Exception:  # a refused value has an effect
            return True
    return False


def copies(target: AdvantageTarget) -> Finding:
    """The same groups once more, under other ids."""
    shape = shape_of(target)

    def case(batch: Batch, _: Any) -> Case:
        twin = batch.with_(groups=batch.groups + 10)
        return _compare(target, batch, stacked([batch, twin]), "the same groups once more, under other ids")

    return judged(search(target, batches(shape), case), "advantages depend on the number of groups in the batch")


METAMORPHIC = (
    Check(name="row_order", layer="metamorphic", title="The order of rows does not matter.", run=row_order),
    Check(name="relabelled_groups", layer="metamorphic", title="Ids of groups are names only.", run=relabelled_groups),
    Check(name="other_groups", layer="metamorphic", title="Other prompts' rewards do not matter.", run=other_groups),
    Check(name="uneven_groups", layer="metamorphic", title="Groups may differ in size.", run=uneven_groups),
    Check(name="copies", layer="metamorphic", title="The number of groups does not matter.", run=copies),
    Check(name="reward_shift", layer="metamorphic", title="A constant in the rewards cancels.", run=reward_shift),
    Check(name="reward_scale", layer="metamorphic", title="Scaled rewards scale credit, or do not.", run=reward_scale),
    Check(name="invalid_rows", layer="metamorphic", title="Rejected rows move no sibling.", run=invalid_rows),
    Check(name="no_signal", layer="metamorphic", title="Equal rewards give no credit.", run=no_signal),
    Check(name="padding", layer="metamorphic", title="Padding does not matter.", run=padding),
    Check(name="credit_outside", layer="metamorphic", title="Only chosen tokens have credit.", run=credit_outside),
    Check(name="credited_turns", layer="metamorphic", title="Every turn can get credit.", run=credited_turns),
    Check(name="monotone", layer="metamorphic", title="A higher reward is never worse.", run=monotone),
    Check(name="idle_settings", layer="metamorphic", title="Every setting has an effect.", run=idle_settings),
)
