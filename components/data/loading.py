"""Loads the problems of a data section, and counts all rows that were left out, by reason."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.components.data.card import Counts, LoadedData, RejectedRows, why_empty, write_card
from creditgraph.components.data.files import RawDataset, open_path, split_part
from creditgraph.components.data.hub import open_hub
from creditgraph.components.data.rows import column_of, dropped_by, has_column, make_row, question_key
from creditgraph.components.data.sources import JOINED, Join, Source, parse_source
from creditgraph.components.data.store import Row, RowStore
from creditgraph.components.models.load import context_length, load_tokenizer
from creditgraph.components.tasks import TASKS
from creditgraph.components.text.templates import solve_prompt
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import CreditgraphError, DataError, did_you_mean
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.streams import Stream

DEFAULT_SIZE = 2000  # problems of a task family, whose list is endless
# Prompts are tokenised in chunks of at most this many rows and characters.
_CHUNK = 256
_CHUNK_CHARACTERS = 1 << 20


def load_data(
    entry: dict[str, Any],
    context: Context,
    tokenizer: Any = None,
    *,
    place: str = "data",
    drop_duplicates: bool = False,
    max_rows: int = 0,
    room: int = 0,
) -> LoadedData:
    """Loads all usable rows of a data section, in the order of the source; in a run, data_card.json has the counts.

    Args:
        entry: the section, see `creditgraph.components.data.sources.Source`.
        context: provides the model's tokenizer and context length; unusable rows go to its `reject`.
        tokenizer: the model's tokenizer; loaded if None.
        place: name of the section in error texts.
        drop_duplicates: keep only the first row of each question, compared as `question_key` does.
        max_rows: ends reading after that many raw rows; 0 reads all.
        room: prompts must have fewer tokens; 0 means the room that the model's context leaves.

    Raises:
        DataError: the source cannot be read, lacks a column, or has no usable row.
    """
    source = parse_source(entry, place)
    tokenizer = load_tokenizer(context.model) if tokenizer is None else tokenizer
    limit = room or context_length(context.model)
    raw = _open(source, place)
    counts = Counts()
    rows = RowStore(context.run_dir)
    loaded = LoadedData(rows=rows, counts=counts, source=source, revision=raw.revision, files=raw.files)
    seen: set[int] = set()
    accepted = array("q")  # number, length and whether it has a solution of each accepted row, one after the other
    rejects = RejectedRows(context, source, counts.rejected)
    candidates = _candidates(source, raw, tokenizer, place, counts, max_rows)
    for number, row, length in _with_lengths(candidates, tokenizer):
        counts.read += 1
        if isinstance(row, str):
            rejects.add(number, row)
            continue
        if drop_duplicates or source.shuffle:
            # Before the check of the length, so that a row that repeats a rejected one counts as a duplicate.
            key = int.from_bytes(question_key(row.metadata["question"]))
            if key in seen:
                counts.duplicates += 1
                continue
            seen.add(key)
        if length == 0:
            rejects.add(number, "no word of the prompt is in the model's vocabulary")
        elif length >= limit:
            rejects.add(number, f"prompt of {length} tokens; expected at most {max(limit - 1, 0)}")
        else:
            rows.append(row)
            accepted.extend((number, length, bool(row.solution)))
            if len(rows) == source.skip + source.size and source.size and not source.shuffle:
                break
    loaded.rows = rows = _chosen(rows, accepted, source, counts, context.run_dir)
    counts.read += counts.filtered.total()
    if not counts.used:
        part = f", split {source.split}" if "[" in source.split else ""
        raise DataError(
            f"{place}: {source.place}{part}: {why_empty(counts)}. Expected rows with a question and an answer that "
            "fit the context."
        )
    context.log(rejected=counts.rejected.total(), duplicates=counts.duplicates)
    if context.run_dir is not None and context.ranks.rank == 0:
        write_card(context.run_dir, place, loaded)
    return loaded


def first_rows_lacking(entry: Mapping[str, Any], place: str, rows: int = 20) -> list[str]:
    """Sentences on a local file that is not there, lacks a column, or of whose first rows none can be used.

    Needs no tokenizer and counts no rows. Problems of a task family and of the hub are not looked at.
    """
    source = parse_source(dict(entry), place)
    if not source.path or source.source in TASKS:
        return []
    raw = open_path(Path(source.path).expanduser(), source.columns, split_part(source.split)[0])
    reasons: list[str] = []
    first = list(islice(raw.rows, rows))
    if first and not isinstance(first[0], str):
        _check_columns(first[0], source.columns, source, place)
    plain = replace(source, template="plain", system_prompt="", user_prompt="")
    for number, row in enumerate(first):
        try:
            if isinstance(row, str):
                raise ValueError(row)
            if dropped_by(row, source) or source.join or isinstance(column_of(row, source.question), list):
                return []
            make_row(row, plain, "plain", None, number)
            return []
        except ValueError as error:
            reasons.append(str(error))
    what = f"none of its first {len(first)} rows can be used, the first because: {reasons[0]}" if first else "no rows"
    return [f"{place}: {source.place}: {what}. Expected rows with a question and an answer."]


def _chosen(rows: RowStore, accepted: array[int], source: Source, counts: Counts, folder: Path | None) -> RowStore:
    """The rows that `shuffle`, `skip` and `size` leave, in their order; counts them."""
    order = np.arange(len(rows))
    if source.shuffle:
        # Keyed by row, so that a model whose context takes fewer rows gets the others in the same order.
        numbers = torch.tensor(accepted[::3], dtype=torch.int64)
        order = np.argsort(Stream(source.seed, "data", "order").bits(numbers), kind="stable")
    order = order[source.skip : source.skip + source.size if source.size else None]
    for i in order:
        counts.use(accepted[3 * int(i) + 1], bool(accepted[3 * int(i) + 2]))
    if not source.shuffle and not source.skip:
        return rows
    counts.not_chosen = len(rows) - len(order)
    chosen = RowStore(folder)
    for i in order:
        chosen.append(rows[int(i)])
    return chosen


def make_prompts(rows: Sequence[Row], tokenizer: Any, uids: Tensor) -> Prompts:
    """Makes a batch of rows with these uids (int64, one per row)."""
    tokens = [tokenizer(row.text, add_special_tokens=False)["input_ids"] for row in rows]
    return Prompts(
        uid=uids,
        tokens=Jagged.from_rows(tokens, torch.int32),
        text=[row.text for row in rows],
        answer=[row.answer for row in rows],
        metadata=[row.metadata for row in rows],
        solution=[row.solution for row in rows],
    )


def _lengths(texts: list[str], tokenizer: Any) -> list[int]:
    """Tokens per text."""
    if getattr(tokenizer, "is_fast", False) and texts:
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [len(row) for row in ids]


def _with_lengths(candidates: Iterator[tuple[int, Row | str]], tokenizer: Any) -> Iterator[tuple[int, Row | str, int]]:
    """Adds the number of prompt tokens of each row, 0 for rejection reasons; tokenises a chunk of rows at a time."""
    chunk: list[tuple[int, Row | str]] = []
    characters = 0

    def measured() -> Iterator[tuple[int, Row | str, int]]:
        lengths = iter(_lengths([row.text for _, row in chunk if isinstance(row, Row)], tokenizer))
        for number, row in chunk:
            yield number, row, next(lengths) if isinstance(row, Row) else 0

    for number, row in candidates:
        chunk.append((number, row))
        characters += len(row.text) if isinstance(row, Row) else 0
        if len(chunk) == _CHUNK or characters > _CHUNK_CHARACTERS:
            yield from measured()
            chunk = []
            characters = 0
    yield from measured()


def _open(source: Source, place: str) -> RawDataset:
    if source.source in TASKS:
        return RawDataset(rows=iter(()))
    if source.source == "hub":
        return open_hub(source, source.columns, place, source.streaming)
    path = Path(source.path).expanduser()
    return open_path(path, source.columns, source.split if path.is_dir() or "[" in source.split else "")


def _candidates(
    source: Source, raw: RawDataset, tokenizer: Any, place: str, counts: Counts, max_rows: int
) -> Iterator[tuple[int, Row | str]]:
    """Yields (row number, problem or rejection reason); rows that `keep` filters out are only counted."""
    if source.source in TASKS:
        yield from _generated(source, tokenizer, max_rows)
        return
    template = source.by_template
    other = _Joined(source.join, source, place) if source.join else None
    for number, row in enumerate(raw.rows):
        if max_rows and number >= max_rows:
            return
        if isinstance(row, str):
            yield number, row
            continue
        if number == 0:
            _check_columns(row, source.columns, source, place)
        column = dropped_by(row, source)
        if column:
            counts.filtered[column] += 1
            continue
        try:
            joined = other.with_columns(row) if other else row
            yield number, make_row(joined, source, template, tokenizer, number)
        except CreditgraphError:  # concerns the whole section, such as a missing chat template
            raise
        except ValueError as error:
            yield number, str(error)


def _generated(source: Source, tokenizer: Any, max_rows: int) -> Iterator[tuple[int, Row]]:
    """The problems of a task family, with a number each."""
    task = TASKS[source.source]
    size = source.size or DEFAULT_SIZE
    for i in range(min(size, max_rows or size)):
        problem = task.generate(source.seed, i, source.difficulty, source.split)
        problem |= {"template": source.by_template, "source_row": i}
        text = solve_prompt(source.by_template, problem["question"], tokenizer)
        yield (
            i,
            Row(text=text, answer=task.answer(problem), metadata=problem, solution=" ".join(task.solution(problem))),
        )


def _check_columns(row: dict[str, Any], columns: list[str], source: Source, place: str) -> None:
    missing = [column for column in columns if not has_column(row, column)]
    if missing:
        raise DataError(
            f"{place}: {source.place} has no column '{missing[0]}'; it has {', '.join(row)}."
            f"{did_you_mean(missing[0], row)} Set question and answer to the columns' names."
        )


class _Joined:
    """The second dataset of a section, its needed columns kept out of memory."""

    def __init__(self, join: Join, source: Source, place: str) -> None:
        columns = source.joined_columns
        self._row = join.row
        self._rows = RowStore()
        for number, row in enumerate(open_hub(join, columns, f"{place}.join").rows):
            if isinstance(row, str):
                self._rows.append(Row(text=row, answer="", metadata={}))  # the reason why the row cannot be read
                continue
            if number == 0:
                _check_columns(row, columns, source, f"{place}.join")
            values = {JOINED + column: column_of(row, column) for column in columns}
            self._rows.append(Row(text="", answer="", metadata=values))

    def with_columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with the columns of the joined row; raises ValueError if there is no such row."""
        number = str(column_of(row, self._row)).strip()
        if not number.isascii() or not number.isdigit() or int(number) >= len(self._rows):
            raise ValueError(f"{self._row} names no row of the joined dataset")
        joined = self._rows[int(number)]
        if joined.text:
            raise ValueError(joined.text)
        return {**row, **joined.metadata}
