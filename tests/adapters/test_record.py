"""The credit inside another trainer, written and read back by `creditgraph import`."""

import json

import pytest
import torch

from creditgraph.adapters.estimator import Loss
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.record import ROWS
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import ConfigError, RunError
from tests.adapters.test_imports import command, record

MASK = [[1, 1, 0, 1, 0], [1, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1]]


def batch(seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    given = {
        "mask": torch.tensor(MASK),
        "rewards": torch.randn(4, 5, generator=generator) * torch.tensor(MASK),
        "group": ["x", "y", "x", "y"],
        "tokens": torch.randint(2, 50, (4, 5), generator=generator),
        "prompts": [[7, 8], [9], [7, 8], [9]],
        "logprobs": -torch.rand(4, 5, generator=generator),
        "answers": ["4", "5", "4", "5"],
    }
    return Rollouts(**given | more)


@pytest.mark.parametrize("graph", ["drgrpo", "gigpo"])
def test_what_is_imported_is_what_the_graph_returned(tmp_path, graph):
    file, run = tmp_path / "deep/credit.jsonl", tmp_path / "run"
    credit = CreditGraph(graph, f"--record={file}")
    given = [batch(seed) for seed in (0, 1)]
    advantages = [credit(rollouts) for rollouts in given]
    credit(batch(2), record=False)  # an evaluation
    turns = ["--turns"] if graph == "gigpo" else []
    assert command(file, "--from", "jsonl", "-o", run, *turns) == 0
    for step, (rollouts, expected) in enumerate(zip(given, advantages, strict=True)):
        trained = rollouts.mask != 0
        found = record(run, "rollouts.credit", step)
        assert torch.equal(found.advantage.values[found.mask.values], expected[trained])
        trajectories = record(run, "rollouts.trajectories", step)
        inside = trajectories.response_tokens.values[found.mask.values]
        assert inside.tolist() == rollouts.tokens[trained].tolist()
        assert torch.equal(trajectories.engine_logprobs.values[found.mask.values], rollouts.logprobs[trained])
        assert record(run, "rollouts.prompts", step).answer == ["4", "5"]
    if turns:
        # Of each run of sampled tokens the rewards until the next.
        expected = [[row[:3].sum(), row[3:].sum()] for row in given[1].rewards]
        expected[1] = [given[1].rewards[1][:2].sum(), given[1].rewards[1][2:].sum()]
        expected[2] = [given[1].rewards[2].sum()]
        flat = torch.stack([x for row in expected for x in row])
        torch.testing.assert_close(record(run, "rollouts.turns", 1).reward, flat)
    assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["audit", str(file)]) == 0


def test_steps_of_episodes_stay_steps(tmp_path):
    file, run = tmp_path / "credit.jsonl", tmp_path / "run"
    rollouts = batch(rewards=torch.tensor([0.0, 1.0, 0.0, 0.5]), group=["x"] * 4, episode=["a", "a", "b", "b"])
    expected = CreditGraph("gigpo", f"--record={file}")(rollouts)
    assert command(file, "--from", "jsonl", "-o", run, "--turns") == 0
    turns = record(run, "rollouts.turns")
    assert turns.turn.tolist() == [0, 1, 2, 3, 0, 1, 2]
    found = record(run, "rollouts.credit")
    assert torch.equal(found.advantage.values[found.mask.values], expected[rollouts.mask != 0])


def test_a_row_that_is_not_trained_on_keeps_its_reward(tmp_path):
    file, run = tmp_path / "credit.jsonl", tmp_path / "run"
    CreditGraph("grpo", f"--record={file}")(batch(mask=torch.tensor([MASK[0], [0] * 5, *MASK[2:]])))
    assert command(file, "--from", "jsonl", "-o", run) == 0
    found = record(run, "rollouts.rewards").value
    torch.testing.assert_close(found, batch().rewards.sum(1))
    assert not record(run, "rollouts.credit").mask.row(1).any()


def test_only_the_first_whole_groups_of_a_large_batch_are_written(tmp_path):
    file, n = tmp_path / "credit.jsonl", 3 * ROWS
    group = [i % (n // 8) for i in range(n)]  # eight rows each, one after the other
    rollouts = Rollouts(
        mask=torch.ones(n, 2), rewards=torch.arange(n).float(), group=group, tokens=torch.zeros(n, 2, dtype=torch.int64)
    )
    CreditGraph("grpo", f"--record={file}")(rollouts)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    counts = {row["group"]: sum(other["group"] == row["group"] for other in rows) for row in rows}
    assert counts == dict.fromkeys([f"0.{group}" for group in range(ROWS // 8)], 8)


def test_a_trainer_that_starts_again_goes_on_with_the_file(tmp_path):
    file = tmp_path / "credit.jsonl"
    CreditGraph("grpo", f"--record={file}")(batch(0))
    with file.open("a") as opened:
        opened.write('{"step": 1, "group": 0, "rew')  # killed while it wrote
    CreditGraph("grpo", f"--record={file}")(batch(1))
    assert command(file, "--from", "jsonl", "-o", tmp_path / "run") == 0
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines() if line.endswith("}")]
    assert steps == [0] * 4 + [1] * 4
    rejected = (tmp_path / "run/rejected.jsonl").read_text().splitlines()
    assert len(rejected) == 1


def test_a_reward_that_is_no_number_is_written_as_none(tmp_path):
    file = tmp_path / "credit.jsonl"
    CreditGraph("grpo", f"--record={file}")(batch(rewards=torch.tensor([1.0, torch.nan, 0.0, 1.0])))
    rewards = [json.loads(line, parse_constant=pytest.fail)["reward"] for line in file.read_text().splitlines()]
    assert rewards == [1.0, None, 0.0, 1.0]


def test_the_loss_of_a_graph_writes_nothing(tmp_path):
    loss = Loss("grpo", f"--record={tmp_path / 'deep/credit.jsonl'}")
    assert loss.settings is not None
    assert not (tmp_path / "deep").exists()


def test_mistakes(tmp_path):
    (tmp_path / "taken").write_text("mine\n")
    with pytest.raises(ConfigError, match="has other lines than rows of a graph; name another"):
        CreditGraph("grpo", f"--record={tmp_path / 'taken'}")
    with pytest.raises(RunError, match="cannot be written"):
        CreditGraph("grpo", f"--record={tmp_path / 'taken/credit.jsonl'}")
    credit = CreditGraph("grpo", f"--record={tmp_path / 'credit.jsonl'}")
    with pytest.raises(ConfigError, match="--record= writes token ids, but the trainer's hook passes none"):
        credit(batch(tokens=None))
