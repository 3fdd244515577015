"""Learning curves, budgets and verdicts: numbers by hand."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from creditgraph.lab.bench.compare_report import (
    NOT_RANKED,
    NOT_TESTED,
    analyse,
    as_json,
    band,
    chosen,
    draw,
    sentences,
    table,
)
from creditgraph.lab.bench.curves import Curve, default_threshold, next_iterations, read_curve
from creditgraph.lab.bench.methods import BASELINE, METHODS, Method, choose_methods
from creditgraph.lab.bench.training_runs import Plan, train_all, train_one
from creditgraph.lab.bench.warm import Warm
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.compose.choices import list_choices, search_dirs
from creditgraph.pipeline.run.compose.experiment import compose
from creditgraph.pipeline.run.metrics import read_metrics


def metric_rows():
    """Iterations of 90 + 10 sampled tokens; evaluations (500 tokens, 2 s) before iterations 0 and 2, and after 4."""
    rows = []
    for i in range(4):
        row = {
            "iteration": i,
            "engine/sampled_tokens": 100.0,
            "sampler/sampled_tokens": 90.0,
            "localizer/sampled_tokens": 10.0,
            "learner/steps": 4.0,
            "learner/trained_tokens": 80.0,
        }
        row |= {"seconds/iteration": 5.0, "seconds/evaluator": 0.0, "seconds/sampler": 1.0}
        if i % 2 == 0:
            row |= {
                "evaluator/accuracy": 0.2 + 0.1 * i,
                "engine/sampled_tokens": 600.0,
                "evaluator/sampled_tokens": 500.0,
                "seconds/evaluator": 2.0,
                "seconds/iteration": 7.0,
            }
        rows.append(row)
    rows.append({"iteration": 4, "evaluator/accuracy": 0.5, "seconds/evaluator": 2.0})
    rows[-1] |= {"engine/sampled_tokens": 500.0, "evaluator/sampled_tokens": 500.0}
    return rows


def test_tokens_and_seconds_leave_evaluation_out():
    curve = read_curve(metric_rows())
    assert curve.tokens.tolist() == [0, 200, 400]
    assert curve.seconds.tolist() == [0, 10, 20]
    assert curve.accuracy.tolist() == [0.2, 0.4, 0.5]
    assert curve.steps.tolist() == [0, 8, 16]
    assert curve.trained.tolist() == [0, 160, 320]
    assert (curve.iterations, curve.total_tokens, curve.total_steps) == (4, 400, 16)


def test_tokens_that_no_node_reports_are_those_of_the_engine():
    rows = [{k: v for k, v in row.items() if k != "localizer/sampled_tokens"} for row in metric_rows()]
    assert read_curve(rows).tokens.tolist() == [0, 200, 400]


def test_an_evaluation_in_every_iteration_leaves_all_tokens_of_training():
    every = [row | {"evaluator/accuracy": 0.3, "engine/sampled_tokens": 600.0} for row in metric_rows()[:4]]
    rows = [row | {"evaluator/sampled_tokens": 500.0} for row in every]
    assert read_curve(rows).tokens.tolist() == [0, 100, 200, 300]


def test_an_empty_file_is_a_run_without_iterations():
    curve = read_curve([])
    assert curve.iterations == 0
    assert math.isnan(curve.at(0))
    assert not Plan(budget=1, folder=Path()).is_finished(curve)


def test_length_of_a_response_that_is_evaluated():
    rows = [row | {"evaluator/problems": 10.0} for row in metric_rows()]
    # 500 tokens of 10 greedy responses; with 3 further samples of each problem, of 40.
    assert read_curve(rows).of("length", 150) == 50
    assert read_curve([row | {"evaluator/mean_at_3": 0.5} for row in rows]).of("length", 150) == 12.5
    assert math.isnan(read_curve(metric_rows()).of("length", 150))


def line(tokens, accuracy, seconds=None):
    tokens = np.array(tokens, dtype=float)
    return Curve(
        tokens=tokens,
        processed=tokens * 1.5,
        steps=tokens / 10,
        trained=tokens / 2,
        seconds=tokens if seconds is None else np.array(seconds, float),
        length=tokens,
        accuracy=np.array(accuracy, float),
        iterations=len(tokens),
        total_tokens=tokens[-1],
        total_steps=tokens[-1] / 10,
    )


def test_interpolation_by_hand():
    curve = line([0, 100, 200], [0.2, 0.4, 0.8])
    assert curve.at(150) == pytest.approx(0.6)
    assert math.isnan(curve.at(201))
    assert curve.at(15, "steps") == pytest.approx(0.6)
    assert math.isnan(curve.at(101, "trained"))
    assert curve.of("steps", 150) == 15
    assert curve.reaches(0.5, 200) == pytest.approx(125)
    assert math.isnan(curve.reaches(0.5, 120))
    assert math.isnan(curve.reaches(0.9, 200))
    assert curve.reaches(0.1, 200) == 0


def test_first_crossing_counts_although_accuracy_falls_again():
    assert line([0, 100, 200, 300], [0.2, 0.6, 0.4, 0.6]).reaches(0.4, 300) == pytest.approx(50)


def test_iterations_are_planned_from_the_mean_so_far():
    curve = read_curve(metric_rows())  # 100 tokens per iteration, 400 done
    assert next_iterations(curve, 1000) == 4 + 7  # 6 missing · 1.05 = 6.3 → 7
    assert next_iterations(curve, 400) == 4
    assert next_iterations(curve, 401) == 5
    assert next_iterations(curve, 1000, 40) == 4 + 7  # 24 steps missing at 4 each: 6 · 1.05 → 7
    assert next_iterations(curve, 1000, 80) == 4 + 17  # 64 missing: 16 · 1.05 = 16.8 → 17
    silent = [row | {"engine/sampled_tokens": row.get("evaluator/sampled_tokens", 0.0)} for row in metric_rows()]
    with pytest.raises(ValueError, match="took no token in 4 iterations"):
        next_iterations(read_curve(silent), 1000)


def test_a_run_that_stalls_ends_and_keeps_its_accuracy(tmp_path):
    """100 tokens and 4 optimiser steps per iteration, 4 iterations done."""
    file = tmp_path / "grpo-s0" / "metrics.jsonl"
    file.parent.mkdir()

    def write(silent=()):
        rows = [row | ({"learner/steps": 0.0} if row["iteration"] in silent else {}) for row in metric_rows()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    method = Method(name="grpo", recipe="toy_grpo")
    slow = Plan(budget=200, steps=80, folder=tmp_path)
    assert not slow.is_finished(slow.curve(method, 0))
    assert slow.next_round(slow.curve(method, 0)) == 4 + 3  # to three times its tokens; 17 more would take its steps
    assert slow.first_round(method, [0, 1]) == 7  # of another seed: 1.05 · 600 / 100 = 6.3
    # Past three times its tokens it goes on, to three times those, as long as it takes steps.
    stalled = Plan(budget=100, steps=80, folder=tmp_path)
    assert not stalled.is_finished(stalled.curve(method, 0))
    assert stalled.next_round(stalled.curve(method, 0)) == 4 + 9  # 1.05 · 800 / 100 = 8.4
    write(silent=(2, 3))
    curve = stalled.curve(method, 0)
    assert stalled.is_finished(curve)
    assert (curve.end("steps"), curve.at(80, "steps"), curve.at(8, "steps")) == (80, 0.5, 0.5)
    assert (curve.at(100), curve.of("steps", 100), curve.end()) == (pytest.approx(0.3), 4, 400)
    assert stalled.curves_of("grpo-*")[0].end("steps") == 80
    write()
    enough = Plan(budget=100, steps=16, folder=tmp_path)
    assert len(enough.curve(method, 0).steps) == 3


def test_threshold_is_three_quarters_of_what_the_baseline_gains():
    assert default_threshold([line([0, 100], [0.2, 0.5]), line([0, 100], [0.2, 0.7])], 100) == pytest.approx(0.5)


@pytest.fixture
def curves():
    return {
        "grpo": {0: line([0, 100], [0.2, 0.6]), 1: line([0, 100], [0.2, 0.62])},
        "good": {0: line([0, 50, 100], [0.2, 0.6, 0.8]), 1: line([0, 50, 100], [0.2, 0.6, 0.8201])},
        "bad": {0: line([0, 100], [0.2, 0.3]), 1: line([0, 100], [0.2, 0.3201])},
        "missing": {0: read_curve([]), 1: read_curve([])},
    }


def test_table_says_who_does_not_beat_the_baseline(curves, tmp_path):
    rows, bar = analyse(curves, 100, 0.5)
    assert bar == 0.5
    assert rows["good"].reached[0] == pytest.approx(37.5)
    # grpo reaches .5 at 75 and 71.4 tokens, good at 37.5 twice
    assert rows["good"].speed == pytest.approx((75 + 0.3 / 0.42 * 100) / 2 / 37.5)
    assert math.isnan(rows["bad"].speed)
    assert [rows[n].word for n in ("good", "bad", "missing")] == ["above", "below", NOT_TESTED]
    assert rows["grpo"].word == "baseline"
    text = table(rows, 100, bar)
    assert "Above grpo at equal sampled tokens: good." in text
    assert "Below grpo: bad." in text
    assert "Not ranked" not in text
    assert sentences(rows)[1].endswith("none.")
    assert sentences(rows)[-1] == "Not tested, for want of two seeds that reach the budget as grpo's do: missing."
    draw(curves, 100, bar, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert as_json(rows, curves)["good"]["curves"][0]["accuracy"] == [0.2, 0.6, 0.8]


def test_a_budget_that_ends_before_the_second_step_is_not_ranked(curves):
    curves["slow"] = {s: dataclasses.replace(c, steps=c.tokens / 60) for s, c in curves["good"].items()}
    rows, _ = analyse(curves, 100, 0.5)
    assert rows["slow"].word == NOT_RANKED
    assert sentences(rows)[-2].endswith("step: slow.")


@pytest.fixture
def many():
    """A baseline, 20 methods of rising accuracy with two seeds far apart, and one without any evaluation."""
    methods = {f"m{i:02d}": {0: line([0, 100], [0.2, 0.7 + i / 100]), 1: line([0, 100], [0.2, 1.0])} for i in range(20)}
    return {"grpo": {0: line([0, 100], [0.2, 0.6])}, **methods, "missing": {0: read_curve([])}}


def test_a_picture_has_at_most_seven_lines_and_the_rest_apart(many):
    best, rest = chosen(many, 100)
    assert best == ["grpo", "m19", "m18", "m17", "m16", "m15", "m14"]
    assert rest == [f"m{i:02d}" for i in range(13, -1, -1)]
    assert chosen(dict(list(many.items())[:3]), 100) == (["grpo", "m01", "m00"], [])


def test_bands_end_at_1(many):
    # At the end .89 and 1: mean .945, standard deviation .078, so the band would reach 1.02.
    _, mean, low, high = band(list(many["m19"].values()), "tokens", 100)
    assert mean[-1] == pytest.approx(0.945)
    assert high[-1] == 1
    assert low[-1] == pytest.approx(0.945 - 0.0778, abs=1e-3)


def test_the_figure_of_many_methods(many, tmp_path):
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
        draw(many, 100, 0.5, tmp_path / "x.png")
    (figure,) = figures
    assert len(figure.axes) == 2 + 14
    # Seven methods and the threshold; the baseline and one method.
    assert [len(axes.lines) for axes in figure.axes] == [8, 7, *[2] * 14]
    assert all(axes.get_xlim()[0] == 0 and axes.get_ylim() == (0, 1) for axes in figure.axes)
    colors = [line.get_color() for line in figure.axes[1].lines]
    assert len(set(colors)) == 7
    assert "band: its standard deviation" in figure.get_suptitle()


def write_run(folder, iterations):
    rows = [
        {"iteration": i, "engine/sampled_tokens": 100.0, "learner/steps": 1.0, "seconds/iteration": 1.0}
        for i in range(iterations)
    ]
    rows.append({"iteration": iterations, "evaluator/accuracy": 0.5})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def fake_launch(calls):
    def launch(command, log):
        settings = dict(part.split("=", 1) for part in command[1:] if "=" in part)
        calls.append(int(settings["run.iterations"]))
        write_run(Path(settings["run.root"]) / settings["run.name"], calls[-1])
        return 0

    return launch


def test_a_run_goes_on_until_its_curve_covers_the_budget_and_is_then_kept(tmp_path):
    calls = []
    plan = Plan(budget=1000, folder=tmp_path, pilot=3)
    assert train_one(plan, BASELINE, 0, fake_launch(calls), lambda text: None) == ""
    assert calls == [3, 11]  # 300 tokens, then 7 missing iterations · 1.05 → 8 more
    assert train_one(plan, BASELINE, 0, fake_launch(calls), lambda text: None) == ""
    assert calls == [3, 11]
    assert plan.curve(BASELINE, 0).at(1000) == pytest.approx(0.5)


def test_a_run_that_samples_less_and_less_gets_there(tmp_path):
    """Each iteration has 96 % of the tokens of the one before: 2,500 in all, of which the budget wants 2,300."""
    calls = []

    def launch(command, log):
        fake_launch(calls)(command, log)
        file = tmp_path / "grpo-s0" / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [
            r | {"engine/sampled_tokens": 100 * 0.96 ** r["iteration"]} if "learner/steps" in r else r for r in rows
        ]
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return 0

    plan = Plan(budget=2300, folder=tmp_path, pilot=3)
    assert train_one(plan, BASELINE, 0, launch, lambda text: None) == ""
    # 12 iterations are missing after 25 by the mean so far, 8 after 37, 3 after 53: once, twice and four times as many.
    assert calls == [3, 25, 37, 53, 65]


def test_a_further_seed_is_planned_from_those_before(tmp_path):
    calls = []
    plan = Plan(budget=1000, folder=tmp_path, pilot=3)
    train_one(plan, BASELINE, 0, fake_launch(calls), lambda text: None, seeds=[0, 1])
    train_one(plan, BASELINE, 1, fake_launch(calls), lambda text: None, seeds=[0, 1])
    assert calls == [3, 11, 11]  # 1.05 · 1000 / 100 = 10.5 → 11 at once


def test_a_run_goes_on_until_it_has_taken_its_steps(tmp_path):
    calls = []
    plan = Plan(budget=300, steps=8, folder=tmp_path, pilot=3)
    assert train_one(plan, BASELINE, 0, fake_launch(calls), lambda text: None) == ""
    assert calls == [3, 9]  # 5 missing · 1.05 → 6 more
    train_one(plan, BASELINE, 1, fake_launch(calls), lambda text: None, seeds=[0, 1])
    assert calls == [3, 9, 9]  # 1.05 · 8 = 8.4 → 9 at once


def test_a_failing_run_says_where_its_log_is(tmp_path):
    problem = train_one(Plan(budget=10, folder=tmp_path), BASELINE, 3, lambda command, log: 2, lambda text: None)
    assert problem == f"exit code 2, see {tmp_path}/logs/grpo-s3.log"


def test_commands_are_what_a_user_would_type(tmp_path):
    plan = Plan(budget=10, folder=tmp_path, overrides=("evaluator.every=5",), config_dirs=("mine",))
    command = plan.command(Method("x", "toy_grpo", ("learner.minibatches=4",)), 7, 12)
    assert command[0] == "train"
    assert command[1:] == [
        "recipe=toy_grpo",
        "learner.minibatches=4",
        "evaluator.every=5",
        "run.seed=7",
        f"run.root={tmp_path}",
        "run.name=x-s7",
        "run.iterations=12",
        "--config-dir",
        "mine",
    ]


def test_failures_of_all_runs_are_collected(tmp_path):
    missing = Method("broken", "no_such_recipe")
    plan = Plan(budget=10, folder=tmp_path, known=["broken-s1"])  # which is not started
    with Warm() as warm:
        failed = train_all(plan, [missing], [0, 1], 1, warm.run, lambda text: None)
    assert list(failed) == ["broken-s0"]
    assert "no recipe named 'no_such_recipe'" in (tmp_path / "logs" / "broken-s0.log").read_text()


def test_methods_are_chosen_by_name_recipe_and_settings():
    result = choose_methods(["srpo", "toy_srpo_1x8", "grpo,learner.minibatches=4", "grpo"])
    assert [m.name for m in result] == ["grpo", "srpo", "toy_srpo_1x8", "grpo,learner.minibatches=4"]
    assert result[3].overrides == ("learner.minibatches=4",)
    with pytest.raises(ConfigError, match=r"method 'sprro': no recipe 'sprro'.*Did you mean"):
        choose_methods(["sprro"])


def test_every_listed_method_has_a_recipe_and_sound_settings():
    chosen = choose_methods(None)
    assert chosen[0] == BASELINE
    assert len({m.name for m in METHODS}) == len(METHODS)
    assert {m.recipe for m in METHODS} <= set(list_choices("recipe", search_dirs()))
    for method in chosen:
        if method.overrides:  # the recipes themselves are built by tests/configs
            method.experiment()


def test_a_method_with_settings_in_its_name_composes(tmp_path):
    method = Method("vineppo,value.continuations=20", "toy_vineppo", ("value.continuations=20",))
    command = Plan(budget=10, folder=tmp_path).command(method, 0, 3)
    assert compose(command[1:])["run"]["name"] == "vineppo-value.continuations-20-s0"


def test_the_tokens_of_a_run_do_not_depend_on_how_often_it_is_evaluated(tmp_path):
    curves = []
    settings = ["prompts.batch=2", "evaluator.num_problems=4", "run.iterations=2", "data.train.size=20"]
    for every in (0, 1):
        own = [f"run.root={tmp_path}", f"run.name=every-{every}", f"evaluator.every={every}", *settings]
        assert main(["train", "recipe=toy_vineppo", *own]) == 0
        rows = read_metrics(tmp_path / f"every-{every}" / "metrics.jsonl")
        curves.append(read_curve(rows))
        nodes = ("sampler", "value")
        assert curves[-1].total_tokens == sum(r.get(f"{n}/sampled_tokens", 0) for r in rows for n in nodes)
    assert curves[0].total_tokens == curves[1].total_tokens > 10_000
    assert curves[1].tokens[1] > curves[1].tokens[0] == 0
