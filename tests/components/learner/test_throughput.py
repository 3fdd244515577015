"""Operations that a learner counts, and the rates made of them, with mocked GPUs."""

import pytest
import torch
from learner_steps import FAST, REINFORCE

from creditgraph.components.learner.learner import throughput
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.components.models.shape import Shape
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.ranks import Ranks


def slow_operations(shape, rows):
    """Forward operations of separate rows, token by token."""
    total = 0.0
    for prompt, response in rows:
        computed = prompt + response - 1  # nothing is predicted from the last token
        for token in range(computed):
            attended = 4 * shape.layers * (token + 1) * shape.heads * shape.head_dim
            total += 2 * shape.layers * shape.layer_parameters + attended
        total += response * 2 * shape.embedding_parameters
    return total


@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_those_of_a_slow_count(make_learner, model_folder, make_batch, recompute):
    settings = {"share_prefixes": False, "skip_zero_rows": False, "micro_batch_tokens": 40}
    settings |= {"objective": REINFORCE, "optimizer": FAST, "old_logprobs": "recompute" if recompute else "engine"}
    learner = make_learner(**settings)
    trajectories, credit = make_batch(rows=6)
    training = RolloutTraining(learner.config, learner.context, learner.backend, trajectories, credit, 0)
    training.run()
    rows = list(
        zip(trajectories.prompt_tokens.lengths.tolist(), trajectories.response_tokens.lengths.tolist(), strict=True)
    )
    expected = slow_operations(Shape.read(str(model_folder())), rows)
    assert training.operations.tolist() == pytest.approx([expected, expected if recompute else 0.0])


def test_shared_prefixes_are_counted_once(make_learner, make_batch):
    counted = []
    for share in (False, True):
        learner = make_learner(objective=REINFORCE, optimizer=FAST, share_prefixes=share, skip_zero_rows=False)
        trajectories, credit = make_batch(rows=8)
        trajectories = trajectories.replace(prompt_tokens=Jagged.from_rows([[7, 3, 9, 4]] * 8, torch.int32))
        training = RolloutTraining(learner.config, learner.context, learner.backend, trajectories, credit, 0)
        training.run()
        counted.append(float(training.operations[0]))
    assert 0 < counted[1] < counted[0]


SECONDS = {"forward_backward": 3.0, "optimizer": 1.0, "old_logprobs": 1.0, "publish": 50.0}


@pytest.fixture
def context(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    spec = ModelSpec(dtype="bfloat16")
    return Context(node="learner", device="cuda:0", model=spec, ranks=Ranks(world=4, num_replicas=2))


def test_rates_by_hand(context, monkeypatch):
    rates = throughput(context, SECONDS, 8000.0, (1e15, 2e14), frozen=False)
    assert rates["tokens_per_second"] == 8000 / 4 / 4
    # Forward and backward pass are three forward passes; four GPUs work for five seconds.
    assert rates["mfu"] == pytest.approx((3 * 1e15 + 2e14) / (5 * 4 * 989e12))
    assert throughput(context, SECONDS, 1.0, (1e15, 0.0), frozen=True)["mfu"] == pytest.approx(2e15 / (5 * 4 * 989e12))
    # The passes are not counted for a model that the formulas do not cover.
    assert "mfu" not in throughput(context, SECONDS, 1.0, (0.0, 0.0), frozen=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unknown GPU")
    assert throughput(context, SECONDS, 8000.0, (1e15, 0.0), frozen=False) == {"tokens_per_second": 500.0}


def test_without_a_gpu_there_are_no_rates(make_learner, make_batch, device):
    if device != "cpu":
        pytest.skip("this machine has a GPU")
    learner = make_learner(objective=REINFORCE, optimizer=FAST)
    batch = make_batch(rows=4)
    learner.run(trajectories=batch[0], credit=batch[1])
    logged = learner.context.metrics
    assert logged["seconds_forward_backward"] > 0
    assert not [name for name in logged if name in ("mfu", "tokens_per_second") or name.startswith("memory")]
