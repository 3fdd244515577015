"""Properties that right advantages keep when a batch is changed in a way that must not matter, or must.

No model and no gradient: a batch is changed, the function is called again, and the two results are compared.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Batch, make, stacked
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.search import Case, Kind, Shape, compare, judged, rounded, search, shape_of
from creditgraph.pipeline.app.audit.targets import AdvantageTarget


def row_order(target: AdvantageTarget) -> Finding:
    """Rows in another order."""
    shape = shape_of(target)

    def case(batch: Batch, random: Random) -> Case:
        if shape.mixed:
            order = np.array(random.sample(range(len(batch)), len(batch)))
        else:  # within groups
            size = int(batch.group_sizes[0])
            order = np.concatenate([g * size + np.arange(size)[::-1] for g in range(len(batch) // size)])
        back = np.argsort(order)
        return compare(target, batch, batch.rows(order), f"rows in the order {order.tolist()}", back=back)

    return judged(search(Kind(shape), case), "a row's advantage depends on its place")


def relabelled_groups(target: AdvantageTarget) -> Finding:
    """Groups with other ids."""
    if "groups" not in target.reads:
        return skipped("takes no group ids")

    def case(batch: Batch, _: Random) -> Case:
        return compare(target, batch, batch.with_(groups=7 * (3 - batch.groups)), "group ids g became 7 · (3 − g)")

    return judged(search(Kind(shape_of(target)), case), "an advantage depends on the ids of groups")


def other_groups(target: AdvantageTarget) -> Finding:
    """Rewards of another group of the same size."""
    shape = shape_of(target)
    even = Shape(uneven=False, mixed=shape.mixed, single=False)

    def case(batch: Batch, _: Random) -> Case:
        mine = batch.groups == batch.groups[0]
        rewards = np.where(mine, batch.rewards, 2 * batch.rewards + 1)
        return compare(
            target, batch, batch.with_(rewards=rewards), "rewards r of the other groups became 2 r + 1", rows=mine
        )

    return judged(search(Kind(even, groups=2), case), "rewards of other prompts move an advantage")


def uneven_groups(target: AdvantageTarget) -> Finding:
    """Groups of different sizes, together and alone."""
    shape = shape_of(target)
    if not shape.uneven:
        return skipped("takes groups of one size only" if "groups" in target.reads else "takes no group ids")

    def case(batch: Batch, _: Random) -> Case:
        mine = batch.groups == batch.groups[0]
        alone = target.advantages(batch.rows(mine))
        before = target.advantages(batch)
        after = before.copy()
        after[mine] = alone
        return Case(batch, f"group {batch.groups[0]} alone", before, after, batch.mask & mine[:, None])

    return judged(
        search(Kind(shape, groups=2), case),
        "a group's advantages depend on which groups are beside it",
    )


def reward_shift(target: AdvantageTarget) -> Finding:
    """A constant added to all rewards of a group, which a critic knows of."""
    target = target.undiscounted

    def case(batch: Batch, _: Random) -> Case:
        mine = batch.groups == batch.groups[0]
        more = "every reward and value" if target.has_critic else "every reward"
        return compare(target, batch, batch.shifted(2.0 * mine), f"2 was added to {more} of group {batch.groups[0]}")

    return judged(search(Kind(shape_of(target)), case), "an advantage depends on a constant in the rewards")


def reward_scale(target: AdvantageTarget) -> Finding:
    """All rewards scaled: advantages stay, or are scaled too."""

    def case(batch: Batch, _: Random) -> Case:
        before, after = target.advantages(batch), target.advantages(batch.scaled(4.0))
        # Standard deviations with an epsilon are scaled by a little less than their rewards.
        stays = np.allclose(before, after, rtol=1e-2, atol=1e-4)
        return Case(batch, "every reward times 4", after if stays else 4.0 * before, after, batch.mask)

    return judged(search(Kind(shape_of(target)), case), "advantages neither stay nor are 4 times as large; they differ")


def invalid_rows(target: AdvantageTarget) -> Finding:
    """The reward of a row that was rejected."""
    by_flag = "valid" in target.reads
    if not by_flag and "mask" not in target.reads:
        return skipped("takes neither `valid` nor a mask, so it cannot know of rejected rows")

    def case(batch: Batch, _: Random) -> Case:
        first = np.arange(len(batch)) == 0
        rejected = (
            batch.with_(valid=~first) if by_flag else batch.with_(turns=np.where(first[:, None], -1, batch.turns))
        )
        other = rejected.with_(rewards=np.where(first, 3.0 - rejected.rewards, rejected.rewards))
        how = "marked as invalid" if by_flag else "masked whole"
        return compare(target, rejected, other, f"row 0 is {how}, and its reward r became 3 − r")

    shape = shape_of(target)
    return judged(
        search(Kind(Shape(shape.uneven, shape.mixed, False), rows=3), case),
        "its reward stays in its group's mean, and moves the others' advantages (--declare masked_rows_count where the "
        "mask is of the loss only)",
    )


def truncated_rows(target: AdvantageTarget) -> Finding:
    """The flag of a row that ran out of tokens, and the reward of one that has no credit for it."""
    if "truncated" not in target.reads:
        return skipped("is not told which rows are truncated")
    changed = False

    def case(batch: Batch, _: Random) -> Case:
        nonlocal changed
        first = np.arange(len(batch)) == 0
        cut = batch.with_(truncated=first)
        other = cut.with_(rewards=np.where(first, 3.0 - cut.rewards, cut.rewards))
        before = target.advantages(cut)
        changed = changed or not np.array_equal(before, target.advantages(batch))
        how = "row 0 is truncated and has no credit, and its reward r became 3 − r"
        # A row that keeps its credit is one of the group, as with a penalty for its length.
        excluded = not np.any(before[0][batch.mask[0]]) and not np.any(target.advantages(other)[0][batch.mask[0]])
        return compare(target, cut, other, how, rows=None if excluded else np.zeros(len(batch), dtype=bool))

    shape = shape_of(target)
    kind = Kind(Shape(shape.uneven, shape.mixed, False), rows=3)
    finding = judged(search(kind, case), "the reward of a truncated row moves the others' advantages")
    if finding.verdict == "pass" and not changed:
        return Finding(verdict="fail", message="which rows are truncated changes nothing", size=1.0)
    return finding


def no_signal(target: AdvantageTarget) -> Finding:
    """Groups whose rewards are equal, as a critic knows, and groups of one."""
    shape, target = shape_of(target), target.undiscounted
    # Of .1 and 1/3 in float32 the mean of a group is another number: a small epsilon makes noise a signal.
    for size, rewards in ((3, (1.0, 0.0)), (3, (0.1, 1 / 3)), (5, (0.1, 1 / 3)), (7, (0.1, 1 / 3))):
        outcomes = [rewards[0]] * size + [rewards[1]] * size
        equal = make(outcomes, [0] * size + [1] * size, values=[[r] * 3 for r in outcomes])
        result = target.advantages(equal)
        if not np.isfinite(result).all() or np.abs(result).max() > (1e-3 if rewards[0] == 1 else 0.05):
            example = {"batch": equal.shown(), "advantages": rounded(result)}
            message = f"groups of {size} with equal rewards {rewards[0]:.3g} and {rewards[1]:.3g} have advantages"
            size_of = float(np.abs(np.nan_to_num(result, nan=np.inf)).max())
            return Finding(verdict="fail", message=message, example=example, size=size_of)
    if shape.single:
        single = make([1.0, 0.0, 1.0], [0, 0, 1])
        result = target.advantages(single)
        if not np.isfinite(result).all():
            example = {"batch": single.shown(), "advantages": rounded(result)}
            return Finding(verdict="fail", message="a group of one has no number as advantage", example=example)
    return passed()


def padding(target: AdvantageTarget) -> Finding:
    """More padding."""

    def case(batch: Batch, _: Random) -> Case:
        return compare(target, batch, batch.padded(batch.width + 3), "three more tokens of padding")

    return judged(search(Kind(shape_of(target)), case), "an advantage depends on the width of the batch")


def credit_outside(target: AdvantageTarget) -> Finding:
    """Credit on tokens that the policy did not choose."""
    if "mask" not in target.reads:
        return skipped("takes no mask")
    shape = shape_of(target)

    def case(batch: Batch, _: Random) -> Case:
        result = target.advantages(batch)
        return Case(batch, "observations and padding", result, np.where(batch.mask, result, 0.0), ~batch.mask)

    return judged(search(Kind(shape, turns=True), case), "tokens outside the mask have credit")


def observations(target: AdvantageTarget) -> Finding:
    """One more token of an observation."""
    if not {"mask", "turns"} & target.reads:
        return skipped("is not told which tokens are observations")

    def of(tokens: int) -> Batch:
        row = [0, 0, *[-1] * tokens, 1]
        between = [[0.1 * i, 0.3, *[0.2] * tokens, 0.5] for i in range(4)]
        given = [[0.5, 1.0], [0.0, 0.5], [0.0, 0.0], [1.0, 0.0]]
        return make([1.0, 0.0, 0.0, 1.0], [0] * 4, turns=[row] * 4, turn_rewards=given, values=between)

    short, long = of(1), of(3)
    before = target.advantages(short)
    after = before.copy()
    after[short.mask] = target.advantages(long)[long.mask]
    case = Case(short, "observations of one token became three", before, after, short.mask)
    if not case.gap:
        return passed()
    finding = judged(case, "credit depends on how long an observation is")
    if not target.has_critic:
        return finding
    return dataclasses.replace(
        finding, likely="GAE steps through tokens of observations, which decays it or reads their V"
    )


def credited_turns(target: AdvantageTarget) -> Finding:
    """Turns that never get any credit."""
    rows = [[0, 0, -1, 1, 1, -1, 2, 2]] * 4
    found = np.zeros(3)
    results = []
    for rewards in np.eye(4)[:3].tolist():  # one best row, without which pass@k gives nothing
        batch = make(rewards, [0, 0, 0, 0], turns=rows, turn_rewards=[[0.5 * i, 0.0, 0.2 * i] for i in range(4)])
        results.append(np.nan_to_num(target.advantages(batch)))
        # The same rewards on other rows must move it: a constant, such as one that whitening adds, is no credit.
        moved = np.abs(results[-1] - results[0])
        found += [moved[batch.turns == turn].max() > 1e-6 for turn in range(3)]
    result = results[-1]
    if not found.any():
        return Finding(verdict="fail", message="no token has credit, whatever the rewards", size=3.0)
    empty = [turn for turn in range(3) if not found[turn]]
    if not empty:
        return passed()
    example = {"batch": batch.shown(), "advantages": rounded(result)}
    message = f"turns {', '.join(map(str, empty))} of 3 never have credit, although all led to the outcome"
    return Finding(verdict="fail", message=message, example=example, size=len(empty))


def monotone(target: AdvantageTarget) -> Finding:
    """A row's own reward raised."""

    def case(batch: Batch, _: Random) -> Case:
        higher = batch.rewards.copy()
        higher[0] += 1.0
        before, after = target.advantages(batch), target.advantages(batch.with_(rewards=higher))
        first = batch.mask & (np.arange(len(batch)) == 0)[:, None]
        if target.has_critic:  # discounted by λ a reward moves the last tokens most, and whitening then lowers others
            before, after = (np.where(first, x, 0).sum() / first.sum() * np.ones_like(x) for x in (before, after))
        lower = np.where(first & (after < before - 1e-4), before, after)
        return Case(batch, "the reward of row 0 was raised by 1", lower, after, first)

    return judged(search(Kind(shape_of(target)), case), "a higher reward lowers the row's advantage")


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

    def case(batch: Batch, _: Random) -> Case:
        twin = batch.with_(groups=batch.groups + 10)
        return compare(target, batch, stacked([batch, twin]), "the same groups once more, under other ids")

    return judged(search(Kind(shape), case), "advantages depend on the number of groups in the batch")


