"""Recorded credit: a run of ours, a Parquet file with named columns, or a rollout trace; no code is called."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from creditgraph.pipeline.app.audit.batch import Bools, Floats, Ints
from creditgraph.pipeline.app.audit.declared import declared_of_run
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.core.errors import did_you_mean

NEEDED = ("advantage", "reward", "group")
LOGPROBS = ("logprob", "old_logprob", "rollout_logprob")
TOKENS = (*LOGPROBS, "role", "prompt_ids", "response_ids", "trajectory")
OPTIONAL = ("mask", "valid", "turn", *TOKENS)
NEAR: Mapping[str, tuple[str, ...]] = {
    "advantage": ("advantages", "token_advantages"),
    "reward": ("rewards", "score", "scores"),
    "group": ("groups", "group_id", "prompt_id", "example_id", "uid", "index"),
    "mask": ("response_mask", "loss_mask", "completion_mask"),
    "turn": ("turns", "turn_id"),
    "logprob": ("logprobs", "log_probs", "log_prob"),
    "old_logprob": ("old_logprobs", "old_log_probs", "old_log_prob", "old_per_token_logps"),
    "rollout_logprob": ("rollout_logprobs", "rollout_log_probs", "engine_logprobs", "sampling_per_token_logps"),
    "role": ("roles", "token_roles"),
    "prompt_ids": ("prompt_tokens", "prompt_token_ids"),
    "response_ids": ("response_tokens", "response_token_ids", "completion_ids", "completion_token_ids"),
    "trajectory": ("trajectory_id", "episode", "episode_id", "traj_uid", "request_id"),
}
"""usual names of columns"""
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
        credited: whether advantages, rewards and groups are there; without, only tokens are checked.
        note: how groups were read, where that needs saying.
        logprobs: kind of `LOGPROBS` → float64 [N, T], NaN where none is recorded.
        columns: the other columns of `TOKENS` that are there, a value per row.
        declares: check → why its failure is wanted, of a run of ours.
    """

    name: str
    rewards: Floats
    groups: Ints
    valid: Bools
    advantages: Floats
    mask: Bools
    inside: Bools
    turns: Ints
    credited: bool = True
    note: str = ""
    logprobs: Mapping[str, Floats] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    declares: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def per_row(self) -> Floats:
        """float64 [N]: mean advantage of each row's trained tokens, 0 without one."""
        own = np.where(self.mask, self.advantages, 0.0).sum(1)
        out: Floats = own / np.maximum(self.mask.sum(1), 1)
        return out

    def alike(self, rows: Ints) -> bool:
        """Whether these rows of a group have the same credit on all tokens of a response, or of an episode."""
        held, mask = self.advantages[rows], self.mask[rows]
        high = np.where(mask, held, -np.inf).max(1)
        low = np.where(mask, held, np.inf).min(1)
        _, first, place = np.unique(self.episodes[rows], return_index=True, return_inverse=True)
        own = self.per_row[rows]
        spread = np.abs(np.concatenate([high - low, own - own[first][place]])).max()
        return bool(spread <= 1e-4 * np.abs(held[mask]).max(initial=1e-9))

    def first_rows(self, rows: Ints) -> Ints:
        """Places, among these rows, of the first row of each episode."""
        out: Ints = np.unique(self.episodes[rows], return_index=True)[1]
        return out

    @cached_property
    def episodes(self) -> Ints:
        """int64 [N]: equal for the rows of one trajectory; each row's own where none is recorded."""
        names = self.columns.get("trajectory")
        if names is None:
            return np.arange(len(self.rewards))
        out: Ints = np.unique([str(name) for name in names], return_inverse=True)[1]
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
    has = [column for column in TOKENS if place[column] in found]
    wrong = [column for column in columns if columns[column] not in found]
    if wrong or (missing and not has):
        lacking = wrong or missing
        raise AuditError(
            f"{name}: has the columns {', '.join(sorted(found)) or '(none)'}; "
            f"{', '.join(columns.get(column, column) for column in lacking)} "
            f"{'is' if len(lacking) == 1 else 'are'} missing. Name them: --columns {lacking[0]}=COLUMN."
            f"{did_you_mean(columns.get(lacking[0], lacking[0]), found)}"
        )
    for column in ("advantage", "reward", *LOGPROBS):
        if place[column] in found:
            _check_numbers(found[place[column]], place[column], name)
    count = len(next(iter(found.values()), []))
    credit = [x if isinstance(x, list) else [x] for x in found.get(place["advantage"], [0.0] * count)]
    logs = {kind: found[place[kind]] for kind in LOGPROBS if kind in has}
    lists = [found[place[c]] for c in ("mask", "role") if place[c] in found] + [*logs.values()]
    sizes = [max([len(own), *(len(rows[i]) for rows in lists)]) for i, own in enumerate(credit)]
    # One number per row is that of each of its tokens.
    credit = [own * sizes[i] if len(own) == 1 else own for i, own in enumerate(credit)]
    width = max(sizes, default=1)

    def grid(rows: Sequence[Sequence[Any]], fill: Any, kind: Any) -> Any:
        out = np.full((count, width), fill, dtype=kind)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row[:width]
        return out

    def numbers_of(rows: Sequence[Sequence[Any]], fill: float) -> Floats:
        held: Floats = grid([[np.nan if x is None else x for x in row] for row in rows], fill, np.float64)
        return held

    inside = grid([[True] * len(row) for row in credit], False, bool)
    mask = grid(found[place["mask"]], False, bool) if place["mask"] in found else inside
    turns = grid(found[place["turn"]], -1, np.int64) if _is_lists(found, place["turn"]) else np.where(mask, 0, -1)
    ids, note = _prompts_of([str(x) for x in found.get(place["group"], range(count))])
    order = {text: i for i, text in enumerate(dict.fromkeys(ids))}
    rewards = [np.nan if x is None else x for x in found.get(place["reward"], [0.0] * count)]
    return Records(
        name=name,
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.array([order[x] for x in ids], dtype=np.int64),
        valid=np.array(found[place["valid"]], dtype=bool) if place["valid"] in found else np.ones(count, bool),
        advantages=numbers_of(credit, 0.0),
        mask=mask & inside,
        inside=inside,
        turns=np.where(mask & inside, turns, -1),
        credited=not missing,
        note=note,
        logprobs={kind: numbers_of(rows, np.nan) for kind, rows in logs.items()},
        columns={column: found[place[column]] for column in has if column not in LOGPROBS},
    )


