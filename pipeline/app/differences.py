"""Differences between two payloads, field by field."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch


def describe_difference(old: Any, new: Any) -> list[str]:
    """Returns the differences of two payloads as sentences, field by field; empty if they are bitwise equal."""
    if isinstance(old, Batch) and isinstance(new, Batch) and type(old) is type(new):
        if not torch.equal(old.uid, new.uid):
            common = set(old.uid.tolist()) & set(new.uid.tolist())
            return [f"rows differ: {len(old)} recorded, {len(new)} now, {len(common)} in common"]
        lines = []
        for field in dataclasses.fields(old):
            lines += _field_difference(field.name, getattr(old, field.name), getattr(new, field.name), old.uid)
        return lines
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        lines = []
        for field in dataclasses.fields(old):
            if "seconds" not in field.name:
                lines += _field_difference(field.name, getattr(old, field.name), getattr(new, field.name), None)
        return lines
    return [] if old == new else [f"{old!r} → {new!r}"]


def _field_difference(name: str, old: Any, new: Any, uid: Tensor | None) -> list[str]:
    if isinstance(old, Jagged) and isinstance(new, Jagged):
        if old.equal(new):
            return []
        same = old.lengths == new.lengths if len(old) == len(new) else torch.zeros(len(old), dtype=torch.bool)
        if not bool(same.all()):
            return [f"{name}: lengths differ in {int((~same).sum())} of {len(old)} rows"]
        return _numbers(name, old.values, new.values, old.row_ids, uid)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.shape != new.shape:
            return [f"{name}: shape {tuple(old.shape)} → {tuple(new.shape)}"]
        rows = torch.arange(old.numel()) // max(old[0].numel() if old.ndim and len(old) else 1, 1)
        return _numbers(name, old.flatten(), new.flatten(), rows, uid)
    if isinstance(old, dict) and isinstance(new, dict):
        lines = [f"{name}.{k}: only {'recorded' if k in old else 'now'}" for k in sorted(old.keys() ^ new.keys())]
        for key in sorted(old.keys() & new.keys()):
            lines += _field_difference(f"{name}.{key}", old[key], new[key], uid)
        return lines
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
        return (
            [f"{name}: {len(changed)} of {len(old)} rows differ, first {old[changed[0]]!r} → {new[changed[0]]!r}"]
            if changed
            else []
        )
    return [] if old == new else [f"{name}: {old!r} → {new!r}"]


def _numbers(name: str, old: Tensor, new: Tensor, rows: Tensor, uid: Tensor | None) -> list[str]:
    """What a line says of values of which some differ; means leave NaN out, which marks tokens without a number."""
    changed = (old != new) & ~(old.isnan() & new.isnan())  # NaN differs from itself
    if not bool(changed.any()):
        return [] if old.dtype == new.dtype else [f"{name}: the same values, as {old.dtype} → as {new.dtype}"]
    first = int(changed.nonzero()[0])
    row = int(rows[first])
    where = f"uid {int(uid[row])}" if uid is not None else f"row {row}"
    a = old.double()
    b = new.double()
    num_rows = len(set(rows[changed].tolist()))
    largest = float((a - b).abs().nan_to_num().max())
    return [
        f"{name}: {int(changed.sum())} of {len(old)} values in {num_rows} rows differ, largest |Δ| {largest:.4g}, "
        f"mean {float(a.nanmean()):.4g} → {float(b.nanmean()):.4g}; first at {where}: {float(a[first]):.4g} → "
        f"{float(b[first]):.4g}"
    ]
