"""Per-item records of an evaluation: one Parquet file per chunk of problems, written whole or not at all, never twice.

RUN/eval/SUITE/CHECKPOINT/items/TASK/
    _task.json              everything that the records depend on
    greedy-000000.parquet   one row per response; the number is that of the chunk's first problem
    sampled-000000.parquet
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.run_directory import (
    differences,
    listed_changes,
    make_folder,
    replacing,
    sync_directory,
    write_json,
)

FORMAT = 1
KEY = b"creditgraph.eval"

SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("pass", pa.string()),  # greedy or sampled
        ("problem", pa.int32()),  # place in the set, from 0
        ("problem_id", pa.string()),  # hash of question and reference answer
        ("prompt_hash", pa.string()),  # hash of the prompt's token ids
        ("sample", pa.int32()),
        ("seed", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("answer", pa.string()),  # as extracted; null when the response gives none
        ("correct", pa.bool_()),
        ("valid", pa.bool_()),  # false: it could not be verified, and counts as wrong
        ("reason", pa.string()),
        ("reward", pa.float32()),
        ("finish_reason", pa.string()),
        ("logprob", pa.float64()),  # sum over the response's tokens, nats, at the sampling temperature (greedy: 1)
        ("flagged", pa.bool_()),  # is in the training data; null when that was not searched
    ]
)


def short_hash(*parts: str | bytes) -> str:
    """16 hex digits of texts; the length of each is part of it."""
    digest = blake2b(digest_size=8)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Problems `first` … `last` − 1 in one pass, `samples` responses each."""

    part: str
    first: int
    last: int
    samples: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.part}-{self.first:06d}.parquet"

    @property
    def rows(self) -> int:
        """Responses in it."""
        return (self.last - self.first) * self.samples


def plan(num_problems: int, greedy: bool, samples: int, rows: int) -> list[Chunk]:
    """Chunks of at most `rows` responses (at least one problem), the greedy pass first.

    >>> [(c.name, c.rows) for c in plan(3, True, 2, 4)]
    [('greedy-000000.parquet', 3), ('sampled-000000.parquet', 4), ('sampled-000002.parquet', 2)]
    """
    chunks = []
    for part, each in (("greedy", int(greedy)), ("sampled", samples)):
        step = max(1, rows // each) if each else 1
        starts = range(0, num_problems if each else 0, step)
        chunks += [Chunk(part=part, first=i, last=min(i + step, num_problems), samples=each) for i in starts]
    return chunks


class ItemStore:
    """The records of one task in one evaluation.

    Attributes:
        folder: folder of the records.
        made_with: everything that they depend on; stored in _task.json and compared when the store is opened again.
        chunk_rows: responses per file, of the evaluation that began the store.
        damaged: files that exist but are not whole; their responses are sampled again.
    """

    def __init__(self, folder: Path, made_with: Mapping[str, Any], chunk_rows: int) -> None:
        """Opens or begins a store; raises RunError when its records depend on something else."""
        self.folder = folder
        self.chunk_rows = chunk_rows
        self.damaged: list[str] = []
        self.made_with = json.loads(json.dumps(dict(made_with)))
        self._mark = short_hash(json.dumps(self.made_with, sort_keys=True)).encode()
        note = folder / "_task.json"
        if note.exists():
            self._compare(note)
            return
        make_folder(folder)
        write_json(note, {"format": FORMAT, "chunk_rows": chunk_rows, "made_with": self.made_with})

    def _compare(self, note: Path) -> None:
        try:
            content = json.loads(note.read_text(encoding="utf-8"))
            earlier = content["made_with"]
            self.chunk_rows = int(content["chunk_rows"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise RunError(
                f"{note}: cannot be read ({error}); remove {self.folder} or start over with --fresh."
            ) from error
        if content["format"] != FORMAT:
            raise RunError(
                f"{note}: expected records of format {FORMAT}, got {content['format']}; start over with --fresh."
            )
        changes = differences(earlier, self.made_with)
        if changes:
            raise RunError(
                f"{self.folder}: holds records of another evaluation, which are not mixed with new ones:\n"
                f"{listed_changes(changes)}\n"
                "Go back to these settings, keep both with label=NAME, or start over with --fresh."
            )

    def done(self, chunk: Chunk) -> bool:
        """Whether a chunk is on disk and whole."""
        path = self.folder / chunk.name
        if not path.exists():
            return False
        try:
            meta = pq.read_metadata(path)
            whole = meta.num_rows == chunk.rows and (meta.metadata or {}).get(KEY) == self._mark
        except (OSError, pa.ArrowInvalid):
            whole = False
        if not whole:
            self.damaged.append(chunk.name)
        return whole

    def write(self, chunk: Chunk, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes a chunk aside, makes it durable and renames it."""
        table = pa.table(
            {f.name: pa.array(columns[f.name], f.type) for f in SCHEMA}, schema=SCHEMA.with_metadata({KEY: self._mark})
        )
        assert table.num_rows == chunk.rows, chunk
        final = self.folder / chunk.name
        # A file under its final name is whole: a kill leaves at most a .tmp- file, which the next start ignores.
        with replacing(final) as aside:
            pq.write_table(table, aside, compression="zstd")
        sync_directory(self.folder)

    def tables(self, chunks: Sequence[Chunk], columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yields one table per chunk, each read on demand."""
        for chunk in chunks:
            table = pq.read_table(
                self.folder / chunk.name, columns=None if columns is None else list(columns), partitioning=None
            )
            yield table.replace_schema_metadata(None)
