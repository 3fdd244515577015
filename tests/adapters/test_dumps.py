"""What TRL, verl and verifiers write themselves, in environments of their own, becomes a run."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from creditgraph.components.models.load import resolve_model_path
from creditgraph.pipeline import ROOT
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.run.recording import read_payload
from tests.adapters.test_imports import command

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow
PAGE = ROOT.parent / "docs" / "trainers.md"
# Of two prompts two responses each, the first with a tool's token in its middle; keys as verl's V1 trainer makes them.
BATCH = {
    "keys": ["p1_0_0", "p0_1_0", "p0_0_0", "p1_1_0"],
    "uid": ["p1", "p0", "p0", "p1"],
    "prompts": [[5, 6], [7], [7], [5, 6]],
    "responses": [[8, 9, 10], [8, 11], [9, 9, 9, 2], [3, 2]],
    "response_mask": [[1, 0, 1], [1, 1], [1, 1, 1, 1], [1, 1]],
    "advantages": [[1.0, 0.0, 1.0], [-0.5, -0.5], [0.5] * 4, [-1.0, -1.0]],
    "old_log_probs": [[-0.25, -0.5, -0.75], [-1.0, -2.0], [-0.5] * 4, [-1.5, -2.5]],
    "rollout_log_probs": [[-0.5, -0.5, -0.5], [-1.0, -1.0], [-0.25] * 4, [-1.5, -2.0]],
    "rm_scores": [[0.0, 0.0, 1.0], [0.0, 0.0], [0.0, 0.0, 0.0, 1.0], [0.0, 0.0]],
    "reward_model": [{"ground_truth": "4"}, {"ground_truth": "7"}, {"ground_truth": "7"}, {"ground_truth": "4"}],
}


def written(name, folder, *arguments):
    """Runs dump_NAME.py in .venv-NAME."""
    python = ROOT.parent / f".venv-{name}/bin/python"
    if not python.exists():
        pytest.skip(f"no {name}: tools/other_environment {name}")
    given = {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    call = [python, HERE / f"dump_{name}.py", *arguments]
    done = subprocess.run(call, cwd=folder, env=os.environ | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def record(run, output, step):
    return read_payload(run / "record" / output / f"{step:06d}.parquet")


def test_tables_of_completions_of_trl(tmp_path, capsys):
    written("trl", tmp_path, resolve_model_path("tiny"), tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for name in ("ids", "texts"):
        run = tmp_path / f"run_{name}"
        assert command(tmp_path / name, "--from", "trl", "--tokenizer", "tiny", "-o", run) == 0
        assert main(["audit", str(run)]) == 0  # groups, order and rewards fit TRL's advantages
        for step, batch in enumerate(seen[name], 1):
            trajectories, credit = record(run, "rollouts.trajectories", step), record(run, "rollouts.credit", step)
            assert [row[0] for row in credit.advantage.to_lists()] == pytest.approx(batch["advantages"])
            tokens = trajectories.response_tokens.to_lists()
            # The text has no end-of-text token, with which all these responses ended.
            assert tokens == batch["ids"] if name == "ids" else tokens == [ids[:-1] for ids in batch["ids"]]
        assert len(set(trajectories.group.tolist())) == 2
    out = capsys.readouterr().out
    assert out.count("no token ids in 32 of 32 responses") == 1
    assert "log_extra" in out


def patches(folder):
    """The two blocks of code of the page that add columns to verl's dumps, as files."""
    blocks = re.findall(r'```python title="mine.py, of the [^"]*"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        assert len([line for line in block.splitlines() if line.strip()]) == 10
        (folder / f"patch{number}.py").write_text(block)
        yield folder / f"patch{number}.py"


def test_dumps_of_both_trainers_of_verl(tmp_path, capsys):
    (tmp_path / "batch.json").write_text(json.dumps(BATCH))
    written("verl", tmp_path, tmp_path / "batch.json", tmp_path, *patches(tmp_path))
    order = [2, 1, 0, 3]  # V1 sorts by key
    for name, places in (("v1", order), ("legacy", [0, 1, 2, 3])):
        plain, more = tmp_path / f"run_{name}", tmp_path / f"run_{name}_patched"
        command(tmp_path / name, "--from", "verl", "--tokenizer", "tiny", "--graph", "grpo", "-o", plain)
        command(tmp_path / f"{name}_patched", "--from", "verl", "-o", more)
        for run in (plain, more):
            trajectories = record(run, "rollouts.trajectories", 3)
            first = [BATCH["uid"][i] for i in places]
            assert [first[g] == first[0] for g in range(4)] == (trajectories.group == trajectories.group[0]).tolist()
            assert record(run, "rollouts.rewards", 3).value.tolist() == [
                float(sum(BATCH["rm_scores"][i])) for i in places
            ]
        assert trajectories.response_tokens.to_lists() == [BATCH["responses"][i] for i in places]
        assert trajectories.engine_logprobs.to_lists() == [BATCH["rollout_log_probs"][i] for i in places]
        assert record(more, "trainer.logprobs", 3).logprobs.to_lists() == [BATCH["old_log_probs"][i] for i in places]
        credit = record(more, "rollouts.credit", 3)
        assert credit.advantage.to_lists() == [BATCH["advantages"][i] for i in places]
        assert credit.mask.to_lists() == [[bool(x) for x in BATCH["response_mask"][i]] for i in places]
        # The audit of right GRPO finds nothing, because the group is the prompt.
        assert main(["audit", str(more)]) == 0
    assert "the ten lines of docs/trainers.md" in capsys.readouterr().out


def test_traces_of_verifiers_and_of_prime_rl(tmp_path, capsys):
    written("verifiers", tmp_path, tmp_path)
    run = tmp_path / "prime"
    command(tmp_path, "--from", "prime-rl", "-o", run)
    trajectories = record(run, "rollouts.trajectories", 7)
    # The prompt ends where the first sampled token begins, so it has the model's role token 9.
    assert trajectories.prompt_tokens.to_lists() == [[5, 6, 9]] * 4
    assert trajectories.response_tokens.to_lists() == [[10, 11, 12, 13, 14]] * 4
    assert (trajectories.group - trajectories.group[0]).tolist() == [0, 0, 1, 1]
    assert record(run, "rollouts.rewards", 7).value.tolist() == [0.0, 2.0, 0.0, 2.0]  # weight 2
    credit = record(run, "rollouts.credit", 7)
    assert credit.mask.to_lists()[0] == [True, True, False, False, True]
    assert credit.advantage.to_lists()[:2] == [[-0.5, -0.25, 0.0, 0.0, -0.5], [0.5, 0.25, 0.0, 0.0, 0.5]]
    sampled, old = trajectories.engine_logprobs.row(0), record(run, "trainer.logprobs", 7).logprobs.row(0)
    assert sampled[[0, 1, 4]].tolist() == [-0.5, -0.75, -0.25]
    assert sampled[2:4].isnan().all()
    assert old[[0, 1, 4]].tolist() == pytest.approx([-0.6, -0.85, -0.35])
    assert "1 × the episode has no trace of an agent that is trained" in capsys.readouterr().out
    command(
        tmp_path / "eval", "--from", "verifiers", "--tokenizer", "tiny", "--graph", "grpo", "-o", tmp_path / "eval_run"
    )
    assert record(tmp_path / "eval_run", "rollouts.prompts", 0).answer == ["7", "7"]
    assert "client.type=train" in capsys.readouterr().out
    assert main(["audit", str(run)]) == 0
