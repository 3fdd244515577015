"""Where problems come from: one data section of the configuration becomes raw rows, with their place for error texts.

Files are read tolerantly, row by row, so that one bad row costs one row. Hub datasets, Arrow files and folders written by
`save_to_disk` go through Hugging Face `datasets`, imported only then.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from components.prompts.chains import Difficulty
from components.prompts.templates import TEMPLATES
from pipeline.errors import ConfigError, DataError, did_you_mean
from pipeline.settings import build_config

FILE_TYPES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")
LOCAL_ALTERNATIVE = "Check the name, the network and access rights, or use a local copy with source: file and path."


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of the data section, such as data.train."""

    source: Literal["chains", "file", "hub"] = "chains"
    """chains: the embedded task; file: a local file or a folder written by save_to_disk; hub: a Hugging Face dataset"""
    path: str = ""
    """file: .jsonl, .json, .parquet, .arrow, .csv, or a folder"""
    name: str = ""
    """hub: dataset name, 'owner/name'"""
    subset: str = ""
    """hub: configuration of the dataset, empty for its default"""
    revision: str = ""
    """hub: branch, tag or commit; name one to make a run repeatable"""
    split: str = "train"
    """chains: train, validation or eval (no problem is in two of them); hub: split, maybe a slice such as train[:90%]; folders: split"""
    question: str = "question"
    """column with the problem text"""
    answer: str = "answer"
    """column with the reference answer; empty: there is none (programs, judged by their tests)"""
    answer_boxed: bool = False
    """the answer column holds a worked solution; the answer is what stands in its last \\boxed{}"""
    template: str = ""
    """how a question becomes model input: chains, thought, plain or chat; empty: chains for the embedded task, otherwise thought"""
    metadata: dict[str, str] = field(default_factory=dict)
    """further columns (right) that verifiers read under a name (left), such as tests of programs or choices of a question"""
    keep: dict[str, str] = field(default_factory=dict)
    """keeps only rows whose column (left) has this value (right), compared as text"""
    size: int = 0
    """most rows to take, from the front; 0 takes all (chains: 2000)"""
    seed: int = 0
    """chains: which endless list of problems to draw from"""
    difficulty: Difficulty = field(default_factory=Difficulty)
    """chains: how hard the problems are"""

    def __post_init__(self) -> None:
        if self.source == "file" and not self.path:
            raise ValueError("source 'file' without a path; wanted path: FILE.")
        if self.source == "hub" and not self.name:
            raise ValueError("source 'hub' without a name; wanted name: OWNER/NAME.")
        if self.size < 0:
            raise ValueError(f"size: found {self.size}; wanted 0 (all rows) or a positive number.")
        if self.template and self.template not in TEMPLATES:
            raise ValueError(f"template: found '{self.template}'.{did_you_mean(self.template, TEMPLATES)}")

    @property
    def place(self) -> str:
        """What error texts call it."""
        return {"chains": "the embedded task", "file": self.path, "hub": f"dataset '{self.name}'"}[self.source]


def parse_source(entry: dict[str, Any], place: str) -> Source:
    """Checks a data section; all its mistakes come in one ConfigError."""
    source, problems = build_config(Source, entry, place)
    if problems:
        raise ConfigError("\n".join(problems))
    assert isinstance(source, Source)
    return source


def read_rows(source: Source) -> Iterator[dict[str, Any] | str]:
    """Raw rows as dicts, in order; a row that cannot be read comes as a sentence saying why."""
    if source.source == "hub":
        return _arrow_rows(_hub_table(source))
    path = Path(source.path).expanduser()
    if not path.exists():
        near = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"data file {path}: not found; wanted one of {', '.join(FILE_TYPES)}.{did_you_mean(path.name, near) if near else ''}"
        )
    if path.is_dir():
        return _arrow_rows(_folder_table(path, source.split))
    if path.stat().st_size == 0:
        raise DataError(f"data file {path}: empty; wanted one problem per row.")
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}
    if path.suffix in readers:
        return readers[path.suffix](path)
    if path.suffix in (".parquet", ".arrow"):
        return _arrow_rows(_file_table(path))
    raise DataError(f"data file {path}: type '{path.suffix}'; wanted one of {', '.join(FILE_TYPES)}.")


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any] | str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as lines:
        for line in lines:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    yield f"not JSON ({error})"
                    continue
                yield row if isinstance(row, dict) else f"a JSON {type(row).__name__}; wanted an object"


def _json_rows(path: Path) -> Iterator[dict[str, Any] | str]:
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    try:
        rows = json.loads(text)
    except ValueError as error:
        try:
            json.loads(text.lstrip().split("\n", 1)[0])
        except ValueError:
            raise DataError(f"data file {path}: not JSON ({error}); wanted a list of objects, or one object per line.") from None
        yield from _jsonl_rows(path)  # the ending is .json, the content is JSON lines, as many published sets have it
        return
    if isinstance(rows, dict):
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else [rows]
    if not isinstance(rows, list):
        raise DataError(f"data file {path}: a JSON {type(rows).__name__}; wanted a list of objects.")
    for row in rows:
        yield row if isinstance(row, dict) else f"a JSON {type(row).__name__}; wanted an object"


def _csv_rows(path: Path) -> Iterator[dict[str, Any] | str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        for row in csv.DictReader(lines):
            if None in row:
                yield f"{len(row[None])} more cells than columns"
            else:
                yield dict(row)


def _file_table(path: Path) -> Any:
    import datasets
    import pyarrow.parquet

    try:
        if path.suffix == ".arrow":
            return datasets.Dataset.from_file(str(path)).data.table
        return pyarrow.parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data file {path}: cannot be read as {path.suffix[1:]} ({error}). Write it again or correct the path.") from error


def _folder_table(path: Path, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"data folder {path}: {error}; wanted a folder written by save_to_disk, or name a file in it.") from error
    return _pick(loaded, split, f"data folder {path}")


def _hub_table(source: Source) -> Any:
    import datasets

    try:
        loaded = datasets.load_dataset(source.name, source.subset or None, split=source.split, revision=source.revision or None)
    except Exception as error:  # the hub client, fsspec and dataset builders each raise their own types
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "split" in first.lower():
            raise DataError(f"dataset '{source.name}': split '{source.split}' cannot be had ({first}). Correct split.") from error
        raise DataError(f"dataset '{source.name}': cannot be loaded from the Hugging Face hub ({first}). {LOCAL_ALTERNATIVE}") from error
    return loaded.with_format("arrow")[:]


def _pick(loaded: Any, split: str, place: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded.with_format("arrow")[:]
    if split not in loaded:
        raise DataError(f"{place}: no split '{split}'; it has {', '.join(map(str, loaded))}.{did_you_mean(split, map(str, loaded))}")
    return loaded[split].with_format("arrow")[:]


def _arrow_rows(table: Any) -> Iterator[dict[str, Any] | str]:
    names = table.column_names
    for batch in table.to_batches():
        for i in range(batch.num_rows):
            try:
                yield {name: batch.column(k)[i].as_py() for k, name in enumerate(names)}
            except UnicodeDecodeError as error:
                yield f"not UTF-8 ({error.reason})"
