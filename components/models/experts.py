"""Experts in files and in memory: model folders hold a tensor per expert, transformers' models one for all experts.

Weights travel between learners and engines under the names of the files, which every engine reads.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

# Of Qwen, OLMoE, DeepSeek and others: [experts, 2 · width, D], gate above up, and [experts, D, width].
STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<matrix>gate_up_proj|down_proj)$")
GATED = ("gate_proj", "up_proj")


def unstack(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model under the names of its files: stacked experts as one view per matrix, others unchanged."""
    for name, tensor in tensors.items():
        found = STACKED.match(name)
        if found is None or tensor.dim() != 3:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):
            one = f"{found['experts']}.{number}"
            if found["matrix"] == "down_proj":
                yield f"{one}.down_proj.weight", expert
            else:
                for part, half in zip(GATED, expert.chunk(2), strict=True):
                    yield f"{one}.{part}.weight", half


def stack(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Tensors under the names of files as those `names` that a model has; the inverse of `unstack`."""
    rest = dict(tensors)
    out = {}
    for name in names:
        found = STACKED.match(name)
        if name in rest or found is None:
            if name in rest:
                out[name] = rest.pop(name)
            continue
        out[name] = torch.stack(list(_experts(rest, found["experts"], found["matrix"])))
    return out | rest


def _experts(tensors: dict[str, Tensor], experts: str, matrix: str) -> Iterator[Tensor]:
    parts = ["down_proj"] if matrix == "down_proj" else GATED
    number = 0
    while f"{experts}.{number}.{parts[0]}.weight" in tensors:
        halves = [tensors.pop(f"{experts}.{number}.{part}.weight") for part in parts]
        yield halves[0] if len(halves) == 1 else torch.cat(halves)
        number += 1
