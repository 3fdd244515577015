"""Whole runs of learner.megatron as a user starts them: in one process, and with a model sharded over four."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Adam's ε is large, so that rounding of gradients near zero is not made into whole steps.
SETTINGS = ["recipe=toy_srpo", "prompts.batch=4", "evaluator.num_problems=2", "run.iterations=2"]
SETTINGS += ["run.wandb.mode=disabled", "learner.optimizer.eps=1e-3"]


def run(arguments: list[str]) -> int:
    """What `creditgraph` does, in a rank's process."""
    from creditgraph import main

    return main(arguments)


def train(processes: Callable[[int], Any], size: int, folder: Path, *settings: str) -> list[dict[str, float]]:
    arguments = ["train", *SETTINGS, f"run.root={folder}", f"run.name=r{size}", *settings]
    assert processes(size).run(run, arguments) == [0] * size
    rows = [json.loads(line) for line in (folder / f"r{size}" / "metrics.jsonl").read_text().splitlines()]
    return rows[:2]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("hf")
    assert run(["train", *SETTINGS, f"run.root={folder}", "run.name=hf"]) == 0
    rows = [json.loads(line) for line in (folder / "hf" / "metrics.jsonl").read_text().splitlines()]
    assert any("learner/grad_norm" in row for row in rows)
    return rows[:2]


@pytest.mark.parametrize(
    ("size", "layout"), [(1, []), (4, ["learner.tensor_parallel=2", "learner.pipeline_parallel=2"])]
)
def test_it_trains_as_learner_hf_does(
    size: int, layout: list[str], reference: list[dict[str, float]], processes: Callable[[int], Any], tmp_path: Path
) -> None:
    result = train(processes, size, tmp_path, "learner=megatron", *layout)
    # After a step, weights and so rollouts' log-probs differ by rounding.
    for hf, megatron, tolerance in zip(reference, result, (1e-5, 1e-3), strict=True):
        assert megatron["rewards/mean"] == hf["rewards/mean"]
        assert megatron.get("learner/grad_norm") == pytest.approx(hf.get("learner/grad_norm"), rel=tolerance)


def test_adapters_and_checkpoints_in_the_background_in_a_run_that_is_continued(
    processes: Callable[[int], Any], tmp_path: Path
) -> None:
    settings = ["learner=megatron", "learner.tensor_parallel=2", "learner.lora.rank=2", "run.checkpoint.every=1"]
    late = [*settings, "run.checkpoint.background=true"]
    pool = processes(2)
    for more in (late, [*late, "run.iterations=3"]):
        arguments = ["train", *SETTINGS, f"run.root={tmp_path}", "run.name=late", *more]
        assert pool.run(run, arguments) == [0, 0]
        pool.close()  # the next start is one of new processes
    arguments = ["train", *SETTINGS, f"run.root={tmp_path}", "run.name=now", *settings, "run.iterations=3"]
    assert pool.run(run, arguments) == [0, 0]
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()][2]
        for name in ("late", "now")
    ]
    for name in ("rewards/mean", "learner/grad_norm", "learner/loss", "learner/trained_tokens_total"):
        assert rows[0].get(name) == pytest.approx(rows[1].get(name), rel=1e-6), name
    for name in ("late", "now"):
        kept = [path.name for path in sorted((tmp_path / name / "checkpoints").iterdir())]
        assert kept == ["000001", "000002"]
