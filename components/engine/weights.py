"""Checks of the weights a learner publishes, and merging of LoRA adapters for engines without adapter support."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.engine.weight_files import in_dtype
from creditgraph.components.models.experts import stack, unstack
from creditgraph.components.models.load import resolve_model_path
from creditgraph.components.models.weights import check_shapes, read_folder
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.payloads import Weights

_PEFT_ROOT = "base_model.model."


class WeightNames:
    """Names and shapes of a transformers model's weights as in its files; tied ones may be left out.

    Args:
        model: a transformers model.

    Attributes:
        shapes: name → shape.
        tied: name → first name of the same tensor.
    """

    def __init__(self, model: Any) -> None:
        state: dict[str, Tensor] = model.state_dict()
        self._own = list(state)
        state = dict(unstack(state))
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
        weights = weights.storable()
        place = f"weights version {weights.version}"
        if (weights.tensors is None) == (weights.path is None):
            actual = "neither" if weights.path is None else "both"
            raise DataError(f"{place}: expected either tensors or a path, got {actual}.")
        if weights.path is not None:
            place += f" in {weights.path}"
            tensors = read_folder(weights.path)
        else:
            tensors = dict(weights.tensors or {})
        for name, first in self.tied.items():
            if name in tensors and first in tensors and not _equal(tensors[name], tensors[first]):
                raise DataError(
                    f"{place}: expected equal tensors '{name}' and '{first}', which the model ties, got tensors that "
                    "differ. Publish only one of them."
                )
            if name in tensors:
                tensors.setdefault(first, tensors[name])
            elif first in tensors:
                tensors[name] = tensors[first]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_shapes(place, shapes, self.shapes, "Publish the whole model of model.path, adapters merged.")
        return tensors

    def of_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The resolved tensors under the names of the transformers model, which stacks the experts of a layer."""
        return stack(tensors, self._own)

    def checked(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """The pairs of streamed weights, of tied ones the first that comes, under its first name.

        Raises DataError for an unknown or misshapen tensor when it comes, and at the end for missing ones.
        """
        place = f"weights version {weights.version}"
        shapes: dict[str, tuple[int, ...]] = {}
        step = "Publish the whole model of model.path, adapters merged."
        for name, tensor in weights.pairs():
            first = self.tied.get(name, name)
            if first in shapes:
                continue
            shapes[first] = tuple(tensor.shape)
            if self.shapes.get(first) != shapes[first]:
                check_shapes(place, {**self.shapes, **shapes}, self.shapes, step)
            yield first, tensor
        ties = {name: shapes[first] for name, first in self.tied.items() if first in shapes}
        check_shapes(place, shapes | ties, self.shapes, step)

    def distinct(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors, of tied ones only the first."""
        return {name: tensor for name, tensor in tensors.items() if name not in self.tied}


def merged(weights: Weights, spec: ModelSpec) -> Weights:
    """The model's own weights, read from its files, with the adapter merged into them; whole weights unchanged.

    Raises:
        DataError: the adapter does not fit the model.
    """
    if weights.adapter is None:
        return weights
    adapter = weights.tensors or {}
    scale = weights.adapter.alpha / weights.adapter.rank
    device = next((t.device for t in adapter.values()), torch.device("cpu"))
    dtype: torch.dtype = getattr(torch, spec.dtype)
    own = read_folder(resolve_model_path(spec.path))
    tensors = {name: t.to(device) for name, t in in_dtype(own, dtype).items()}
    for name in (n for n in adapter if ".lora_A." in n):
        layer = name.removeprefix(_PEFT_ROOT).partition(".lora_A.")[0]
        a = adapter[name]
        b = adapter.get(name.replace(".lora_A.", ".lora_B."))
        weight = tensors.get(f"{layer}.weight")
        if weight is None or b is None or (b.shape[0], a.shape[1]) != tuple(weight.shape):
            raise DataError(
                f"adapter version {weights.version}: expected adapters of linear layers of model '{spec.path}', got "
                f"'{name}' without such a layer or its counterpart. Learner and engine must use one model.path."
            )
        # In peft's order, so that merging here and in the learner gives the same bits.
        tensors[f"{layer}.weight"] = weight + ((b @ a) * scale).to(dtype)
    return dataclasses.replace(weights, tensors=tensors, adapter=None)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.shape == b.shape
        and (a.data_ptr() == b.data_ptr() or torch.allclose(a.float(), b.float(), rtol=0, atol=0, equal_nan=True))
    )
