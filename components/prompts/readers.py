"""Raw rows out of local files, read tolerantly and a little at a time: one bad row costs one row, a large file no memory.

Only .json files that hold one list are read whole. Compressed files (.gz, .zst) are read through Arrow.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from pipeline.core.errors import DataError, did_you_mean

RawRow = dict[str, Any] | str  # a row that cannot be read is a sentence saying why

FILE_TYPES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BATCH = 100  # rows held at a time; some have megabytes of tests
_SLICE = re.compile(r"([^\[\]]*)\[(-?\d*)(%?):(-?\d*)(%?)\]")


@dataclass(kw_only=True)
class Opened:
    """A dataset that can be read.

    Attributes:
        rows: raw rows, in order.
        revision: commit of the hub that was found, "" for local files or where it cannot be told.
        files: local files with their sizes in bytes.
    """

    rows: Iterator[RawRow]
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)


def open_path(path: Path, columns: list[str], split: str = "") -> Opened:
    """A local file, a folder written by save_to_disk, or a folder with a copy of a hub repository.

    Args:
        path: the file or folder.
        columns: what is needed; other columns of Parquet files are not read.
        split: for folders, the split; for both, a part of it as in "train[:90%]".
    """
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"data file {path}: not found; wanted one of "
            f"{', '.join(FILE_TYPES)}.{did_you_mean(path.name, near) if near else ''}"
        )
    name, part = split_part(split)
    if path.is_dir() and any(
        (path / note).exists() for note in ("dataset_info.json", "dataset_dict.json", "state.json")
    ):
        return Opened(rows=_saved_rows(path, name, part, columns), files=[{"path": str(path)}])
    files = _files_of_split(path, name) if path.is_dir() else [path]
    return open_files(files, columns, part)


def open_files(files: list[Path], columns: list[str], part: str = "") -> Opened:
    """Several files one after the other, or a part of them all."""

    def rows() -> Iterator[RawRow]:
        for file in files:
            yield from _file_rows(file, columns)

    for file in files:
        if file.stat().st_size == 0:
            raise DataError(f"data file {file}: empty; wanted one problem per row.")
        _kind(file)
    return Opened(rows=taken(rows, part), files=[{"path": str(f), "bytes": f.stat().st_size} for f in files])


def split_part(split: str) -> tuple[str, str]:
    """The name of a split and the part of it that is meant.

    >>> split_part("train[:90%]"), split_part("test")
    (('train', '[:90%]'), ('test', ''))
    """
    name, bracket, rest = split.partition("[")
    return name, bracket + rest


def bounds(part: str, count: Callable[[], int]) -> tuple[int, int | None]:
    """First row and end of a part such as "[:90%]" or "[10:20]", as `datasets` rounds them; `count` is asked where shares are used.

    >>> bounds("[10%:]", lambda: 25), bounds("[:3]", lambda: 25)
    ((2, 25), (0, 3))
    """
    found = _SLICE.fullmatch(part)
    if not found:
        raise DataError(f"split part '{part}': wanted [from:to] in rows or per cent, such as [:90%] or [100:200].")
    _, first, first_share, last, last_share = found.groups()
    if not (first_share or last_share or "-" in first + last):
        return int(first or 0), int(last) if last else None
    total = count()

    def place(text: str, share: str, default: int) -> int:
        if not text:
            return default
        number = round(int(text) * total / 100) if share else int(text)
        return min(max(number + total if text.startswith("-") else number, 0), total)

    return place(first, first_share, 0), place(last, last_share, total)


def taken(rows: Callable[[], Iterator[RawRow]], part: str) -> Iterator[RawRow]:
    """The rows of a part; a part given in per cent reads the rows once to count them."""
    if not part:
        return rows()
    first, last = bounds(part, lambda: sum(1 for _ in rows()))
    return islice(rows(), first, last)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = sorted(
        f for f in folder.rglob("*") if f.is_file() and "".join(f.suffixes[-2:]).endswith((*FILE_TYPES, *COMPRESSED))
    )
    files = [
        f
        for f in files
        if any(s in FILE_TYPES for s in f.suffixes[-2:]) and not any(p.startswith(".") for p in f.parts)
    ]
    named = [f for f in files if re.search(rf"(?:^|[/_.-]){re.escape(split)}(?:[/_.-]|$)", str(f.relative_to(folder)))]
    if not files or (split and not named and len(files) > 1):
        what = f"; found {', '.join(str(f.relative_to(folder)) for f in files[:6])}" if files else ""
        raise DataError(
            f"data folder {folder}: no file of split '{split}'{what}; wanted a folder written by save_to_disk, or "
            "files such as "
            f"{split or 'train'}-00000.parquet. Name a file in it, or correct split."
        )
    return named or files


def _kind(path: Path) -> tuple[str, str]:
    """(file type, compression or "")."""
    codec = COMPRESSED.get(path.suffix, "")
    kind = Path(path.stem).suffix if codec else path.suffix
    if kind not in FILE_TYPES or (codec and kind in (".parquet", ".arrow")):
        shown = "".join(path.suffixes[-2:]) if codec else path.suffix
        raise DataError(
            f"data file {path}: type '{shown}'; wanted one of {', '.join(FILE_TYPES)} (text types also with .gz or "
            ".zst)."
        )
    return kind, codec


def _file_rows(path: Path, columns: list[str]) -> Iterator[RawRow]:
    kind, codec = _kind(path)
    if kind == ".parquet":
        return _parquet_rows(path, columns)
    if kind == ".arrow":
        return _arrow_rows(path)
    return {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}[kind](path, codec)


def _open_text(path: Path, codec: str, newline: str | None = None) -> TextIO:
    if not codec:
        return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), codec)
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _cut_short(path: Path, read: int, error: OSError) -> DataError:
    return DataError(
        f"data file {path}: cannot be decompressed after {read} rows ({error}); wanted a complete file. Copy it again."
    )


def _lines(path: Path, codec: str, newline: str | None = None) -> Iterator[str]:
    read = 0
    with _open_text(path, codec, newline) as lines:
        try:
            for line in lines:
                yield line
                read += 1
        except OSError as error:
            raise _cut_short(path, read, error) from error


def _parse(text: str) -> RawRow:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    return row if isinstance(row, dict) else f"a JSON {type(row).__name__}; wanted an object"


def _jsonl_rows(path: Path, codec: str) -> Iterator[RawRow]:
    for line in _lines(path, codec):
        if line.strip():
            yield _parse(line)


def _json_rows(path: Path, codec: str) -> Iterator[RawRow]:
    with _open_text(path, codec) as file:
        try:
            text = file.read()
        except OSError as error:
            raise _cut_short(path, 0, error) from error
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(_parse(text.lstrip().split("\n", 1)[0]), str):
            raise DataError(
                f"data file {path}: not JSON ({error}); wanted a list of objects, or one object per line."
            ) from None
        yield from _jsonl_rows(
            path, codec
        )  # the ending is .json, the content is JSON lines, as many published sets have it
        return
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise DataError(f"data file {path}: a JSON {type(rows).__name__}; wanted a list of objects.")
    for row in rows:
        yield row if isinstance(row, dict) else f"a JSON {type(row).__name__}; wanted an object"


def _csv_rows(path: Path, codec: str) -> Iterator[RawRow]:
    csv.field_size_limit(1 << 30)  # the default refuses answers of 128 kB
    reader = csv.DictReader(_lines(path, codec, newline=""))
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not CSV ({error})"
            continue
        yield f"{len(row[None])} more cells than columns" if None in row else dict(row)


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Buffered reading holds a megabyte per column in place of a row group, which may be the whole file.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        read = 0
        for batch in file.iter_batches(batch_size=BATCH, columns=_top(columns, file.schema_arrow.names)):
            yield from arrow_batch_rows(batch)
            read += batch.num_rows
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"data file {path}: cannot be read as parquet ({error}). Write it again or correct the path."
        ) from error


def _arrow_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as file:
            try:
                for batch in pyarrow.ipc.open_stream(file):
                    yield from arrow_batch_rows(batch)
            except pyarrow.ArrowInvalid:
                file.seek(0)
                reader = pyarrow.ipc.open_file(file)
                for i in range(reader.num_record_batches):
                    yield from arrow_batch_rows(reader.get_batch(i))
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"data file {path}: cannot be read as arrow ({error}). Write it again or correct the path."
        ) from error


def _saved_rows(path: Path, split: str, part: str, columns: list[str]) -> Iterator[RawRow]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data folder {path}: {error}; wanted a folder written by save_to_disk, or name a file in it."
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            known = list(map(str, loaded))
            raise DataError(
                f"data folder {path}: no split '{split}'; it has {', '.join(known)}.{did_you_mean(split, known)}"
            )
        loaded = loaded[split]
    if part:
        first, last = bounds(part, lambda: len(loaded))
        loaded = loaded.select(range(first, len(loaded) if last is None else min(last, len(loaded))))
    return dataset_rows(loaded, columns)


def dataset_rows(loaded: Any, columns: list[str]) -> Iterator[RawRow]:
    """The rows of a `datasets.Dataset`, which maps its files rather than reading them."""
    top = _top(columns, loaded.column_names)
    for table in (loaded.select_columns(top) if top else loaded).with_format("arrow").iter(batch_size=BATCH):
        for batch in table.to_batches():
            yield from arrow_batch_rows(batch)


def _top(columns: list[str], known: list[str]) -> list[str] | None:
    """The columns to read; None reads all, so that an error can list them."""
    wanted = list(dict.fromkeys(c if c in known else c.split(".")[0] for c in columns))
    return wanted if wanted and all(c in known for c in wanted) else None


def arrow_batch_rows(batch: Any) -> Iterator[RawRow]:
    """The rows of one Arrow record batch; text that is not UTF-8 costs its row."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):
        try:
            yield {name: batch.column(k)[i].as_py() for k, name in enumerate(batch.schema.names)}
        except UnicodeDecodeError as error:
            yield f"not UTF-8 ({error.reason})"
