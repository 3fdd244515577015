"""Recorded credit: a run of ours, a Parquet file with named columns, or a rollout trace; no code is called."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Bools, Floats, Ints
from creditgraph.pipeline.app.audit.checks import Check, Finding, passed, skipped
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.core.errors import did_you_mean

NEEDED = ("advantage", "reward", "group")
OPTIONAL = ("mask", "valid", "turn")
ITERATIONS = 5  # newest iterations of a run that are read


@dataclass(frozen=True, eq=False, kw_only=True)
class Records:
    """Rows with their credit.

    Attributes:
        name: where they are from.
        rewards, groups, valid: [N].
        advantages: float64 [N, T], 0 beyond each row.
        mask: bool [N, T], trained tokens.
        inside: bool [N, T], response tokens, trained or not.
        turns: int64 [N, T], 0 where none are given, −1 outside the mask.
        declares: none; for `--declare`.
    """

    name: str
    rewards: Floats
    groups: Ints
    valid: Bools
    advantages: Floats
    mask: Bools
    inside: Bools
    turns: Ints
    declares: Mapping[str, str] = field(default_factory=dict)

    @property
    def per_row(self) -> Floats:
        """float64 [N]: mean advantage of each row's trained tokens, 0 without one."""
        own = np.where(self.mask, self.advantages, 0.0).sum(1)
        out: Floats = own / np.maximum(self.mask.sum(1), 1)
        return out

    def members(self) -> Iterator[tuple[int, Ints]]:
        """Each group's id and its valid rows with a trained token."""
        usable = self.valid & self.mask.any(1)
        for group in np.unique(self.groups):
            rows = ((self.groups == group) & usable).nonzero()[0]
            if len(rows):
                yield int(group), rows


def read_records(path: Path, columns: Mapping[str, str]) -> list[Records]:
    """The records at a path; raises AuditError for one that cannot be read, with what is there."""
    if path.is_dir():
        return _of_run(path)
    if not path.exists():
        raise AuditError(f"{path}: no such file.")
    if path.suffix == ".jsonl":
        rows = _lines(path)
        return [_of_columns({k: [row.get(k) for row in rows] for k in (rows[0] if rows else {})}, str(path), columns)]
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise AuditError(f"{path}: is no Parquet file: {error}") from error
    return [_of_columns({name: table.column(name).to_pylist() for name in table.column_names}, str(path), columns)]


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise AuditError(f"{path}: line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise AuditError(f"{path}: line {number} is no object; expected one rollout per line.")
        rows.append(row)
    return rows


def _of_columns(found: Mapping[str, Sequence[Any]], name: str, columns: Mapping[str, str]) -> Records:
    for column in columns:
        if column not in (*NEEDED, *OPTIONAL):
            raise AuditError(f"--columns {column}=…: expected one of {', '.join((*NEEDED, *OPTIONAL))}.")
    place = {column: columns.get(column, _guess(column, found)) for column in (*NEEDED, *OPTIONAL)}
    missing = [column for column in NEEDED if place[column] not in found]
    if missing:
        raise AuditError(
            f"{name}: has the columns {', '.join(sorted(found)) or '(none)'}; {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. Name them: --columns {missing[0]}=COLUMN."
            f"{did_you_mean(missing[0], found)}"
        )
    for column in ("advantage", "reward"):
        _check_numbers(found[place[column]], place[column], name)
    credit = [x if isinstance(x, list) else [x] for x in found[place["advantage"]]]
    width = max(map(len, credit), default=1)

    def grid(rows: Sequence[Sequence[Any]], fill: Any, kind: Any) -> Any:
        out = np.full((len(credit), width), fill, dtype=kind)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row[:width]
        return out

    inside = grid([[True] * len(row) for row in credit], False, bool)
    mask = grid(found[place["mask"]], False, bool) if place["mask"] in found else inside
    turns = grid(found[place["turn"]], -1, np.int64) if place["turn"] in found else np.where(mask, 0, -1)
    ids = [str(x) for x in found[place["group"]]]
    order = {text: i for i, text in enumerate(dict.fromkeys(ids))}
    return Records(
        name=name,
        rewards=np.array([np.nan if x is None else x for x in found[place["reward"]]], dtype=np.float64),
        groups=np.array([order[x] for x in ids], dtype=np.int64),
        valid=np.array(found[place["valid"]], dtype=bool) if place["valid"] in found else np.ones(len(credit), bool),
        advantages=grid([[np.nan if x is None else x for x in row] for row in credit], 0.0, np.float64),
        mask=mask & inside,
        inside=inside,
        turns=np.where(mask & inside, turns, -1),
    )


def _check_numbers(values: Sequence[Any], column: str, name: str) -> None:
    for value in values:
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, int | float | None):
                raise AuditError(f"{name}: column '{column}' has {part!r}; expected numbers.")


def _guess(column: str, found: Mapping[str, Any]) -> str:
    near = {
        "advantage": ("advantages", "token_advantages"),
        "reward": ("rewards", "score", "scores"),
        "group": ("groups", "group_id", "prompt_id", "example_id", "uid", "index"),
        "mask": ("response_mask", "loss_mask", "completion_mask"),
        "turn": ("turns", "turn_id"),
    }.get(column, ())
    return next((name for name in (column, *near) if name in found), column)


