"""Reading safetensors files of a model, and what is said of tensors that are not its own."""

import json

import pytest
import torch
from safetensors.torch import save_file

from creditgraph.components.models.weights import check_shapes, read_folder
from creditgraph.pipeline.core.errors import DataError


def test_an_index_decides_which_files_count(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert sorted(read_folder(str(tmp_path))) == ["a", "b"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert {name: tensor.tolist() for name, tensor in read_folder(str(tmp_path)).items()} == {"a": [1.0, 1.0]}
    assert sorted(read_folder(str(tmp_path / "consolidated.safetensors"))) == ["a", "b"]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"norm": (2,), "embed": (3, 2)}, ""),
        ({"norm": (2,)}, r"folder: expected all 2 weights, but 1 are missing, first 'embed'\. Copy it again\."),
        ({"nrom": (2,), "embed": (3, 2)}, r"got 1 others, first 'nrom', and 1 are missing\. Did you mean 'norm'"),
        ({"norm": (3,), "embed": (3, 2)}, r"expected shape \(2,\) for 'norm', got \(3,\)\. Copy it again\."),
    ],
)
def test_names_and_shapes_are_those_of_the_model(shapes, text):
    expected = {"norm": (2,), "embed": (3, 2)}
    if not text:
        check_shapes("folder", shapes, expected, "Copy it again.")
        return
    with pytest.raises(DataError, match=text):
        check_shapes("folder", shapes, expected, "Copy it again.")
