"""Runs with groups in flight: overlapped or not, interrupted or not, alone or replayed, the same bytes."""

import hashlib
import json

import pytest
import torch

from creditgraph.components.rollouts.carry import Carrier
from creditgraph.pipeline.app.differences import describe_difference
from creditgraph.pipeline.core.errors import GraphError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.executor import Executor
from creditgraph.pipeline.run.node_runner import NodeFailure
from creditgraph.pipeline.run.recording import read_payload
from creditgraph.pipeline.run.replay import Replay
from creditgraph.pipeline.run.run_directory import RunDirectory

pytestmark = pytest.mark.xdist_group("carry_runs")  # all but one read the same run

ITERATIONS = 7
SETTINGS = [
    "recipe=toy_grpo_partial",
    "prompts.batch=3",
    "sampler.group_size=4",
    "sampler.carry.tokens=20",
    "evaluator.num_problems=2",
    "evaluator.every=0",
    "learner.optimizer.lr=1e-3",
    "run.record.every=1",
    "run.checkpoint.every=1",
    "run.checkpoint.keep=20",
    "run.name=run",
    f"run.iterations={ITERATIONS}",
]
LATE = "nodes.engine.in.weights=learner.weights@2"


def train(root, *more):
    experiment = build_experiment(compose([*SETTINGS, *more, f"run.root={root}"]), "test")
    with (
        RunDirectory.open(experiment.run_path, experiment.resolved) as run,
        Executor(experiment.graph, experiment.run, model=experiment.model, data=experiment.data, run=run) as executor,
    ):
        executor.setup()
        start = executor.restore()
        executor.run()
    return experiment.run_path, start


def metrics(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k and not k.startswith("utilisation/")} for row in rows]


def digest(path):
    newest = path / "checkpoints" / f"{ITERATIONS - 1:06d}"
    return {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("tensors.safetensors", "state.json")
    }


def rollouts(path, iteration):
    return read_payload(path / "record" / "sampler.trajectories" / f"{iteration:06d}.parquet")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run without overlap, weights two iterations old."""
    return train(tmp_path_factory.mktemp("whole"), LATE, "run.overlap=false")[0]


def assert_same(path, whole):
    assert metrics(path) == metrics(whole)
    assert digest(path) == digest(whole)
    for iteration in range(ITERATIONS):
        assert describe_difference(rollouts(whole, iteration), rollouts(path, iteration)) == []


def test_groups_are_carried_and_none_is_lost(whole):
    rows = metrics(whole)[:ITERATIONS]
    begun = torch.cat(
        [read_payload(whole / "record" / "prompts.batch" / f"{i:06d}.parquet").uid for i in range(ITERATIONS)]
    )
    delivered = [
        read_payload(whole / "record" / "sampler.prompts" / f"{i:06d}.parquet").uid.tolist() for i in range(ITERATIONS)
    ]
    assert delivered[0] == []  # no rollout of the embedded task has 20 tokens or less
    assert rows[0]["learner/skipped_zero_credit"] == 1
    flat = [uid for uids in delivered for uid in uids]
    assert len(set(flat)) == len(flat)
    assert len(flat) + rows[-1]["sampler/carried_prompts"] == len(begun)
    assert set(flat) <= set(begun.tolist())
    versions = torch.cat([rollouts(whole, i).token_versions.values for i in range(ITERATIONS)])
    assert versions.max() >= 3
    assert max(row["sampler/staleness_max"] for row in rows) >= 2
    sampled = sum(row["sampler/sampled_tokens"] for row in rows)
    assert len(versions) + rows[-1]["sampler/carried_tokens"] == sampled


def test_overlap_changes_nothing(tmp_path, whole):
    path, _ = train(tmp_path, LATE)
    assert_same(path, whole)


class Interrupted(Exception):
    """Ends a run in the midst of an iteration, with nothing written after it."""


def test_interrupted_and_started_again_it_ends_with_the_same_bytes(tmp_path, whole, monkeypatch):
    log = Carrier._log

    def log_and_stop(self, *args):
        log(self, *args)
        if self.context.iteration == 5:
            raise Interrupted

    # Interrupted while it samples iteration 5, which needs the weights after iteration 3. That a killed process leaves
    # no more and no less behind is shown for all components by tests/pipeline/run/test_kill_resume.py.
    monkeypatch.setattr(Carrier, "_log", log_and_stop)
    with pytest.raises(NodeFailure, match="Interrupted"):
        train(tmp_path, LATE)
    monkeypatch.undo()
    path, start = train(tmp_path, LATE)
    assert 3 <= start < 6
    assert_same(path, whole)


def test_a_replayed_sampler_has_its_groups_in_flight_again(tmp_path):
    path, _ = train(tmp_path, "run.iterations=5")
    for iteration in (0, 1, 4):
        replay = Replay(path)
        again = replay.again("sampler", iteration)
        replay.close()
        assert replay.notes == []
        for output in ("trajectories", "prompts"):
            assert describe_difference(again.recorded[output], again.outputs[output]) == []
        line = metrics(path)[iteration]
        assert all(value == line[name] for name, value in again.metrics.items() if "seconds" not in name)
    late = metrics(path)[4]
    assert late["sampler/staleness_max"] > 0
    # No response is wholly of the present weights; the tokens that are still show whether engine and learner agree.
    assert late["learner/policy_lag"] >= 1
    assert 0 < late["learner/mismatch_abs_max"] < 1e-3


def test_samplers_that_cannot_carry_name_those_that_can():
    with pytest.raises(GraphError, match=r"sampler.carry: unknown setting.*sampler.chains"):
        build_experiment(compose(["recipe=toy_score", "sampler.carry.tokens=8"]), "test")


def test_a_reader_of_other_prompts_is_refused_before_the_run():
    wrong = (
        "rewards: 'trajectories' has the rows of sampler.trajectories, whose prompts are sampler.prompts, but "
        "'prompts' is wired to "
    )
    other = ["recipe=toy_grpo", "nodes.rewards.in.prompts=prompts.batch"]
    with pytest.raises(GraphError) as error:
        build_experiment(compose(other), "test")
    assert wrong + "prompts.batch; wire sampler.prompts." in str(error.value)
    merged = ["recipe=toy_srpo", "nodes.buffer.in.prompts=[sampler.prompts]"]
    with pytest.raises(GraphError, match=r"expander.trajectories, whose prompts are expander.prompts, but 'prompts'"):
        build_experiment(compose(merged), "test")
