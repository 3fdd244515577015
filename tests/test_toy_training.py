"""The main job, end to end on the embedded model: training must lift held-out accuracy."""

import json
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main


@pytest.mark.parametrize("recipe", ["toy_srpo", "toy_grpo"])
def test_training_improves(tmp_path: Path, recipe: str) -> None:
    """Ten iterations. Seeds 0, 1 and 2 gained 30 points or more, so 15 leaves room for other machines."""
    settings = ["run.iterations=10", "evaluator.every=0", "data.eval.size=250", "evaluator.num_problems=250"]
    assert main(["train", f"recipe={recipe}", f"run.root={tmp_path}", "run.name=r", *settings]) == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["accuracy_after"] - result["accuracy_before"] >= 0.15
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()][:10]
    assert all(r["learner/mismatch_abs_max"] < 1e-3 for r in rows)
    assert all(r["learner/skipped_nonfinite"] == 0 for r in rows)
    if recipe == "toy_srpo":
        assert sum(r["resets/clean"] for r in rows) / 10 > 0.5
        assert {"resets/exact", "resets/correction_clean", "localizer/boxed_share"} <= rows[0].keys()
