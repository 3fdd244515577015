"""Streams raw rows from local files: a bad row loses only itself, and a large file is never held in memory.

Only .json files that hold one list are read whole. Compressed files (.gz, .zst) are decompressed by Arrow. The readers
of `datasets` are not used here: they give up a file at its first bad row.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from creditgraph.pipeline.core.errors import DataError, did_you_mean

RawRow = dict[str, Any] | str  # a row that cannot be read is the reason as text

TEXT_TYPES = (".jsonl", ".json", ".csv")
FILE_TYPES = (*TEXT_TYPES, ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")
BATCH = 100  # rows held at a time; some have megabytes of tests


@dataclass(kw_only=True)
class RawDataset:
    """A dataset that is open for reading.

    Attributes:
        rows: raw rows, in order.
        revision: commit on the hub, "" for local files or where it is unknown.
        files: local files with their sizes in bytes.
    """

    rows: Iterator[RawRow]
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)


def open_path(path: Path, columns: list[str], split: str = "") -> RawDataset:
    """Opens a local file, a folder written by save_to_disk, or a folder with a copy of a hub repository.

    Args:
        path: the file or folder.
        columns: columns to read; other columns of Parquet files are not read.
        split: for folders, the split; for files and folders, a part such as "train[:90%]".
    """
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"data file {path} does not exist, expected one of {', '.join(FILE_TYPES)}."
            f"{did_you_mean(path.name, near) if near else ''}"
        )
    name, part = split_part(split)
    if not path.is_dir():
        return open_files([path], columns, part)
    if any((path / note).exists() for note in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return RawDataset(rows=_saved_rows(path, name, part, columns), files=[{"path": str(path)}])
    # Not load_dataset(path): it would copy the whole folder into its cache.
    return open_files(_files_of_split(path, name), columns, part)


def open_files(files: list[Path], columns: list[str], part: str = "") -> RawDataset:
    """Opens several files, read one after the other, or a part of their rows."""

    def rows() -> Iterator[RawRow]:
        for file in files:
            yield from _file_rows(file, columns)

    for file in files:
        if not _type(file):
            raise DataError(
                f"data file {file}: expected one of {', '.join(FILE_TYPES)} (text types also with "
                f"{' or '.join(COMPRESSED)}), got '{''.join(file.suffixes[-2:])}'."
            )
        if file.stat().st_size == 0:
            raise DataError(f"data file {file} is empty, expected one problem per row.")
    sizes = [{"path": str(file), "bytes": file.stat().st_size} for file in files]
    if not part:
        return RawDataset(rows=rows(), files=sizes)
    # A part in per cent reads the rows once to count them.
    first, last = bounds(part, lambda: sum(1 for _ in rows()))
    return RawDataset(rows=islice(rows(), first, last), files=sizes)


def split_part(split: str) -> tuple[str, str]:
    """Splits "train[:90%]" into the name and the part.

    >>> split_part("train[:90%]"), split_part("test")
    (('train', '[:90%]'), ('test', ''))
    """
    name, bracket, rest = split.partition("[")
    return name, bracket + rest


def bounds(part: str, count: Callable[[], int]) -> tuple[int, int | None]:
    """First row and end of a part such as "[:90%]" or "[10:20]"; rows are counted only where the part needs it.

    >>> bounds("[10%:]", lambda: 25), bounds("[:3]", lambda: 25)
    ((2, 25), (0, 3))
    """
    rows = re.fullmatch(r"\[(\d*):(\d*)\]", part)
    if rows:
        first, last = rows.groups()
        return int(first or 0), int(last) if last else None
    import datasets

    total = count()
    try:
        instruction = datasets.ReadInstruction.from_spec(f"rows{part}").to_absolute({"rows": total})[0]
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"split part '{part}': {error}. Expected [from:to] in rows or per cent, such as [:90%] or [100:200]."
        ) from None
    return instruction.from_ or 0, total if instruction.to is None else instruction.to


def _files_of_split(folder: Path, split: str) -> list[Path]:
    inside = {file: file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file() and _type(file)}
    files = [file for file, path in inside.items() if not any(part.startswith(".") for part in path.parts)]
    # train-00000-of-00002.parquet, data/train/0.parquet
    in_name = re.compile(rf"(?:^|[/_.-]){re.escape(split)}(?:[/_.-]|$)")
    named = [file for file in files if in_name.search(str(inside[file]))]
    if not files or (split and not named and len(files) > 1):
        known = f"; it has {', '.join(str(inside[file]) for file in files[:6])}" if files else ""
        raise DataError(
            f"data folder {folder} has no file of split '{split}'{known}. Expected a folder written by save_to_disk, "
            f"or files such as {split or 'train'}-00000.parquet. Name a file in it, or correct split."
        )
    return named or files


def _type(path: Path) -> str:
    """The file's type, without its compression; "" for files that cannot be read."""
    compressed = path.suffix in COMPRESSED
    suffix = Path(path.stem).suffix if compressed else path.suffix
    return suffix if suffix in (TEXT_TYPES if compressed else FILE_TYPES) else ""


