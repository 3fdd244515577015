"""Runs that train nothing say so while they run and at their end, with the likely cause and the next command."""

import json
from pathlib import Path

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.signal_watch import SignalWatch, trains
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

TOY = ["recipe=toy_grpo", "prompts.batch=2", "sampler.group_size=4", "evaluator.num_problems=2", "run.device=cpu"]

NAN_CREDIT = '''
from dataclasses import replace

import torch

from creditgraph.components.advantage.group import GroupAdvantage, Outputs
from creditgraph.pipeline.core.payloads import Rewards, Trajectories


class NanAdvantage(GroupAdvantage):
    """Divides 0 by 0."""

    def run(self, *, trajectories: Trajectories, rewards: Rewards) -> Outputs:
        """Returns NaN for every token."""
        outputs = super().run(trajectories=trajectories, rewards=rewards)
        advantage = outputs.credit.advantage
        broken = outputs.credit.replace(advantage=advantage.with_values(advantage.values * torch.nan))
        return replace(outputs, credit=broken)
'''


def row(iteration: int, **changes: float) -> dict[str, float]:
    """An iteration in which the groups were silent and no step was made."""
    return {
        "iteration": iteration,
        "learner/steps": 0.0,
        "learner/skipped_zero_credit": 1.0,
        "learner/skipped_nonfinite": 0.0,
        "advantage/groups": 2.0,
        "advantage/group_size": 4.0,
        "advantage/zero_variance_share": 1.0,
        "rewards/mean": 0.5,
        "rewards/correct": 0.5,
        "rewards/invalid": 0.0,
        **{name.replace("__", "/"): value for name, value in changes.items()},
    }


@pytest.fixture(scope="module")
def graph():
    return build_experiment(compose(TOY), "toy_grpo").graph


@pytest.fixture
def watch(graph):
    return SignalWatch(graph, Path("runs/r"), record_every=5)


def test_the_tenth_iteration_in_a_row_warns_and_then_the_hundredth(watch):
    said = {i for i in range(1001) if watch.add(row(i))}
    assert said == {9, 99, 999}
    assert watch.summary().startswith("nothing was trained in iterations 0 to 1000: ")


def test_iterations_in_which_a_node_warms_up_do_not_count(watch):
    assert not any(watch.add(row(i, advantage__warming_up=1.0)) for i in range(30))
    assert [i for i in range(30, 45) if watch.add(row(i, advantage__warming_up=0.0))] == [39]


def test_an_iteration_with_a_step_ends_the_count(watch):
    for i in range(9):
        assert watch.add(row(i)) == ""
    assert watch.add(row(9, learner__steps=1.0)) == ""
    for i in range(10, 19):
        assert watch.add(row(i)) == ""
    assert watch.summary() == ""
    assert "iterations 10 to 19" in watch.add(row(19))
    assert "iterations 10 to 19" in watch.summary()


def test_rows_of_an_earlier_start_count_and_the_final_pass_does_not(graph):
    watch = SignalWatch(graph, Path("runs/r"), rows=[row(i) for i in range(6)])
    assert [i for i in range(6, 12) if watch.add(row(i))] == [9]
    assert trains({"iteration": 12, "evaluator/accuracy": 0.5}) is None
    assert watch.add({"iteration": 12, "evaluator/accuracy": 0.5}) == ""
    assert "iterations 0 to 11" in watch.summary()


def test_a_short_run_without_a_step_warns_at_its_end_only(watch):
    assert watch.add(row(0)) == ""
    assert watch.summary().startswith("nothing was trained in iteration 0: ")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"learner__skipped_nonfinite": 1.0},
            ["NaN or infinite", "`creditgraph replay runs/r --iteration 10 --node advantage`"],
        ),
        ({"advantage__group_size": 1.0}, ["every group has one response", "sampler.group_size=8"]),
        (
            {"rewards__mean": 0.0, "rewards__correct": 0.0},
            ["no response was correct (reward 0 everywhere)", "`creditgraph report runs/r`"],
        ),
        (
            {"rewards__mean": 0.0, "rewards__correct": 0.0, "rewards__invalid": 8.0},
            ["no response was correct, and 88 could not be verified", "runs/r/rejected.jsonl"],
        ),
        ({"rewards__mean": 1.0, "rewards__correct": 1.0}, ["every response was correct", "harder problems"]),
        ({}, ["the rewards within each group were equal", "sampler.dynamic"]),
        (
            {"advantage__zero_variance_share": 0.5},
            ["credit of every token was 0", "replay runs/r --iteration 10 --node advantage"],
        ),
        (
            {"advantage__groups": 0.0, "learner__skipped_zero_credit": 0.0},
            ["no response reached the learner", "runs/r/rejected.jsonl"],
        ),
    ],
)
def test_each_cause_has_its_sentence(watch, changes, parts):
    for i in range(11):
        watch.add(row(i, **changes))
    for part in parts:
        assert part in watch.summary()


def test_without_records_nothing_is_said_of_replay(graph):
    watch = SignalWatch(graph, Path("runs/r"), record_every=0)
    watch.add(row(0, learner__skipped_nonfinite=1.0))
    assert "`creditgraph report runs/r`, with run.record.every=1" in watch.summary()


@pytest.mark.parametrize(
    ("name", "settings", "part"),
    [
        (
            "not_a_number",
            ["advantage.use=nan_credit_of_a_test:NanAdvantage"],
            "the loss or its gradient was NaN or infinite",
        ),
        ("alone", ["sampler.group_size=1"], "every group has one response"),
        ("wrong", ["verifier.use=verifier.regex"], "no response was correct"),
    ],
)
def test_a_real_run_that_trains_nothing_warns(tmp_path, capsys, monkeypatch, name, settings, part):
    (tmp_path / "nan_credit_of_a_test.py").write_text(NAN_CREDIT)
    monkeypatch.syspath_prepend(str(tmp_path))
    length = [
        "run.iterations=11",
        "sampler.max_tokens=8",
        "evaluator.max_tokens=8",
        f"run.root={tmp_path}",
        f"run.name={name}",
    ]
    assert main(["train", *TOY, *length, *settings]) == 0
    said = capsys.readouterr()
    warnings = [line for line in said.err.splitlines() if line.startswith("WARNING nothing was trained")]
    assert len(warnings) == 1
    assert "iterations 0 to 9: " in warnings[0]
    assert part in warnings[0]
    assert "optimiser steps" in said.out
    assert f"WARNING nothing was trained in iterations 0 to 10: {part}" in said.out
    assert part in json.loads((tmp_path / name / "result.json").read_text())["warning"]


def test_a_run_that_trains_says_nothing(tmp_path, capsys):
    assert main(["train", *TOY, "run.iterations=1", "prompts.batch=8", f"run.root={tmp_path}", "run.name=r"]) == 0
    said = capsys.readouterr()
    assert "WARNING" not in said.out + said.err
    assert json.loads((tmp_path / "r" / "result.json").read_text())["warning"] == ""
