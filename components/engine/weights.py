"""Checking and reading the weights a learner publishes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import DataError, did_you_mean
from pipeline.core.payloads import Weights


class WeightNames:
    """Names and shapes of a transformers model's weights; tied ones may be left out.

    Args:
        model: a transformers model.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict()
        self.shapes = {name: tuple(t.shape) for name, t in state.items()}
        by_storage: dict[tuple[int, int, tuple[int, ...]], str] = {}
        self.tied: dict[str, str] = {}
        for name, tensor in state.items():
            # The storage itself, not its address: parameters without memory (device "meta") all have address 0.
            place = (int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()), tuple(tensor.shape))
            first = by_storage.setdefault(place, name)
            if first != name and tensor.numel():
                self.tied[name] = first

    def resolve(self, weights: Weights) -> dict[str, Tensor]:
        """A complete name → tensor mapping of `weights`; raises DataError for missing, unknown and misshapen ones."""
        place = f"weights version {weights.version}"
        if (weights.tensors is None) == (weights.path is None):
            found = "neither tensors nor a path" if weights.path is None else "both tensors and a path"
            raise DataError(f"{place}: {found}; wanted exactly one of them.")
        given: Mapping[str, Tensor]
        if weights.path is not None:
            place += f" in {weights.path}"
            given = read_safetensors(weights.path)
        else:
            given = weights.tensors or {}
        found_tensors = dict(given)
        for name, first in self.tied.items():
            if (
                name in found_tensors
                and first in found_tensors
                and not _equal(found_tensors[name], found_tensors[first])
            ):
                raise DataError(
                    f"{place}: '{name}' and '{first}' differ, but the model ties them; wanted equal tensors or only "
                    "one."
                )
            if name in found_tensors:
                found_tensors.setdefault(first, found_tensors[name])
            elif first in found_tensors:
                found_tensors[name] = found_tensors[first]
        self._check(place, found_tensors)
        return found_tensors

    def _check(self, place: str, given: Mapping[str, Tensor]) -> None:
        unknown = sorted(set(given) - set(self.shapes))
        missing = sorted(set(self.shapes) - set(given))
        if unknown:
            hint = did_you_mean(unknown[0], missing or self.shapes)
            raise DataError(
                f"{place}: {len(unknown)} names the model does not have, first '{unknown[0]}'; wanted Hugging Face "
                f"names.{hint}"
            )
        if missing:
            raise DataError(
                f"{place}: {len(missing)} of {len(self.shapes)} weights are missing, first '{missing[0]}'; wanted all "
                "of them. "
                "Publish the whole model (adapters merged)."
            )
        for name, shape in self.shapes.items():
            if tuple(given[name].shape) != shape:
                raise DataError(
                    f"{place}: '{name}' has shape {tuple(given[name].shape)}; wanted {shape}. Learner and engine must "
                    "use one model.path."
                )


def local_folder(path: str) -> str:
    """The folder of a model: itself, or the hub's snapshot of that name; raises DataError when there is none."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub client raises types of its own
        raise DataError(
            f"model '{path}': its weights cannot be had from the Hugging Face hub ({error}). Use a local folder."
        ) from error


def read_safetensors(path: str) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder (or of one such file)."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = Path(path)
    files = [where] if where.is_file() else sorted(where.glob("*.safetensors"))
    if not files:
        raise DataError(f"weights path {path}: no *.safetensors file; wanted a folder in Hugging Face layout.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise DataError(f"weights file {file}: cannot be read ({error}). Write it again.") from error
    return tensors


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape
        and (a.data_ptr() == b.data_ptr() or torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True))
    )
