"""A data section becomes accepted problems, with a count of everything that was left out and why."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from components.models.load import context_length, load_tokenizer
from components.prompts.hub import open_hub
from components.prompts.readers import Opened, RawRow, open_path
from components.prompts.rows import column_of, dropped_by, has_column, make_row, question_key
from components.prompts.sources import JOINED, Join, Source, parse_source
from components.prompts.store import Row, RowStore
from components.text import chains
from components.text.templates import solve_prompt
from pipeline.core.component import Context
from pipeline.core.errors import DataError, did_you_mean
from pipeline.run.run_directory import write_aside

DEFAULT_SIZE = 2000
REJECTED_IN_LOG = 1000  # of one section in rejected.jsonl; the others go to a file of their own
CARD = "data_card.json"
_CHUNK = 256  # prompts tokenised at a time
_MARK = "…"

LongPrompts = Literal["reject", "cut"]


@dataclass(kw_only=True)
class Counts:
    """What became of the rows of one section.

    Attributes:
        read: rows that were looked at.
        filtered: rows that `keep` left out, by column.
        rejected: rows that cannot be used, by reason with numbers replaced by N.
        duplicates: rows whose question was met before.
        cut: rows whose question was shortened to fit the context.
        used: rows that are left.
        tokens: fewest, most and all prompt tokens of the used rows.
    """

    read: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    cut: int = 0
    used: int = 0
    tokens: list[int] = field(default_factory=lambda: [0, 0, 0])

    def use(self, length: int) -> None:
        """Counts one accepted prompt of this many tokens."""
        low, high, total = self.tokens
        self.used, self.tokens = (
            self.used + 1,
            [min(low, length) if self.used else length, max(high, length), total + length],
        )


@dataclass(kw_only=True)
class Loaded:
    """The problems of a section, and how they came about."""

    rows: RowStore
    counts: Counts
    source: Source
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)

    def card(self) -> dict[str, Any]:
        """Source, revision, filters, counts and hash as JSON values."""
        plain = asdict(Source(source=self.source.source, path="x", name="x"))
        settings = {k: v for k, v in asdict(self.source).items() if v != plain[k] or k in ("name", "path", "split")}
        counts = self.counts
        low, high, total = counts.tokens
        return {
            "source": self.source.place,
            "settings": json.loads(json.dumps({k: v for k, v in settings.items() if v not in ("", None)}, default=str)),
            "revision_wanted": self.source.revision,
            "revision_found": self.revision or None,
            "files": self.files,
            "rows": {
                "read": counts.read,
                "filtered": dict(counts.filtered.most_common()),
                "rejected": dict(counts.rejected.most_common(100)),
                "duplicates": counts.duplicates,
                "cut": counts.cut,
                "used": counts.used,
            },
            "prompt_tokens": {"min": low, "max": high, "mean": round(total / max(counts.used, 1), 1)},
            "hash": f"blake2b:{self.rows.digest}",
        }


class _Rejects:
    """Writes rejected rows: the first ones to the run's rejected.jsonl, those beyond to a file of this section."""

    def __init__(self, context: Context, source: Source, place: str) -> None:
        self._context, self._source, self._place = context, source, place
        self._count = 0
        self._file: TextIO | None = None

    def write(self, number: int, reason: str) -> None:
        if self._context.ranks.replica or self._context.ranks.position:  # every replica reads the whole source
            return
        self._count += 1
        row = {"source": self._source.place, "row": number}
        if self._count <= REJECTED_IN_LOG:
            self._context.reject(row, reason)
        elif self._context.run_dir is not None:
            if self._file is None:
                self._file = (self._context.run_dir / f"rejected.{self._place}.jsonl").open("w", encoding="utf-8")
            self._file.write(json.dumps({"row": row, "reason": reason}) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def load_problems(
    entry: dict[str, Any],
    context: Context,
    tokenizer: Any = None,
    *,
    place: str = "data",
    reserve: int = 0,
    drop_duplicates: bool = False,
    long_prompts: LongPrompts = "reject",
    most: int = 0,
    room: int = 0,
) -> Loaded:
    """All usable rows of a data section, in the order of the source. In a run, data_card.json says how they came about.

    Args:
        entry: the section, see `components.prompts.sources.Source`.
        context: its model gives tokenizer and context length; unusable rows go to its `reject`.
        tokenizer: the model's, loaded when None.
        place: what error texts call the section.
        reserve: tokens of the context kept free for the response.
        drop_duplicates: keep only the first row of each question, compared as `question_key` does.
        long_prompts: what to do with prompts that do not fit: reject them, or cut the beginning of the question.
        most: ends reading after that many raw rows; 0 reads all.
        room: prompts must have fewer tokens; 0 takes what the model's context leaves.

    Raises:
        DataError: the source cannot be read, lacks a column, or has no usable row.
    """
    source = parse_source(entry, place)
    tokenizer = load_tokenizer(context.model) if tokenizer is None else tokenizer
    limit = room or context_length(context.model) - reserve
    opened = _open(source, place)
    loaded = Loaded(
        rows=RowStore(context.run_dir), counts=Counts(), source=source, revision=opened.revision, files=opened.files
    )
    counts, seen, rejects = loaded.counts, set[int](), _Rejects(context, source, place)

    def reject(number: int, reason: str) -> None:
        counts.rejected[re.sub(r"(?<![\w-])\d+", "N", reason)] += 1
        rejects.write(number, reason)

    try:
        for chunk in _chunks(_candidates(source, opened, tokenizer, place, counts, most)):
            for (number, found), length in zip(chunk, _lengths([f for _, f in chunk], tokenizer), strict=True):
                counts.read += 1
                if isinstance(found, str):
                    reject(number, found)
                    continue
                if drop_duplicates:
                    key = int.from_bytes(question_key(found.metadata["question"]))
                    if key in seen:
                        counts.duplicates += 1
                        continue
                    seen.add(key)
                row = found
                if length >= limit and long_prompts == "cut":
                    row, length = cut_question(found, source, tokenizer, limit - 1)
                    counts.cut += length < limit
                if length == 0:
                    reject(number, "no word of the prompt is in the model's vocabulary")
                elif length >= limit:
                    reject(number, f"prompt of {length} tokens; the context leaves {max(limit - 1, 0)} for it")
                else:
                    loaded.rows.append(row)
                    counts.use(length)
                if source.size and counts.used >= source.size:
                    break
            if source.size and counts.used >= source.size:
                break
    finally:
        rejects.close()
    counts.read += sum(counts.filtered.values())
    if not counts.used:
        raise DataError(
            f"{place}: {source.place}: {_why(counts)}; wanted rows with a question and an answer that fit the context."
        )
    context.log(rejected=counts.rejected.total(), duplicates=counts.duplicates)
    if context.run_dir is not None and context.ranks.rank == 0:
        write_card(context.run_dir, place, loaded)
    return loaded


def load_rows(entry: dict[str, Any], context: Context, tokenizer: Any = None, **options: Any) -> Sequence[Row]:
    """The rows of `load_problems`, with its arguments."""
    return load_problems(entry, context, tokenizer, **options).rows


def write_card(folder: Path, place: str, loaded: Loaded) -> None:
    """Adds a section to the run's data card."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        card = {}
    write_aside(
        path, json.dumps(dict(sorted({**card, place: loaded.card()}.items())), indent=1, ensure_ascii=False) + "\n"
    )


def cut_question(row: Row, source: Source, tokenizer: Any, room: int) -> tuple[Row, int]:
    """The row with the beginning of its question left out so that the prompt has at most `room` tokens, and that number.

    The end is kept because problems ask at their end. A prompt that is too long even without its question comes back
    unchanged.
    """
    question, template = str(row.metadata["question"]), str(row.metadata["template"])

    def attempt(kept: int) -> tuple[str, str, int]:
        shown = _MARK + question[len(question) - kept :] if kept < len(question) else question
        text = solve_prompt(template, shown, tokenizer, source.answer_kind)
        return shown, text, _lengths([Row(text=text, answer="", metadata={})], tokenizer)[0]

    low, high = 0, len(question)  # low characters fit, high do not
    if attempt(1)[2] > room:
        return row, attempt(high)[2]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attempt(middle)[2] <= room else (low, middle)
    shown, text, length = attempt(max(low, 1))
    return Row(text=text, answer=row.answer, metadata={**row.metadata, "question": shown}), length


def _why(counts: Counts) -> str:
    reasons = "; ".join(f"{count} × {reason}" for reason, count in counts.rejected.most_common(3))
    if not counts.read:
        return "it has no rows"
    if not counts.rejected:
        return "keep left out all of its " + ", ".join(
            f"{count} rows by {column}" for column, count in counts.filtered.items()
        )
    return f"all {counts.rejected.total()} rows were rejected ({reasons})"


def _lengths(rows: list[Row | str] | list[Row], tokenizer: Any) -> list[int]:
    """Prompt tokens per row, 0 for rows that are reasons."""
    texts = [row.text for row in rows if isinstance(row, Row)]
    if getattr(tokenizer, "is_fast", False) and texts:
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    else:
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    found = iter(ids)
    return [len(next(found)) if isinstance(row, Row) else 0 for row in rows]


def _chunks(candidates: Iterator[tuple[int, Row | str]]) -> Iterator[list[tuple[int, Row | str]]]:
    chunk: list[tuple[int, Row | str]] = []
    size = 0
    for number, found in candidates:
        chunk.append((number, found))
        size += len(found.text) if isinstance(found, Row) else 0
        if len(chunk) == _CHUNK or size > 1 << 20:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _open(source: Source, place: str) -> Opened:
    if source.source == "chains":
        return Opened(rows=iter(()))
    if source.source == "hub":
        return open_hub(source, source.columns, place, source.streaming)
    path = Path(source.path).expanduser()
    return open_path(path, source.columns, source.split if path.is_dir() or "[" in source.split else "")


def _candidates(
    source: Source, opened: Opened, tokenizer: Any, place: str, counts: Counts, most: int
) -> Iterator[tuple[int, Row | str]]:
    template = source.template or ("chains" if source.source == "chains" else "thought")
    if source.source == "chains":
        for i in range(min(source.size or DEFAULT_SIZE, most or 1 << 62)):
            problem = chains.generate(source.seed, i, source.difficulty, source.split) | {
                "template": template,
                "source_row": i,
            }
            yield (
                i,
                Row(
                    text=solve_prompt(template, problem["question"], tokenizer),
                    answer=chains.answer(problem),
                    metadata=problem,
                ),
            )
        return
    other = _Joined(source.join, source, place) if source.join else None
    for number, found in enumerate(opened.rows):
        if most and number >= most:
            return
        if isinstance(found, str):
            yield number, found
            continue
        if number == 0:
            _check_columns(found, source.columns, source, place)
        column = dropped_by(found, source)
        if column:
            counts.filtered[column] += 1
            continue
        joined = other.with_columns(found) if other else found
        yield number, joined if isinstance(joined, str) else make_row(joined, source, template, tokenizer, number)


def _check_columns(found: dict[str, Any], wanted: list[str], source: Source, place: str) -> None:
    missing = [column for column in wanted if not has_column(found, column)]
    if missing:
        raise DataError(
            f"{place}: {source.place} has no column '{missing[0]}'; found {', '.join(found)}."
            f"{did_you_mean(missing[0], found)} Set question and answer to the columns' names."
        )


class _Joined:
    """The second dataset of a section, its needed columns kept out of memory."""

    def __init__(self, join: Join, source: Source, place: str) -> None:
        asked = [source.question, source.answer, source.choices, source.starter_code, *source.metadata.values()]
        self._columns = list(dict.fromkeys(c.removeprefix(JOINED) for c in asked if c.startswith(JOINED)))
        self._row, self._rows = join.row, RowStore()
        for number, found in enumerate(_open_join(join, self._columns, place)):
            if number == 0 and isinstance(found, dict):
                _check_columns(found, self._columns, source, f"{place}.join")
            values = {} if isinstance(found, str) else {JOINED + c: column_of(found, c) for c in self._columns}
            self._rows.append(Row(text=found if isinstance(found, str) else "", answer="", metadata=values))

    def with_columns(self, found: dict[str, Any]) -> dict[str, Any] | str:
        """The row with the columns of the joined row, or why there is none."""
        number = str(column_of(found, self._row)).strip()
        if not number.isascii() or not number.isdigit() or int(number) >= len(self._rows):
            return f"{self._row} names no row of the joined dataset"
        joined = self._rows[int(number)]
        return joined.text or {**found, **joined.metadata}


def _open_join(join: Join, columns: list[str], place: str) -> Iterator[RawRow]:
    return open_hub(join, columns, f"{place}.join").rows
