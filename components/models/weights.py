"""Reads weights from safetensors files for engines and learners, and checks that they fit a model."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from creditgraph.pipeline.core.errors import DataError, did_you_mean

Shape = tuple[int, ...]
# Tensor name → its safetensors file, and its shape there.
Files = dict[str, tuple[Path, Shape]]


def local_folder(path: str) -> Path:
    """The folder of a model: the path itself, or the hub's snapshot of that name; raises DataError if missing."""
    if Path(path).exists() or path.startswith((".", "/")) or path.count("/") > 1:
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub client raises its own types
        raise DataError(
            f"model '{path}': its weights cannot be downloaded from the Hugging Face hub ({error}). Use a local folder."
        ) from error


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a model folder, or `path` itself if it is one; raises DataError without any."""
    where = local_folder(path)
    index = where / "model.safetensors.index.json"
    if where.is_file():
        return [where]
    # Some folders hold a second copy of the weights, which the index does not list.
    files = sorted(where.glob("*.safetensors"))
    if index.is_file():
        files = sorted({where / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    if not files:
        raise DataError(
            f"weights path {path}: expected a folder in Hugging Face layout, got no *.safetensors file, and "
            "others are not read. Convert the weights with save_pretrained."
        )
    return files


def read_file(file: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor (mapped, not read) of everything in a safetensors file."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt", device="cpu") as opened:
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            yield name, opened.get_tensor(name)


def read_folder(path: str) -> dict[str, Tensor]:
    """All tensors of the safetensors files of a model; raises DataError."""
    from safetensors import SafetensorError

    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            tensors.update(read_file(file))
        except (SafetensorError, OSError) as error:
            raise DataError(f"weights file {file}: cannot be read ({error}). Write or copy it again.") from error
    return tensors


def tensor_files(path: str) -> Files:
    """The tensors of a model folder, from the headers of its files; DataError for a truncated one, or none."""
    from safetensors import SafetensorError, safe_open

    out: Files = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (a file cannot be iterated)
                    out[name] = (file, tuple(opened.get_slice(name).get_shape()))
        except (SafetensorError, OSError) as error:
            raise DataError(f"weights file {file}: cannot be read ({error}). Write or copy it again.") from error
    return out


def check_shapes(place: str, shapes: Mapping[str, Shape], expected: Mapping[str, Shape], hint: str) -> None:
    """Raises DataError unless `shapes` (tensor name → shape) are those that a model has.

    Args:
        place: what is checked, for the error.
        shapes: shapes of the tensors.
        expected: shapes of the model's tensors.
        hint: last sentence of the error.
    """
    unknown = sorted(shapes.keys() - expected.keys())
    missing = sorted(expected.keys() - shapes.keys())
    if unknown:
        near = did_you_mean(unknown[0], missing or expected)
        raise DataError(
            f"{place}: expected the model's Hugging Face names, got {len(unknown)} others, first '{unknown[0]}', and "
            f"{len(missing)} are missing.{near} {hint}"
        )
    if missing:
        raise DataError(
            f"{place}: expected all {len(expected)} weights, but {len(missing)} are missing, first '{missing[0]}'. "
            f"{hint}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise DataError(f"{place}: expected shape {shape} for '{name}', got {shapes[name]}. {hint}")
