"""Datasets of the Hugging Face hub: downloaded, streamed, or file by file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from creditgraph.components.data.files import (
    RawDataset,
    RawRow,
    bounds,
    dataset_rows,
    open_files,
    open_path,
    split_part,
    top_columns,
)
from creditgraph.components.data.sources import HubDataset
from creditgraph.pipeline.core.errors import DataError

_COMMIT = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


def open_hub(dataset: HubDataset, columns: list[str], place: str, streaming: bool = False) -> RawDataset:
    """A dataset of the hub, or its local copy where `path` is set.

    Raises:
        DataError: it cannot be loaded; the error names the cause: network, name, revision, split or file.
    """
    if dataset.path:
        path = Path(dataset.path).expanduser()
        if not dataset.files or not path.is_dir():
            return open_path(path, columns, dataset.split)
        missing = [name for name in dataset.files if not (path / name).is_file()]
        if missing:
            raise DataError(
                f"data folder {path} has no file '{missing[0]}', expected a copy of the repository. Copy the file "
                "there or correct files."
            )
        return open_files([path / name for name in dataset.files], columns)
    try:
        if dataset.files:
            return _download(dataset, columns)
        return _stream(dataset, columns, place) if streaming else _load(dataset, columns)
    except DataError:
        raise
    except Exception as error:  # the hub client, fsspec and dataset builders each raise their own types
        raise _failure(dataset, error, place) from error


def _failure(dataset: HubDataset, error: Exception, place: str) -> DataError:
    """Returns the error with its cause and the next step."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0]
    types = {base.__name__ for base in type(error).__mro__}
    no_revision = re.compile(r"revision.*(doesn't exist|not found|invalid rev)", re.IGNORECASE | re.DOTALL)
    if "RevisionNotFoundError" in types or no_revision.search(text):
        what = f"revision '{dataset.revision}' does not exist on the Hugging Face hub"
        step = f"Correct {place}.revision, take null for the newest"
    elif "EntryNotFoundError" in types and "LocalEntryNotFoundError" not in types:
        what = f"it has no file such as {', '.join(dataset.files)}"
        step = f"Correct {place}.files"
    elif "split" in first.lower():
        what = f"split '{dataset.split}' cannot be loaded"
        step = f"Correct {place}.split"
    elif "scripts are no longer supported" in first:
        what = "it has a loading script, which is not run"
        step = f"Name its files in {place}.files"
    else:
        what = "it cannot be loaded from the Hugging Face hub"
        step = "Check the name, the network and access rights"
    local = f"set {place}.path=FILE_OR_FOLDER to read a local copy"
    return DataError(f"dataset '{dataset.name}': {what} ({first}). {step}, or {local}.")


def _download(dataset: HubDataset, columns: list[str]) -> RawDataset:
    from huggingface_hub import hf_hub_download

    files = [
        Path(hf_hub_download(dataset.name, name, repo_type="dataset", revision=dataset.revision))
        for name in dataset.files
    ]
    opened = open_files(files, columns)
    opened.revision = _commit_in(str(files[0].parent))  # the cache's folders are named by commit
    return opened


def _load(dataset: HubDataset, columns: list[str]) -> RawDataset:
    import datasets

    loaded = datasets.load_dataset(
        dataset.name, dataset.subset or None, split=dataset.split, revision=dataset.revision or None
    )
    # The commit is part of the addresses that were downloaded, or of the cached files' paths.
    addresses = [*(loaded.info.download_checksums or {}), *(str(f.get("filename", "")) for f in loaded.cache_files)]
    return RawDataset(rows=dataset_rows(loaded, columns), revision=_commit_in(" ".join(addresses)))


def _stream(dataset: HubDataset, columns: list[str], place: str) -> RawDataset:
    import datasets

    name, part = split_part(dataset.split)
    loaded = datasets.load_dataset(
        dataset.name, dataset.subset or None, split=name, revision=dataset.revision or None, streaming=True
    )

    def count() -> int:
        known = (loaded.info.splits or {}).get(name)
        if known is None or not known.num_examples:
            raise DataError(
                f"dataset '{dataset.name}': its number of rows is unknown while streaming, expected a part in rows, as "
                "in train[:1000]."
            )
        return int(known.num_examples)

    first, last = bounds(part, count) if part else (0, None)
    top = top_columns(columns, loaded.column_names or [])
    rows = loaded.select_columns(top) if top else loaded
    if part:
        rows = rows.skip(first) if last is None else rows.skip(first).take(last - first)
    return RawDataset(rows=_streamed(rows, dataset, place), revision=_newest(dataset))


def _streamed(rows: Any, dataset: HubDataset, place: str) -> Iterator[RawRow]:
    read = 0
    try:
        for row in rows:
            yield row
            read += 1
    except Exception as error:  # each reader under a stream raises its own types
        raise DataError(
            f"dataset '{dataset.name}': the stream broke after {read} rows "
            f"({str(error).strip() or type(error).__name__}). Try again, set {place}.streaming=false to download it "
            f"first, or set {place}.path=FILE_OR_FOLDER to read a local copy."
        ) from error


def _newest(dataset: HubDataset) -> str:
    """Returns the commit of a streamed revision; "" if the hub does not report it."""
    if dataset.revision and _COMMIT.fullmatch(dataset.revision):
        return dataset.revision
    try:
        from huggingface_hub import HfApi

        return str(HfApi().dataset_info(dataset.name, revision=dataset.revision).sha or "")
    except Exception:  # the rows can be read; only their commit stays unknown
        return ""


def _commit_in(text: str) -> str:
    commits: list[str] = _COMMIT.findall(text)
    return commits[0] if commits else ""
