"""Every full-size recipe composes and passes the checks with both learners and all engines; nothing is loaded."""

from pathlib import Path

import pytest

from creditgraph.components.learner.settings import LearnerSettings
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

FOLDER = Path(__file__).parents[3] / "configs" / "recipe"
RECIPES = sorted(file.stem for file in FOLDER.glob("*.yaml") if not file.stem.startswith("toy_"))
SMALL = {"your_own", "grpo_qwen2_5_0_5b_instruct"}  # half a billion parameters, which fit without recomputation


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_with_learners_and_engines(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = []
    if recipe == "your_own":
        (tmp_path / "judge.py").write_text("def right(prompt, response):\n    return 1.0\n")
        own = [f"data.train.path={tmp_path / 'rows.jsonl'}", f"verifier.function={tmp_path / 'judge.py'}:right"]
    # Composing takes .5 s, so a recipe takes each engine once, and learners alternate: over all recipes every pair.
    turn = RECIPES.index(recipe)
    for number, engine in enumerate(("local", "vllm", "sglang")):
        learner = ("hf", "megatron")[(turn + number) % 2]
        chosen = [f"recipe={recipe}", f"learner={learner}", f"engine={engine}", *own]
        experiment = build_experiment(compose(chosen))
        trained = [n for n in experiment.graph.nodes if isinstance(n.config, LearnerSettings)]
        assert [n.use for n in trained] == [f"learner.{learner}"]
        assert experiment.model.dtype == "bfloat16"
        assert recipe in SMALL or trained[0].config.recompute == "full"
        assert 0 < trained[0].config.micro_batch_tokens <= 32768
