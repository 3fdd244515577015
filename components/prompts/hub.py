"""Datasets of the Hugging Face hub: loaded, streamed, or file by file; failures as sentences that name the local way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from components.prompts.readers import Opened, RawRow, bounds, dataset_rows, open_files, open_path, split_part
from pipeline.core.errors import DataError

_COMMIT = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


class HubSet(Protocol):
    """What is read: a `Source` or a `Join`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def subset(self) -> str: ...  # noqa: D102
    @property
    def revision(self) -> str | None: ...  # noqa: D102
    @property
    def split(self) -> str: ...  # noqa: D102
    @property
    def files(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def path(self) -> str: ...  # noqa: D102


def open_hub(wanted: HubSet, columns: list[str], place: str, streaming: bool = False) -> Opened:
    """A dataset of the hub, or its local copy where `path` is set.

    Raises:
        DataError: it cannot be had; the sentence says whether the network, the name, the revision, the split or a file
            is at fault.
    """
    if wanted.path:
        path = Path(wanted.path).expanduser()
        if wanted.files and path.is_dir():
            return open_files([_inside(path, name) for name in wanted.files], columns)
        return open_path(path, columns, wanted.split)
    try:
        return _files(wanted, columns) if wanted.files else _load(wanted, columns, place, streaming)
    except DataError:
        raise
    except Exception as error:  # the hub client, fsspec and dataset builders each raise their own types
        raise hub_failure(wanted, error, place) from error


def hub_failure(wanted: HubSet, error: Exception, place: str) -> DataError:
    """What went wrong, what was wanted, and the next step."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    first, name, local = lines[0], wanted.name, f"set {place}.path=FILE_OR_FOLDER to read a local copy"
    kind = " ".join(c.__name__ for c in type(error).__mro__)
    if "RevisionNotFound" in kind or re.search(
        r"revision.*(doesn't exist|not found|invalid rev)", " ".join(lines), re.I
    ):
        return DataError(
            f"dataset '{name}': revision '{wanted.revision}' does not exist on the Hugging Face hub ({first}). "
            f"Correct {place}.revision, take null for the newest, or {local}."
        )
    if "EntryNotFound" in kind and "LocalEntryNotFound" not in kind:
        return DataError(
            f"dataset '{name}': no file such as {', '.join(wanted.files)} in it ({first}). Correct {place}.files, or "
            f"{local}."
        )
    if "split" in first.lower():
        return DataError(
            f"dataset '{name}': split '{wanted.split}' cannot be had ({first}). Correct {place}.split, or {local}."
        )
    if "scripts are no longer supported" in first:
        return DataError(
            f"dataset '{name}': it is made by a script, which is not run ({first}). Name its files in {place}.files, "
            f"or {local}."
        )
    why = f"dataset '{name}': cannot be loaded from the Hugging Face hub ({first})"
    return DataError(f"{why}. Check the name, the network and access rights, or {local}.")


def _inside(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise DataError(
            f"data folder {folder}: no file '{name}'; wanted a copy of the repository. Copy the file there or correct "
            "files."
        )
    return file


def _files(wanted: HubSet, columns: list[str]) -> Opened:
    from huggingface_hub import hf_hub_download

    found = [
        Path(hf_hub_download(wanted.name, name, repo_type="dataset", revision=wanted.revision)) for name in wanted.files
    ]
    opened = open_files(found, columns)
    opened.revision = next(iter(_COMMIT.findall(str(found[0].parent))), "")
    return opened


def _load(wanted: HubSet, columns: list[str], place: str, streaming: bool) -> Opened:
    import datasets

    name, part = split_part(wanted.split)
    split = name if streaming else wanted.split
    loaded = datasets.load_dataset(
        wanted.name,
        wanted.subset or None,
        split=split,
        revision=wanted.revision or None,
        **({"streaming": True} if streaming else {}),
    )
    if streaming:
        return Opened(rows=_streamed(loaded, columns, part, wanted, place), revision=_newest(wanted))
    cached = " ".join(str(f.get("filename", "")) for f in loaded.cache_files)
    sums = " ".join((loaded.info.download_checksums or {}).keys())
    return Opened(rows=dataset_rows(loaded, columns), revision=next(iter(_COMMIT.findall(f"{sums} {cached}")), ""))


def _newest(wanted: HubSet) -> str:
    """The commit that a streamed revision stands for; "" where the hub does not say."""
    if wanted.revision and _COMMIT.fullmatch(wanted.revision):
        return wanted.revision
    try:
        from huggingface_hub import HfApi

        return str(HfApi().dataset_info(wanted.name, revision=wanted.revision).sha or "")
    except Exception:  # the rows have been found; only their commit stays unknown
        return ""


def _streamed(loaded: Any, columns: list[str], part: str, wanted: HubSet, place: str) -> Iterator[RawRow]:
    def count() -> int:
        known = (loaded.info.splits or {}).get(split_part(wanted.split)[0])
        if known is None or not known.num_examples:
            raise DataError(
                f"dataset '{wanted.name}': its number of rows is unknown while streaming; wanted rows, as in "
                "train[:1000]."
            )
        return int(known.num_examples)

    known = loaded.column_names
    top = list(dict.fromkeys(c if c in (known or ()) else c.split(".")[0] for c in columns))
    if known and all(c in known for c in top):
        loaded = loaded.select_columns(top)
    if part:
        first, last = bounds(part, count)
        loaded = loaded.skip(first) if last is None else loaded.skip(first).take(last - first)
    read = 0
    try:
        for row in loaded:
            yield row
            read += 1
    except Exception as error:  # every reader behind a stream raises its own types
        raise DataError(
            f"dataset '{wanted.name}': the stream broke after {read} rows "
            f"({str(error).strip() or type(error).__name__}). "
            f"Try again, set {place}.streaming=false to download it first, or set {place}.path=FILE_OR_FOLDER to read "
            "a local copy."
        ) from error