def _file_rows(path: Path, columns: list[str]) -> Iterator[RawRow]:
    text_readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}
    reader = text_readers.get(_type(path))
    return reader(path) if reader else _columnar_rows(path, columns)


def _lines(path: Path, newline: str | None = None) -> Iterator[str]:
    import pyarrow

    read = 0
    # A byte that is not UTF-8 becomes a surrogate, so that only its row is rejected.
    with io.TextIOWrapper(
        pyarrow.input_stream(str(path), compression="detect"), "utf-8-sig", "surrogateescape", newline
    ) as lines:
        try:
            for line in lines:
                yield line
                read += 1
        except OSError as error:
            raise DataError(
                f"data file {path} cannot be decompressed after {read} lines ({error}), expected a complete file. Copy "
                "it again."
            ) from error


def _object(value: Any) -> RawRow:
    return value if isinstance(value, dict) else f"a JSON {type(value).__name__}, expected an object"


def _parse(text: str) -> RawRow:
    try:
        return _object(json.loads(text))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"


def _jsonl_rows(path: Path) -> Iterator[RawRow]:
    for line in _lines(path):
        if line.strip():
            yield _parse(line)


def _json_rows(path: Path) -> Iterator[RawRow]:
    text = "".join(_lines(path))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(_parse(text.lstrip().split("\n", 1)[0]), str):
            raise DataError(
                f"data file {path}: not JSON ({error}), expected a list of objects, or one object per line."
            ) from None
        # The type is .json but the content is JSON lines, as in many published sets.
        yield from _jsonl_rows(path)
        return
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise DataError(f"data file {path}: expected a list of objects, got a JSON {type(rows).__name__}.")
    yield from map(_object, rows)


def _csv_rows(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(1 << 30)  # the default refuses answers of 128 kB
    # Strict: a quote that is never closed would put all following rows into one cell.
    reader = csv.DictReader(_lines(path, newline=""), strict=True)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"not CSV ({error})"
            continue
        yield f"{len(row[None])} more cells than columns" if None in row else dict(row)


def _columnar_rows(path: Path, columns: list[str]) -> Iterator[RawRow]:
    import pyarrow

    try:
        for batch in _batches(path, columns):
            yield from _batch_rows(batch)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"data file {path} cannot be read as {path.suffix[1:]} ({' '.join(str(error).split())}). Write it again or "
            "correct the path."
        ) from error


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        # Buffered reading holds a megabyte per column instead of a row group, which may be the whole file.
        file = pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        yield from file.iter_batches(batch_size=BATCH, columns=top_columns(columns, file.schema_arrow.names))
        return
    with pyarrow.OSFile(str(path)) as arrow:
        try:
            yield from pyarrow.ipc.open_stream(arrow)
        except pyarrow.ArrowInvalid:  # not the stream format, which `datasets` writes, but the file format
            arrow.seek(0)
            reader = pyarrow.ipc.open_file(arrow)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


def _batch_rows(batch: Any) -> Iterator[RawRow]:
    """The rows of one Arrow record batch; a row with text that is not UTF-8 becomes a reason."""
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


def _saved_rows(path: Path, split: str, part: str, columns: list[str]) -> Iterator[RawRow]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data folder {path}: {error}; expected a folder written by save_to_disk. Correct path, or name a file in "
            "it."
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            known = list(map(str, loaded))
            raise DataError(
                f"data folder {path} has no split '{split}'; it has {', '.join(known)}.{did_you_mean(split, known)}"
            )
        loaded = loaded[split]
    if part:
        first, last = bounds(part, lambda: len(loaded))
        loaded = loaded.select(range(first, len(loaded) if last is None else min(last, len(loaded))))
    return dataset_rows(loaded, columns)


def dataset_rows(loaded: Any, columns: list[str]) -> Iterator[RawRow]:
    """The rows of a `datasets.Dataset`, which maps its files rather than reading them."""
    top = top_columns(columns, loaded.column_names)
    for table in (loaded.select_columns(top) if top else loaded).with_format("arrow").iter(batch_size=BATCH):
        for batch in table.to_batches():
            yield from _batch_rows(batch)


def top_columns(columns: list[str], known: list[str]) -> list[str] | None:
    """The columns to read, a.b being a field of a; None reads all, so that an error can list them."""
    top = list(dict.fromkeys(c if c in known else c.split(".")[0] for c in columns))
    return top if top and all(c in known for c in top) else None
