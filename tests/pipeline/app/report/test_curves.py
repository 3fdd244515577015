"""Bands over seeds: groups, axes, interpolation."""

import json

import pytest
import yaml

from creditgraph.pipeline.app.report.cards import config_differences
from creditgraph.pipeline.app.report.curves import all_lines, axis, groups, line, phases
from creditgraph.pipeline.app.report.source import RunSource, read_run


def source(path, rows):
    return RunSource(path, rows=rows)


def test_seeds_share_a_group_and_settings_do_not(make_run):
    runs = [
        read_run(make_run(n, "recipe=toy_srpo", *o))
        for n, o in (("a", ["run.seed=0"]), ("b", ["run.seed=1"]), ("c", ["prompts.batch=3"]))
    ]
    assert groups(runs) == [("a", [0, 1]), ("c", [2])]  # one recipe, two configurations: named by their first run
    assert groups(runs[:2]) == [("toy_srpo", [0, 1])]
    differing = dict(config_differences(runs))
    assert differing["prompts.batch"] == ["16", "16", "3"]
    assert differing["run.seed"][:2] == ["0", "1"]


def test_axes_add_up_tokens_and_seconds():
    rows = [
        {"iteration": 0, "engine/sampled_tokens": 5, "seconds/iteration": 1.0},
        {"iteration": 1, "engine/sampled_tokens": 7, "seconds/checkpoint": 0.5},
    ]
    assert axis(rows, "iteration").tolist() == [0, 1]
    assert axis(rows, "tokens").tolist() == [5, 12]
    assert axis(rows, "time").tolist() == [1.0, 1.5]


def test_a_band_is_the_range_of_the_seeds_where_they_are_known(tmp_path):
    a = source(tmp_path, [{"iteration": 0, "m": 0.0}, {"iteration": 2, "m": 2.0}])
    b = source(tmp_path, [{"iteration": 0, "m": 4.0}, {"iteration": 1, "m": 5.0}])
    # At 1 run a is interpolated to 1; at 2 run b has ended.
    assert line([a, b], "m", "iteration") == [[0, 2, 0, 4, 2], [1, 3, 1, 5, 2], [2, 2, 2, 2, 1]]


def test_nan_is_left_out(tmp_path):
    rows = [{"iteration": 0, "m": float("nan")}, {"iteration": 1, "m": 1.0}]
    assert line([source(tmp_path, rows)], "m", "iteration") == [[1, 1, 1, 1, 1]]
    assert line([source(tmp_path, rows)], "gone", "iteration") == []


def test_phases_sum_small_nodes_as_other(tmp_path):
    row = {"iteration": 0, "seconds/iteration": 9.0, "seconds/cpu": 9.0, "seconds/waiting_generation": 1.0}
    row |= {f"seconds/n{i}": float(i) for i in range(1, 5)}
    assert phases(source(tmp_path, [row]), most=2) == [[0, "n3", 3.0], [0, "n4", 4.0], [0, "other", 3.0]]


def test_all_lines_can_be_json(make_run):
    result = all_lines([read_run(make_run())])
    assert json.loads(json.dumps(result))["groups"] == [{"label": "toy_srpo", "runs": [0]}]
    assert result["lines"]["rewards/mean"]["tokens"]["toy_srpo"] == [[100, 0, 0, 0, 1], [200, 0.1, 0.1, 0.1, 1]]


def test_a_run_without_config_is_a_group_of_its_own(make_run):
    run = make_run()
    (run / "config.yaml").write_text(yaml.safe_dump([]), encoding="utf-8")
    assert groups([read_run(run)]) == [("r", [0])]
    assert pytest.approx(0.1) == read_run(run).rows[1]["rewards/mean"]