def _of_run(path: Path) -> list[Records]:
    from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories
    from creditgraph.pipeline.run.recording import read_payload, recorded_iterations

    folder = path / "record"
    outputs = sorted(p.name for p in folder.glob("*") if p.is_dir()) if folder.is_dir() else []
    if not outputs:
        raise AuditError(f"{path}: has no records; expected a run folder with record/ (run.record.every above 0).")
    newest = {name: recorded_iterations(path, name)[-ITERATIONS:] for name in outputs}
    held: dict[tuple[str, int], Any] = {}
    for name, iterations in newest.items():
        for iteration in iterations:
            value = read_payload(folder / name / f"{iteration:06d}.parquet")
            if isinstance(value, Credit | Rewards | Trajectories):
                held[name, iteration] = value
    credits_ = sorted({name for (name, _), value in held.items() if isinstance(value, Credit)})
    if not credits_:
        raise AuditError(f"{path}: no credit is recorded; recorded are {', '.join(outputs)}. See run.record.outputs.")
    found = []
    for name in credits_:
        parts = [_joined(held, name, i) for i in newest[name]]
        rows = [part for part in parts if part is not None]
        if rows:
            found.append(_of_columns({k: [x for row in rows for x in row[k]] for k in rows[0]}, f"{path}: {name}", {}))
    return found


def _joined(held: Mapping[tuple[str, int], Any], name: str, iteration: int) -> dict[str, list[Any]] | None:
    """Credit of one iteration with the rewards and groups of its rows."""
    from creditgraph.pipeline.core.payloads import Rewards, Trajectories

    credit = held[name, iteration]
    wanted = set(credit.uid.tolist())
    others = [value for (_, i), value in held.items() if i == iteration and wanted <= set(value.uid.tolist())]
    trajectories = next((v for v in others if isinstance(v, Trajectories)), None)
    rewards = next((v for v in others if isinstance(v, Rewards)), None)
    if trajectories is None or rewards is None or not wanted:
        return None
    trajectories = trajectories.select(trajectories.index_of(credit.uid))
    rewards = rewards.select(rewards.index_of(credit.uid))
    return {
        "advantage": credit.advantage.to_lists(),
        "mask": credit.mask.to_lists(),
        "reward": rewards.value.tolist(),
        "valid": rewards.valid.tolist(),
        "group": trajectories.group.tolist(),
    }


def numbers(records: Records) -> Finding:
    """NaN and infinity."""
    bad: Any = ~np.isfinite(records.advantages) & records.inside
    if not bad.any():
        return passed(f"{len(records.rewards)} rows, {int(records.mask.sum())} trained tokens")
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
    """Rows of a group add up to nothing, as they do against the mean of their rewards."""
    worst = 0.0
    example: dict[str, Any] = {}
    for group, rows in records.members():
        own = records.per_row[rows]
        spread = float(np.abs(own).max())
        # Against the mean of the others, of all, and divided by whatever a group has: the sum is 0.
        gap = abs(float(own.mean())) / spread if spread > 1e-9 else 0.0
        if gap > max(worst, 1e-3):
            worst = gap
            example = {"group": group, "rewards": records.rewards[rows].tolist(), "advantages": own.tolist()}
    if not example:
        return passed()
    return Finding(
        verdict="fail",
        message=f"the advantages of group {example['group']} have a mean of {worst:.2g} of the largest: its baseline "
        "is not the mean of its rewards (other groups, or rejected rows, are in it), or credit differs within rows",
        example=example,
        size=worst,
    )


def order(records: Records) -> Finding:
    """Within a group, a row with a higher reward has no lower advantage."""
    wrong = pairs = 0
    example: dict[str, Any] = {}
    for group, rows in records.members():
        reward, own = records.rewards[rows], records.per_row[rows]
        higher = reward[:, None] > reward[None, :] + 1e-9
        worse = higher & (own[:, None] < own[None, :] - 1e-6)
        pairs += int(higher.sum())
        wrong += int(worse.sum())
        if worse.any() and not example:
            example = {"group": group, "rewards": reward.tolist(), "advantages": own.tolist()}
    if not pairs:
        return skipped("no group has rewards that differ")
    if not wrong:
        return passed(f"{pairs} pairs")
    message = f"in {wrong} of {pairs} pairs of a group the row with the higher reward has the lower mean advantage"
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


RECORDS = (
    Check(name="records_numbers", layer="records", title="Every advantage is a number.", run=numbers),
    Check(name="records_outside", layer="records", title="Only trained tokens have credit.", run=outside),
    Check(name="records_turns", layer="records", title="Every turn has credit.", run=turns),
    Check(name="records_baseline", layer="records", title="A group's advantages add up to nothing.", run=baseline),
    Check(name="records_order", layer="records", title="A higher reward is not worse.", run=order),
    Check(name="records_invalid", layer="records", title="Rejected rows have no credit.", run=invalid),
    Check(name="records_silent", layer="records", title="Groups with a signal have credit.", run=silent),
)
