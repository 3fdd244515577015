"""ms-swift trains with credit graphs, in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from tests.adapters import slow
from tests.adapters.test_trl import scored

HERE = Path(__file__).parent
PYTHON = ROOT.parent / ".venv-swift/bin/python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no ms-swift: tools/other_environment swift"),
    pytest.mark.xdist_group("swift"),
    pytest.mark.slow,
]
# ms-swift divides by the unbiased standard deviation plus 1e-4.
AS_SWIFT = ["advantage.unbiased=true", "advantage.eps=1e-4"]
JOBS = {
    "swift_grpo": {"swift": {"loss_type": "grpo"}},
    "swift_dapo": {"swift": {"loss_type": "dapo"}},
    "advantages": {"graph": "grpo", "overrides": AS_SWIFT, "swift": {"loss_type": "grpo"}},
    "grpo": {"graph": "grpo", "overrides": AS_SWIFT, "objective": True},
    "dapo": {"graph": "grpo", "overrides": [*AS_SWIFT, "learner.objective.aggregate=token_mean"], "objective": True},
    "group": {"graph": "grpo", "turns": True},
    "gigpo": {"graph": "gigpo", "overrides": ["advantage.omega=0.5"], "turns": True},
    "s_trace": {"graph": "s_trace", "objective": True},
    "no_trace": {"graph": "s_trace", "overrides": ["learner.objective.config.decay=0"], "objective": True},
    "grpo_std": {"graph": "grpo", "objective": True},
    "rredcot": {
        "graph": "recipe=toy_rredcot",
        "overrides": [
            "model.path=" + resolve_model_path("tiny"),
            "segmenter.use=segmenter.entropy_cuts",
            "segmenter.segments=4",
        ],
        "swift": {"learning_rate": 0},
    },
    "vineppo": {"graph": "vineppo", "overrides": ["model.path=tiny", "sampler.mode=line"]},
    "real": {"graph": "grpo", "swift": {"loss_type": "real"}},
    "gspo": {"graph": "gigpo", "turns": True, "swift": {"loss_type": "grpo", "importance_sampling_level": "sequence"}},
    "kl": {"graph": "grpo", "objective": True, "swift": {"beta": 0.04}},
    "by_group": {"graph": "s_trace", "overrides": ["learner.objective.entropy_mask.scope=group"], "objective": True},
    "megatron": {"graph": "grpo", "imported": "swift.megatron"},
}
PLAIN = {"graph": "", "overrides": [], "objective": False, "turns": False, "imported": "", "swift": {}}


def train(folder, jobs, launcher=()):
    """Writes folder/results.json, or results.json.RANK of each process of a launcher."""
    (folder / "jobs.json").write_text(json.dumps({name: PLAIN | job for name, job in jobs.items()}))
    model = resolve_model_path("tiny")
    command = [PYTHON, *launcher, HERE / "swift_train.py", model, folder / "jobs.json", folder / "results.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1", "USE_HF": "1"}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Name of the job → what it reports."""
    folder = tmp_path_factory.mktemp("swift")
    train(folder, JOBS)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize(
    ("ours", "theirs"), [("advantages", "swift_grpo"), ("grpo", "swift_grpo"), ("dapo", "swift_dapo")]
)
def test_grpo_by_a_graph_trains_as_that_of_ms_swift(trained, ours, theirs):
    # Two iterations over each batch, two micro-batches per step: ratios, denominators and accumulation all count.
    torch.testing.assert_close(trained[ours]["losses"], trained[theirs]["losses"], atol=1e-6, rtol=0)
    torch.testing.assert_close(trained[ours]["weights"], trained[theirs]["weights"], atol=5e-6, rtol=1e-6)
    assert trained[ours]["weights"] != trained["gigpo"]["weights"]


@pytest.mark.parametrize("name", ["group", "gigpo"])
def test_advantages_equal_loops_over_what_ms_swift_sampled(trained, name):
    check(trained[name]["seen"], name, trained[name]["seen"]["advantages"])
    means = [sum(row) / len(row) for row in trained[name]["seen"]["advantages"]]
    # The table of completions shows the mean over a response's tokens.
    torch.testing.assert_close(trained[name]["logged"][-8:], means, atol=1e-6, rtol=1e-6)


def check(seen, name, advantages):
    """Advantages of the trained tokens of each row are those of loops."""
    mask, rewards, group = seen["mask"], seen["turn_rewards"], seen["group"]
    assert [0 in row[: len(row) - row[::-1].index(1)] for row in mask] == [True] * len(mask)  # the observation
    states = slow.states_of(mask, seen["tokens"])
    expected = {
        "group": lambda: slow.grpo(mask, [sum(r) for r in rewards], group),
        "gigpo": lambda: slow.gigpo(mask, rewards, group, states, omega=0.5),
    }[name]()
    rows = [[a for a, m in zip(row, trained, strict=True) if m] for row, trained in zip(expected, mask, strict=True)]
    for actual, row in zip(advantages, rows, strict=True):
        torch.testing.assert_close(actual, row, atol=1e-6, rtol=1e-6)
    assert max(abs(a) for row in advantages for a in row) > 0.1


def test_texts_are_scored_by_the_model_that_is_trained(trained, policy):
    seen = trained["rredcot"]["seen"]
    expected, mask = scored(seen, JOBS["rredcot"], policy)
    for row, kept, actual in zip(expected, mask, seen["advantages"], strict=True):
        torch.testing.assert_close(torch.tensor(actual), row[kept], atol=1e-4, rtol=1e-4)


def test_the_loss_is_that_of_the_graph(trained):
    assert trained["s_trace"]["weights"] != trained["grpo_std"]["weights"]
    assert {"credit/trace_weight", "credit/high_entropy"} <= set(trained["s_trace"]["metrics"])
    # Without decay a trace is the clipped ratio of the token alone.
    torch.testing.assert_close(trained["no_trace"]["weights"], trained["grpo_std"]["weights"], atol=5e-6, rtol=1e-6)
    assert {"credit/advantage/groups", "credit/ratio_mean"} <= set(trained["grpo_std"]["metrics"])


def test_settings_that_a_graph_has_no_part_for_are_refused(trained):
    assert "its credit has no part for ms-swift's loss_type='real'. Switch that off." in trained["real"]["refused"]
    assert "differs within responses, but with importance_sampling_level=sequence" in trained["gspo"]["refused"]
    assert "its credit has no part for ms-swift's beta=0.04 (off: 0.0). Switch that off." in trained["kl"]["refused"]
    assert "set learner.objective.entropy_mask.scope=batch or sequence." in trained["by_group"]["refused"]
    assert (
        "node 'value' asks the policy; name a server that has its weights by --endpoint=URL"
        in trained["vineppo"]["refused"]
    )
    assert "expected `swift rlhf`, got ms-swift's Megatron trainer" in trained["megatron"]["refused"]


def test_two_processes_credit_groups_of_both(tmp_path):
    jobs = {"gigpo": JOBS["gigpo"], "s_trace": JOBS["s_trace"]}
    train(tmp_path, jobs, ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    both = [json.loads((tmp_path / f"results.json.{rank}").read_text()) for rank in (0, 1)]
    for name in jobs:
        assert both[0][name]["weights"] == both[1][name]["weights"]
    seen = [result["gigpo"]["seen"] for result in both]
    read = ("mask", "turn_rewards", "group", "tokens")
    assert [seen[0][name] for name in read] == [seen[1][name] for name in read]
    check(seen[0], "gigpo", seen[0]["advantages"] + seen[1]["advantages"])
