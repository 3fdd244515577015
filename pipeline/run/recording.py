"""Payloads as Arrow tables and Parquet files, bit for bit.

A row of a batch is a row of the table. A tensor is a column, a `Jagged` a list column over the same memory, a list of
strings a string column, a list of other JSON values a string column of JSON text, and named columns ("columns.returns")
one list column each. Values of the whole batch, the class and the tensor types are in the schema's metadata under
"creditgraph". pandas, DuckDB and `datasets` can read the files. record/checksums.jsonl has the SHA-256 of each file.
Those of past iterations are in archives (`packing.py`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from creditgraph.pipeline.core.encoding import class_name, payload_class
from creditgraph.pipeline.core.errors import DataError, RunError
from creditgraph.pipeline.core.handles import Handle
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Payload, Weights
from creditgraph.pipeline.run.metrics import read_lines
from creditgraph.pipeline.run.packing import open_parquet, record_checksum, recorded_files
from creditgraph.pipeline.run.run_directory import CHECKSUMS, replacing

logger = logging.getLogger("creditgraph")

KEY = b"creditgraph"
FORMAT = 1


def to_arrow(payload: Any) -> pa.Table:
    """A payload as a table. Tensors on the CPU are not copied, except for bool and half precision.

    Raises:
        DataError: a field cannot be a column; the error names it.
    """
    if not isinstance(payload, Payload) or isinstance(payload, Handle | Weights):
        raise DataError(f"{_place(payload)}: a {type(payload).__name__} is a handle and cannot be recorded.")
    cls: Any = type(payload)
    hints = _hints(cls)
    columns: dict[str, pa.Array] = {}
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(payload):
        fields[f.name] = _pack(
            f"{_place(payload)}.{f.name}", f.name, getattr(payload, f.name), hints.get(f.name), columns
        )
    note = {"format": FORMAT, "class": class_name(type(payload)), "origin": payload.origin, "fields": fields}
    return pa.table(columns or {"empty": pa.array([True])}, metadata={KEY: json.dumps(note)})


def from_arrow(table: pa.Table, place: str = "table") -> Any:
    """Restores the payload from its table.

    Raises:
        DataError: the table was not made by `to_arrow`, or by another version of it.
    """
    try:
        note = json.loads((table.schema.metadata or {})[KEY])
    except (KeyError, ValueError):
        raise DataError(
            f"{place}: not a recorded payload (no 'creditgraph' entry in its schema); expected a file from a run's "
            "record/ folder."
        ) from None
    if note["format"] != FORMAT:
        raise DataError(
            f"{place}: expected record format {FORMAT}, got {note['format']}; read it with the version of creditgraph "
            "that wrote it."
        )
    try:
        cls = payload_class(note["class"])
    except RunError as error:
        raise DataError(f"{place}: {error}") from None
    # A field that the class no longer has is ignored, so that older records can be read.
    known = {f.name for f in dataclasses.fields(cls)}
    values = {name: _unpack(name, how, table) for name, how in note["fields"].items() if name in known}
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise DataError(
            f"{place}: has no {', '.join(missing)}, which {cls.__name__} needs; it was recorded by another version."
        )
    payload = cls(**values)
    if note["origin"]:
        object.__setattr__(payload, "origin", note["origin"])
    return payload


def write_payload(path: Path, payload: Payload) -> None:
    """Writes one Parquet file under a temporary name and renames it."""
    table = to_arrow(payload)
    texts = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    with replacing(path, durable=False) as aside:
        # Dictionaries only for text: they may merge float NaNs of different bits.
        pq.write_table(
            table, aside, compression="zstd", compression_level=1, use_dictionary=texts, write_statistics=False
        )


def read_table(file: Path, columns: list[str] | None = None) -> pa.Table:
    """Reads one Parquet file; starts faster than `pq.read_table`, which imports the dataset machinery.

    Raises:
        DataError: it is not the file that the run recorded.
    """
    problem = record_problem(file, recorded_sums(file.parent.parent))
    if problem:
        raise DataError(f"{file}: {problem}. Restore it from a copy, or remove it.")
    with open_parquet(file) as open_file:
        return open_file.read(columns=columns, use_threads=False)  # small files: threads cost more than they save


def recorded_class(file: Path) -> str:
    """ "module:Name" of the payload class that a Parquet file names, "" for a file that names none."""
    with open_parquet(file) as open_file:
        note = (open_file.schema_arrow.metadata or {}).get(KEY, b"{}")
    return str(json.loads(note).get("class", ""))


def recorded_sums(folder: Path) -> dict[str, str]:
    """File below a record/ folder → its SHA-256, from checksums.jsonl; {} without one. Removed files are left out."""
    file = folder / CHECKSUMS
    if not file.exists():
        return {}
    status = file.stat()
    return _recorded_sums(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _recorded_sums(file: Path, changed: int, size: int) -> dict[str, str]:
    rows = {str(row.get("file")): row.get("sha256") for row in read_lines(file)}
    return {name: str(value) for name, value in rows.items() if value is not None}


def removed_records(folder: Path) -> list[str]:
    """Files below a record/ folder that were removed to keep it within its budget, by checksums.jsonl."""
    file = folder / CHECKSUMS
    rows = {str(row.get("file")): row.get("sha256") for row in read_lines(file)} if file.exists() else {}
    return [name for name, value in rows.items() if value is None]


def record_problem(file: Path, sums: Mapping[str, str]) -> str:
    """How a file differs from what the run recorded there; "" when it does not, or is not in `sums`."""
    expected = sums.get(f"{file.parent.name}/{file.name}")
    if expected is None:
        return ""
    try:
        same = record_checksum(file) == expected
    except FileNotFoundError:
        return f"missing, although {CHECKSUMS} lists it"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if same else f"its checksum differs from {CHECKSUMS}, so it is damaged"


def read_payload(path: Path) -> Any:
    """Reads a file of `write_payload`; raises DataError when it is missing, half-written or foreign."""
    try:
        table = read_table(path)
    except FileNotFoundError:
        there = [n for n in recorded_files(path.parent.parent) if Path(n).match(f"{path.parent.name}/*.parquet")]
        hint = (
            f"recorded there: {Path(there[0]).name} to {Path(there[-1]).name}"
            if there
            else "nothing is recorded there; check run.record.outputs"
        )
        raise DataError(f"{path}: no such record; {hint}.") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}); it is half-written or foreign. "
            "Remove it."
        ) from error
    return from_arrow(table, str(path))


def recorded_iterations(run: Path, output: str) -> list[int]:
    """The iterations of which a run has recorded an output ("node.output")."""
    names = map(Path, recorded_files(run / "record"))
    return sorted(int(name.stem) for name in names if name.parent.name == output and name.suffix == ".parquet")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _pack(place: str, name: str, value: Any, hint: Any, columns: dict[str, pa.Array]) -> dict[str, Any]:
    """Adds the columns of one field; returns how to read them back."""
    if isinstance(value, Tensor) and value.dim() == 1:
        columns[name] = pa.array(_to_numpy(place, value))
        return {"kind": "tensor", "dtype": dtype_name(value)}
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"kind": "number", "dtype": dtype_name(value), "value": value.item()}
    if isinstance(value, Jagged):
        columns[name] = _list_array(place, value)
        return {"kind": "jagged", "dtype": dtype_name(value.values)}
    if isinstance(value, list):
        if hint == list[str] and (text := _text_array(value)) is not None:
            columns[name] = text
            return {"kind": "text"}
        columns[name] = pa.array([_json(place, v) for v in value], pa.string())
        return {"kind": "json"}
    if isinstance(value, dict) and value and all(isinstance(v, Jagged) for v in value.values()):
        for key, column in value.items():
            columns[f"{name}.{key}"] = _list_array(f"{place}.{key}", column)
        return {"kind": "columns", "dtypes": {key: dtype_name(v.values) for key, v in value.items()}}
    if hint == dict[str, float] and value:
        for key, number in value.items():
            columns[f"{name}.{key}"] = pa.array([float(number)], pa.float64())
        return {"kind": "numbers", "names": list(value)}
    return {"kind": "batch", "value": json.loads(_json(place, value))}


def _unpack(name: str, how: dict[str, Any], table: pa.Table) -> Any:
    kind = how["kind"]
    if kind == "tensor":
        return _to_tensor(_column(table, name), how["dtype"])
    if kind == "number":
        return torch.tensor(how["value"], dtype=getattr(torch, how["dtype"]))
    if kind == "jagged":
        return _to_jagged(_column(table, name), how["dtype"])
    if kind == "text":
        return table.column(name).to_pylist()
    if kind == "json":
        return [json.loads(v) for v in table.column(name).to_pylist()]
    if kind == "columns":
        return {key: _to_jagged(_column(table, f"{name}.{key}"), dtype) for key, dtype in how["dtypes"].items()}
    if kind == "numbers":
        return {key: table.column(f"{name}.{key}")[0].as_py() for key in how["names"]}
    return how["value"]


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _list_array(place: str, value: Jagged) -> pa.Array:
    return pa.LargeListArray.from_arrays(
        pa.array(value.offsets.cpu().numpy()), pa.array(_to_numpy(place, value.values))
    )


def _to_jagged(array: pa.Array, dtype: str) -> Jagged:
    offsets = array.offsets.to_numpy().astype(np.int64)
    return Jagged(_to_tensor(array.flatten(), dtype), torch.from_numpy(offsets - offsets[0]))


def _to_numpy(place: str, value: Tensor) -> np.ndarray[Any, Any]:
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        # By bits, so that every NaN survives.
        return (value.contiguous().view(torch.int16).to(torch.int32) << 16).view(torch.float32).numpy()
    if value.dtype == torch.float16:
        return value.to(torch.float32).numpy()
    if value.is_complex() or value.layout != torch.strided:
        raise DataError(
            f"{place}: a {value.layout} tensor of {value.dtype} has no column form; expected a dense real tensor."
        )
    return value.numpy()


def _to_tensor(array: pa.Array, dtype: str) -> Tensor:
    target = getattr(torch, dtype)
    if not len(array):
        return torch.zeros(0, dtype=target)
    values = torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))
    if target == torch.bfloat16:
        return (values.to(torch.float32).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return values.to(target)


def _text_array(value: list[Any]) -> pa.Array | None:
    """A string column; None when something is not a string, or not valid Unicode (a lone surrogate)."""
    try:
        return pa.array(value, pa.string()) if all(isinstance(v, str) for v in value) else None
    except (UnicodeEncodeError, pa.ArrowException):
        return None


def _json(place: str, value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{place}: {error}; expected a tensor of one dimension, a Jagged, or values that JSON can hold."
        ) from None
    return text


def dtype_name(value: Tensor) -> str:
    """Such as "float32"."""
    return str(value.dtype).removeprefix("torch.")


def _place(payload: Any) -> str:
    return getattr(payload, "origin", "") or type(payload).__name__