METAMORPHIC = (
    Check(name="row_order", layer="metamorphic", title="The order of rows does not matter.", run=row_order),
    Check(name="relabelled_groups", layer="metamorphic", title="Ids of groups are names only.", run=relabelled_groups),
    Check(name="other_groups", layer="metamorphic", title="Other prompts' rewards do not matter.", run=other_groups),
    Check(name="uneven_groups", layer="metamorphic", title="Groups may differ in size.", run=uneven_groups),
    Check(name="copies", layer="metamorphic", title="The number of groups does not matter.", run=copies),
    Check(name="reward_shift", layer="metamorphic", title="A constant in the rewards cancels.", run=reward_shift),
    Check(name="reward_scale", layer="metamorphic", title="Scaled rewards scale credit, or do not.", run=reward_scale),
    Check(name="invalid_rows", layer="metamorphic", title="Rejected rows move no sibling.", run=invalid_rows),
    Check(name="truncated_rows", layer="metamorphic", title="Truncated rows move no sibling.", run=truncated_rows),
    Check(name="no_signal", layer="metamorphic", title="Equal rewards give no credit.", run=no_signal),
    Check(name="padding", layer="metamorphic", title="Padding does not matter.", run=padding),
    Check(name="credit_outside", layer="metamorphic", title="Only chosen tokens have credit.", run=credit_outside),
    Check(name="observations", layer="metamorphic", title="Longer observations do not matter.", run=observations),
    Check(name="credited_turns", layer="metamorphic", title="Every turn can get credit.", run=credited_turns),
    Check(name="monotone", layer="metamorphic", title="A higher reward is never worse.", run=monotone),
    Check(name="idle_settings", layer="metamorphic", title="Every setting has an effect.", run=idle_settings),
)
