"""Records of past iterations in archives, so that a long run has few files.

A record starts as record/NODE.OUTPUT/000003.parquet (or .json). When a run has passed a segment of iterations, their
records move unchanged into record/000000-000099.zip, a ZIP archive without compression whose members are named
NODE.OUTPUT/000003.parquet. An archive is written aside, synced and renamed before the loose files are deleted, and its
bytes depend on those of the records only: a kill at any instant loses nothing, and packing again gives the same file.
Readers name a record by its loose path wherever it is.
"""

from __future__ import annotations

import hashlib
import io
import logging
import struct
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import pyarrow.parquet as pq

from creditgraph.pipeline.run.checkpoint import checksum
from creditgraph.pipeline.run.run_directory import replacing, sync_directory

logger = logging.getLogger("creditgraph")

SEGMENT = 100  # iterations per archive
LARGE = 2**20  # bytes of a record that stays a file: few of them fit a disk, and copying them would take long
_LOCAL_HEADER = 30  # bytes before a member's name; the lengths of its name and its extra field are at 26


def recorded_files(folder: Path) -> list[str]:
    """Names ("node.output/000003.parquet") of all records below a record/ folder, loose and packed, sorted."""
    packed = {name for archive in _archives(folder) for name in _members(archive)}
    return sorted(packed | {f"{file.parent.name}/{file.name}" for file in _loose(folder)})


def is_recorded(file: Path) -> bool:
    """Whether a record exists, as a file or in an archive."""
    return file.exists() or _archive_of(file) is not None


def record_size(file: Path) -> int:
    """Bytes of a record; raises FileNotFoundError."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return len(_packed(file))


def record_checksum(file: Path) -> str:
    """SHA-256 of a record; raises FileNotFoundError."""
    try:
        return checksum(file)
    except FileNotFoundError:
        return hashlib.sha256(_packed(file)).hexdigest()


def open_parquet(file: Path) -> pq.ParquetFile:
    """Opens a record; raises FileNotFoundError."""
    try:
        return pq.ParquetFile(file)
    except FileNotFoundError:
        return pq.ParquetFile(io.BytesIO(_packed(file)))


def pack(folder: Path, last: int) -> None:
    """Moves the records of all segments that end by iteration `last` into archives."""
    due = defaultdict(list)
    for file in _loose(folder):
        first = int(file.stem) // SEGMENT * SEGMENT
        if first + SEGMENT - 1 <= last and file.stat().st_size <= LARGE:
            due[folder / f"{first:06d}-{first + SEGMENT - 1:06d}.zip"].append(file)
    for archive, files in due.items():
        if archive.exists() and not _members(archive):
            logger.warning("%s: damaged, so the records beside it are not added. Restore it from a copy.", archive)
            continue
        _rewrite(archive, {f"{file.parent.name}/{file.name}": file for file in files})
        for file in files:
            file.unlink()


def remove(folder: Path, names: Iterable[str]) -> None:
    """Deletes records, loose or packed; those that are gone already are left out."""
    packed = defaultdict(set)
    for name in names:
        (folder / name).unlink(missing_ok=True)
        archive = _archive_of(folder / name)
        if archive is not None:
            packed[archive].add(name)
    for archive, lost in packed.items():
        _rewrite(archive, {}, lost)


def _rewrite(archive: Path, files: Mapping[str, Path], without: Collection[str] = ()) -> None:
    old = _members(archive)
    names = sorted((old.keys() | files.keys()) - set(without))
    if not names:
        archive.unlink()
        return
    with replacing(archive) as aside, zipfile.ZipFile(aside, "w") as out:
        for name in names:
            data = files[name].read_bytes() if name in files else _member(archive, *old[name])
            out.writestr(zipfile.ZipInfo(name), data)  # with a fixed date
    sync_directory(archive.parent)


def _loose(folder: Path) -> list[Path]:
    found = [file for kind in ("parquet", "json") for file in folder.glob(f"*/*.{kind}")]
    return [file for file in found if file.stem.isdecimal()]


def _archives(folder: Path) -> list[Path]:
    return [file for file in folder.glob("[0-9]*-*.zip") if file.stem.replace("-", "", 1).isdecimal()]


def _archive_of(file: Path) -> Path | None:
    if not file.stem.isdecimal():
        return None
    for archive in _archives(file.parent.parent):
        first, _, last = archive.stem.partition("-")
        if int(first) <= int(file.stem) <= int(last) and f"{file.parent.name}/{file.name}" in _members(archive):
            return archive
    return None


def _packed(file: Path) -> bytes:
    archive = _archive_of(file)
    if archive is None:
        raise FileNotFoundError(f"{file}: no such record")
    return _member(archive, *_members(archive)[f"{file.parent.name}/{file.name}"])


def _members(archive: Path) -> dict[str, tuple[int, int]]:
    """Member → (offset of its header, bytes); {} without an archive that can be read."""
    try:
        status = archive.stat()
    except FileNotFoundError:
        return {}
    return _listed(archive, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=512)
def _listed(archive: Path, changed: int, size: int) -> dict[str, tuple[int, int]]:
    try:
        with zipfile.ZipFile(archive) as content:
            return {m.filename: (m.header_offset, m.file_size) for m in content.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, struct.error):
        return {}


def _member(archive: Path, header: int, size: int) -> bytes:
    # Not through zipfile, which reads the list of members at every opening. Checksums of records notice damage.
    with archive.open("rb") as content:
        content.seek(header)
        lengths = struct.unpack("<HH", content.read(_LOCAL_HEADER)[26:])
        content.seek(header + _LOCAL_HEADER + sum(lengths))
        return content.read(size)
