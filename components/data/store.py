"""Accepted problems: small sets in memory, large ones in a temporary file, read back one row at a time."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, overload

IN_MEMORY = 16 << 20  # bytes of rows; more go to the file
_JSON = json.JSONEncoder(ensure_ascii=False, default=str)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One usable problem.

    Attributes:
        text: model input.
        answer: reference answer.
        metadata: JSON values; always "template", "question" and "source_row", for the embedded task the whole problem.
        solution: worked reference solution, "" without one.
    """

    text: str
    answer: str
    metadata: dict[str, Any]
    solution: str = ""


class RowStore(Sequence[Row]):
    """Rows in the order they were appended. Beyond 16 MiB they are in a file without a name.

    The file ends with the process. Eight bytes per row stay in memory, so a million rows cost 8 MB however long their
    texts are.

    Args:
        folder: folder of the file; the system's folder for temporary files if None.
    """

    def __init__(self, folder: Path | None = None) -> None:
        place = None if folder is None else str(folder)
        # No `with`: the file lives as long as the store.
        self._file = SpooledTemporaryFile(max_size=IN_MEMORY, dir=place)  # noqa: SIM115
        self._ends = array("q", [0])
        self._digest = blake2b(digest_size=16)

    def append(self, row: Row) -> None:
        """Adds a row; its metadata must be JSON values, anything else becomes text."""
        # Rows without a solution are written without it, so that their hash is that of the problem alone.
        fields = [row.text, row.answer, row.metadata, *([row.solution] if row.solution else [])]
        data = _JSON.encode(fields).encode("utf-8", "surrogatepass")
        self._file.seek(self._ends[-1])
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))
        self._digest.update(data)

    @property
    def digest(self) -> str:
        """Hexadecimal BLAKE2b of all rows in order."""
        return self._digest.hexdigest()

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        self._file.seek(self._ends[place])
        text, answer, metadata, *solution = json.loads(
            self._file.read(self._ends[place + 1] - self._ends[place]).decode("utf-8", "surrogatepass")
        )
        return Row(text=text, answer=answer, metadata=metadata, solution=solution[0] if solution else "")
