"""Reads parts of a model's tensors from its safetensors files, as transformers names and joins them."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.models.weights import Files, tensor_files

Rows = tuple[int, int] | None  # first row and the row after the last; None for all
Reader = Callable[[Rows], Tensor]


def sources(model: Any, path: str, names: Iterable[str]) -> dict[str, Reader]:
    """How to read those of a model's tensors that its files have: as they are, renamed, or joined from several.

    Args:
        model: a transformers model, whose type knows its files' names.
        path: folder of the weights.
        names: the wanted tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    files = tensor_files(path)
    wanted = dict.fromkeys(names, True)
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    out: dict[str, Reader] = {}
    joined: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if pattern is None or key in wanted:
            out[key if key in wanted else name] = partial(_read, files, key)
        else:
            joined.setdefault(name, []).append((key, pattern))
    for name, keys in joined.items():
        converter = by_pattern[keys[0][1]]
        for target in converter.target_patterns:
            made = name.replace(converter.target_patterns[0], target)
            out[made] = partial(_join, model, files, converter, name, keys, made)
    return {name: reader for name, reader in out.items() if name in wanted}


def _read(files: Files, key: str, rows: Rows) -> Tensor:
    from safetensors import safe_open

    file, shape = files[key]
    if rows is not None and rows[0] == rows[1]:
        return torch.empty((0, *shape[1:]))
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key) if rows is None else opened.get_slice(key)[slice(*rows)]
    return tensor


def _join(
    model: Any, files: Files, converter: Any, name: str, keys: list[tuple[str, str]], made: str, rows: Rows
) -> Tensor:
    """One tensor that transformers makes of several, such as all experts' of a layer."""
    stacked = _stacks(converter) and rows is not None and rows[0] < rows[1]
    mapping = deepcopy(converter)
    for wanted in converter.source_patterns:
        found = [key for key, pattern in keys if pattern == wanted]
        # Of tensors that are stacked, a shard is some of them, and the others are not read.
        for key in found[slice(*rows)] if stacked and rows else found:
            mapping.add_tensor(name, key, wanted, partial(_read, files, key, None))
    result = mapping.convert(name, model=model, config=model.config)[made]
    tensor: Tensor = result[0] if isinstance(result, list) else result
    return tensor if rows is None or stacked else tensor[slice(*rows)]


def _stacks(converter: Any) -> bool:
    """Whether row i of the result is made of the i-th tensors alone."""
    from transformers.core_model_loading import MergeModulelist

    first, *others = converter.operations
    return isinstance(first, MergeModulelist) and first.dim == 0 and all(getattr(o, "dim", 0) > 0 for o in others)
