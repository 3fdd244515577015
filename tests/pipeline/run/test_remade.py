"""Checkpoints leave out values that a learner makes again from its own state, and runs continue bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.run.checkpoint import load
from creditgraph.pipeline.run.metrics import read_metrics

SETTINGS = [
    "recipe=toy_grpo",
    "prompts.batch=2",
    "sampler.group_size=4",
    "evaluator.num_problems=4",
    "run.checkpoint.every=1",
    "run.checkpoint.keep=9",
]


def train(root, name, iterations, *settings):
    places = [f"run.root={root}", f"run.name={name}", f"run.iterations={iterations}"]
    assert main(["train", *SETTINGS, *places, *settings]) == 0
    return root / name


def in_flight(run, iteration):
    """(node, output, iteration) of the values in a checkpoint."""
    return set(load(run / "checkpoints" / f"{iteration:06d}").groups["values"])


@pytest.mark.parametrize(("delay", "kept"), [(1, set()), (2, {("learner", "weights", 0)})])
def test_the_latest_weights_are_made_again_and_not_stored(tmp_path, delay, kept):
    wire = f"nodes.engine.in.weights=learner.weights@{delay}"
    whole = train(tmp_path, "whole", 3, wire)
    parts = train(tmp_path, "parts", 2, wire)
    assert in_flight(parts, 1) == kept
    train(tmp_path, "parts", 3, wire)

    def logged(run):
        rows = read_metrics(run / "metrics.jsonl")
        return [{k: v for k, v in row.items() if "seconds" not in k and "utilisation" not in k} for row in rows]

    assert json.dumps(logged(parts)) == json.dumps(logged(whole))
    first, second = (load_file(run / "checkpoints" / "000002" / "tensors.safetensors") for run in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_holds_each_weight_once(tmp_path):
    run = train(tmp_path, "run", 1)
    tensors = load_file(run / "checkpoints" / "000000" / "tensors.safetensors")
    embeddings = [t for t in tensors.values() if t.shape == torch.Size([54, 64])]
    # Master weights, with two moments if a step was made; published weights would be one more.
    assert len(embeddings) in (1, 3)