def _is_lists(found: Mapping[str, Sequence[Any]], column: str) -> bool:
    return column in found and all(isinstance(x, list) for x in found[column])


def _prompts_of(ids: list[str]) -> tuple[list[str], str]:
    """Ids that rows of one prompt share, and how they were read.

    verl writes prompt_rollout_output as uid, one per row: its last parts are numbers of the rollout and its output.
    """
    if len(set(ids)) < len(ids) or len(ids) < 2:
        return ids, ""
    for parts in (1, 2):
        cut = [re.sub(rf"(_\d+){{{parts}}}$", "", text) for text in ids]
        if cut != ids and all(c != text for c, text in zip(cut, ids, strict=True)) and len(set(cut)) < len(ids):
            return cut, f"groups are their ids without the last {parts} of the parts between _"
    return ids, "each row has a group id of its own"


def _check_numbers(values: Sequence[Any], column: str, name: str) -> None:
    for value in values:
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, int | float | None):
                raise AuditError(f"{name}: column '{column}' has {part!r}; expected numbers.")


def _guess(column: str, found: Mapping[str, Any]) -> str:
    return next((name for name in (column, *NEAR.get(column, ())) if name in found), column)


def _of_run(path: Path) -> list[Records]:
    from creditgraph.pipeline.core.encoding import class_name
    from creditgraph.pipeline.core.payloads import Credit, Rewards, Trajectories, Turns
    from creditgraph.pipeline.run.recording import read_payload, recorded_class, recorded_iterations

    # Other payloads may be of classes that only the run's graph imports.
    wanted = {class_name(kind) for kind in (Credit, Rewards, Trajectories, Turns)}
    folder = path / "record"
    outputs = sorted(p.name for p in folder.glob("*") if p.is_dir()) if folder.is_dir() else []
    if not outputs:
        raise AuditError(f"{path}: has no records; expected a run folder with record/ (run.record.every above 0).")
    newest = {name: recorded_iterations(path, name)[-ITERATIONS:] for name in outputs}
    held: dict[tuple[str, int], Any] = {}
    for name, iterations in newest.items():
        for iteration in iterations:
            file = folder / name / f"{iteration:06d}.parquet"
            if recorded_class(file) in wanted:
                held[name, iteration] = read_payload(file)
    credits_ = sorted({name for (name, _), value in held.items() if isinstance(value, Credit)})
    if not credits_:
        raise AuditError(f"{path}: no credit is recorded; recorded are {', '.join(outputs)}. See run.record.outputs.")
    found = []
    for name in credits_:
        parts = [_joined(held, name, i) for i in newest[name]]
        rows = [part for part in parts if part is not None]
        if rows:
            columns = {k: [x for row in rows for x in row[k]] for k in rows[0]}
            declares = declared_of_run(path, name.partition(".")[0])
            found.append(replace(_of_columns(columns, f"{path}: {name}", {}), declares=declares))
    if not found:
        raise AuditError(
            f"{path}: no trajectories with rewards are recorded for the rows of {', '.join(credits_)}, so there is "
            "nothing to judge. If the graph has them, train with run.record.outputs=all."
        )
    return found


def _joined(held: Mapping[tuple[str, int], Any], name: str, iteration: int) -> dict[str, list[Any]] | None:
    """Credit of one iteration with the rewards and groups of its rows."""
    import torch

    from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns

    credit = held[name, iteration]
    wanted = set(credit.uid.tolist())
    present = [value for (_, i), value in held.items() if i == iteration]
    others = [value for value in present if wanted <= set(value.uid.tolist())]
    trajectories = next((v for v in others if isinstance(v, Trajectories)), None)
    # Rows that are trained on besides the sampled ones, as revisions, need have no reward.
    rewards = max(
        (v for v in present if isinstance(v, Rewards)), key=lambda v: len(wanted & set(v.uid.tolist())), default=None
    )
    if trajectories is None or rewards is None or not wanted & set(rewards.uid.tolist()):
        return None
    credit = credit.select(torch.isin(credit.uid, rewards.uid))
    turns = next((v for v in others if isinstance(v, Turns)), None)
    episodes = credit.uid if turns is None else turns.select(turns.index_of(credit.uid)).episode
    trajectories = trajectories.select(trajectories.index_of(credit.uid))
    rewards = rewards.select(rewards.index_of(credit.uid))
    return {
        "advantage": credit.advantage.to_lists(),
        "mask": credit.mask.to_lists(),
        "reward": rewards.value.tolist(),
        "valid": rewards.valid.tolist(),
        "group": trajectories.group.tolist(),
        "trajectory": episodes.tolist(),
    }
