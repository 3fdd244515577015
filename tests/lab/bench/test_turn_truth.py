"""True values of turns: exact ones agree with played ones, and the bench over turns."""

import math

import pytest
import torch

from creditgraph.lab.bench.credit_bench import EXACT, CreditBench, Options
from creditgraph.lab.bench.credit_report import table
from creditgraph.lab.bench.measured_run import MeasuredRun, shared_outputs
from creditgraph.lab.bench.methods import STOP, TURNS
from creditgraph.lab.bench.turn_truth import exact_values, turn_values, whole
from creditgraph.pipeline.core.handles import Environments, Policy
from creditgraph.pipeline.core.payloads import Prompts, Weights
from creditgraph.pipeline.core.streams import Stream

SMALL = ("prompts.batch=2", "data.train.size=40")


@pytest.fixture(scope="module")
def weights():
    from creditgraph.components.models.load import resolve_model_path

    return Weights(version=0, path=resolve_model_path("tiny"))


def test_played_values_are_the_exact_ones(weights, monkeypatch):
    with MeasuredRun(STOP[0].experiment(*SMALL), 0, weights) as run:
        table_ = run.player.table(run.first(Prompts), run.first(Policy), run.first(Environments))
        episodes = whole(run.trajectories.response_tokens, run.turns)
        rows = torch.arange(len(episodes))
        given = {"world": "w", "samples": 100, "stream": Stream(0)}
        exact = turn_values(table_, run.trajectories, run.turns, rows, known={}, **given)
        assert exact.sampled_tokens == 0
        assert exact.num_states <= 4
        values = exact_values(table_)
        # V of the last state but one is at least the chance of its offer, which is the best.
        assert set(values) == {"0", "1", "2", "3"}
        # The value before the first turn, and the returns at the end, are what they are by hand.
        assert {round(float(row[0]), 9) for row in exact.values.rows()} == {round(values["0"], 9)}
        returns = [float(run.turns.reward[run.turns.episode == uid].sum()) for uid in run.turns.episode.unique()]
        assert [float(row[-1]) for row in exact.values.rows()] == pytest.approx(returns)
        monkeypatch.setattr(type(run.first(Environments)), "exact_values", lambda self, chance: None)
        played = turn_values(table_, run.trajectories, run.turns, rows, known={}, **given)
    assert played.sampled_tokens > 0
    # 100 returns within [0, 1]: a standard error of .05 at most.
    torch.testing.assert_close(played.values.values, exact.values.values, rtol=0, atol=0.2)


def test_rollouts_of_another_environment_are_not_shared(weights):
    with MeasuredRun(TURNS[0].experiment(*SMALL), 0, weights, uids_from_top=True) as run:
        steps = TURNS[1].experiment(*SMALL).graph
        assert sorted(shared_outputs(steps, run)) == ["prompts"]
        assert sorted(shared_outputs(TURNS[2].experiment(*SMALL).graph, run)) == ["prompts", "sampler"]


@pytest.mark.slow
def test_the_bench_over_turns():
    methods = [m for m in TURNS if m.name in ("grpo_turns", "srpo_turns", "tree_turns")]
    result = CreditBench(methods, [0], Options(samples=4, max_rows=6, overrides=SMALL)).measure()
    assert result["failed"] == {}
    entries = result["methods"]
    assert list(entries) == [EXACT, "grpo_turns", "srpo_turns", "tree_turns"]
    assert entries[EXACT]["mean"]["spearman"][0] == pytest.approx(1)
    first = entries["grpo_turns"]["seeds"][0]
    assert first["error_share"] == pytest.approx(first["uniform_share"]) or math.isnan(first["error_share"])
    assert entries["tree_turns"]["own_rollouts"]
    assert "tree_turns" in table(result)
