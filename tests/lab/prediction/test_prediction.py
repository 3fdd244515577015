"""The study of what predicts gains: τ by hand, planted scores, and the files that it reads."""

import json
import math

import numpy as np
import pytest

from creditgraph.lab.bench.methods import METHODS
from creditgraph.lab.prediction.cells import read_cells
from creditgraph.lab.prediction.study import (
    COMBINED,
    Cell,
    halves,
    kendall,
    repeatability,
    repeatability_line,
    study,
    study_table,
)
from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.core.errors import DataError


def test_kendall_by_hand():
    # Of the six pairs of 1 2 3 4 against 1 3 2 4, one disagrees: (5 − 1)/6. A tie in y: 2 of 3 pairs, √(3·2).
    assert kendall(np.arange(4.0), np.array([0.0, 2.0, 1.0, 3.0])) == pytest.approx(4 / 6)
    assert kendall(np.arange(3.0), np.array([0.0, 1.0, 1.0])) == pytest.approx(2 / math.sqrt(6))


def test_kendall_of_many_rows_is_that_of_each():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 3, (2, 50, 4)).astype(float)  # ties, and rows that are constant
    alone = [float(kendall(a, b)) for a, b in zip(x, y, strict=True)]
    assert any(map(math.isnan, alone))
    np.testing.assert_allclose(kendall(x, y), alone)


def planted(families: int = 6, methods: int = 12) -> list[Cell]:
    """`good` orders methods as gains do, `reverse` against them, `noise` at random; only one method has `lonely`."""
    rng = np.random.default_rng(3)
    cells = []
    for f in range(families):
        gain = rng.random(methods)
        noise = rng.random(methods)
        scores = {
            f"m{i}": {"good": gain[i] + 0.03 * noise[i], "reverse": -gain[i], "noise": noise[i], "nan": math.nan}
            for i in range(methods)
        }
        scores["m0"]["lonely"] = 1.0
        gains = {f"m{i}": {"0": float(gain[i])} for i in range(methods)} | {"untested": {"0": 0.5}}
        cells.append(Cell(name=f"cell{f}", family=f"family{f}", runs=gains, scores=scores))
    return cells


def test_planted_scores_are_found():
    result = study(planted())
    assert result["good"].predicts
    assert result["good"].directions == (1, 1)
    # The direction is fitted on the other half, so a score that is the wrong way round predicts as well.
    assert result["reverse"].tau == 1
    assert result["reverse"].directions == (-1, -1)
    assert result[COMBINED].predicts
    assert not result["noise"].predicts
    assert result["noise"].low < result["noise"].tau < result["noise"].high
    assert "lonely" not in result
    assert "nan" not in result
    text = study_table(result)
    assert text.startswith("reverse, ")
    assert "noise" not in text.splitlines()[0]
    assert study(planted()) == result


def test_the_direction_is_not_fitted_on_what_is_tested():
    # The score helps in one half of the families and harms in the other: fitted on either, it fails on the other.
    cells = planted()
    half = halves([cell.family for cell in cells])
    sides = [
        Cell(
            name=c.name,
            family=c.family,
            runs=c.runs,
            scores={m: {"fickle": (1 if half[c.family] else -1) * c.gain[m]} for m in c.scores},
        )
        for c in cells
    ]
    assert study(sides)["fickle"].tau == -1
    assert study_table(study(sides)).startswith("No score predicts")


def test_how_well_gains_repeat_by_hand():
    def cell(*runs: list[float]) -> Cell:
        table = {f"m{i}": {str(seed): gain for seed, gain in enumerate(row)} for i, row in enumerate(runs)}
        return Cell(name="one", family="f", runs=table, scores={name: {} for name in table})

    # Two seeds: both splits compare seed 0 with seed 1, which agree in one of three pairs: (1 − 2)/3.
    noisy = cell([0.1, 0.3], [0.2, 0.1], [0.3, 0.2])
    assert repeatability([noisy])["one"] == pytest.approx(-1 / 3)
    # Three seeds: one against the mean of two. Seed 2 turns m0 and m1 round, alone and beside 0 or 1: τ is 1/3 always.
    mixed = cell([0.1, 0.1, 0.9], [0.2, 0.2, 0.3], [1.0, 1.0, 1.0])
    assert repeatability([mixed])["one"] == pytest.approx(1 / 3)
    assert repeatability_line([mixed]).endswith("with τ = +0.33; in one it is below 0.5.")
    # One seed, and a seed that a method lacks.
    assert repeatability([cell([0.1], [0.2], [0.3])]) == {}
    assert repeatability([cell([0.1, 0.2], [0.2], [0.3, 0.3])]) == {}
    assert repeatability_line([]) == ""


def test_two_methods_with_a_score_are_too_few():
    cells = planted()
    for cell in cells:
        for method in ("m0", "m1"):
            cell.scores[method]["rare"] = cell.gain[method]
    assert "rare" not in study(cells)


def test_one_family_is_not_enough():
    with pytest.raises(DataError, match=r"1 families have 3 methods .* expected at least two, one to fit"):
        study(planted(families=1))


def entry(pearson: float, bias: float) -> dict:
    gradient = {name: [1.0, None] for name in ("cosine", "tokens", "steps", "noise", "signal")}
    return {
        "mean": {"pearson": [pearson, 0.1], "bias": [bias, 0.1], "credit_seconds": [9.0, 1.0]},
        "gradient": gradient,
    }


@pytest.fixture
def files(tmp_path):
    """Results of two cells of tools/evidence, and scores of them, of one cell at two states."""
    methods = {f"m{i}": {"seeds": [0, 1], "accuracy": [0.5 + i / 10, None], "start": [0.1, 0.1]} for i in range(4)}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"cells": {name: {"methods": methods} for name in ("one", "two", "three")}}))
    scores = tmp_path / "scores"
    for place, data in (("one/start", "chains"), ("one/after_20", "chains"), ("two", "chains_one")):
        (scores / place).mkdir(parents=True)
        content = {"settings": {"set": [f"data={data}"]}, "methods": {f"m{i}": entry(i / 4, -i) for i in range(3)}}
        (scores / place / "result.json").write_text(json.dumps(content))
    return results, scores


def test_files(files):
    results, scores = files
    cells, notes = read_cells([results], scores)
    assert [(c.name, c.family) for c in cells] == [("one", "chains"), ("two", "chains_one")]
    assert cells[0].gain["m2"] == pytest.approx(0.6)
    assert cells[0].methods == ["m0", "m1", "m2"]
    assert cells[0].scores["m1"]["pearson@after_20"] == 0.25
    assert cells[1].scores["m1"]["|bias|"] == 1
    assert "credit_seconds" not in cells[1].scores["m1"]
    assert notes[0] == "one: no scores of m3"
    assert notes[2].endswith("no scores, so the cell three is left out")


def test_cells_on_the_recipes_own_data_are_one_family(files):
    # Else cells of the same problems could be on both sides of the split.
    results, scores = files
    for place in ("one/start", "one/after_20", "two"):
        file = scores / place / "result.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": {"set": []}}))
    first, second = read_cells([results], scores)[0]
    assert first.family == second.family


def test_folders_of_compare(tmp_path, files):
    _, scores = files
    (tmp_path / "two").mkdir()
    rows = {f"m{i}": {"accuracy": {"0": i / 4}, "curves": {"0": {"accuracy": [0.25, i / 4]}}} for i in range(3)}
    (tmp_path / "two" / "result.json").write_text(json.dumps({"methods": rows}))
    cells, _ = read_cells([tmp_path / "two"], scores)
    assert cells[0].gain == {"m0": -0.25, "m1": 0.0, "m2": 0.25}


def test_the_command(files, capsys):
    results, scores = files
    assert main(["creditbench", "--predict", str(results), "--scores", str(scores)]) == 0
    printed = capsys.readouterr().out
    assert "note: one: no scores of m3" in printed
    assert "τ, held out" in printed
    wrong = results.with_name("wrong.json")
    wrong.write_text('{"cells": {"one": {"family": "chains", "scores": {}}}}')
    for arguments, message in (
        (["--predict", str(results)], "--predict RESULTS needs --scores, and"),
        (
            ["--predict", str(wrong), "--scores", str(scores)],
            "wrong.json: holds no gains; expected results.json of tools",
        ),
        (["--predict", "nowhere.json", "--scores", str(scores)], "nowhere.json: cannot be read as JSON"),
        (["--iteration", "3"], "expected --run with it"),
    ):
        assert main(["creditbench", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_attribution_is_judged_as_its_recipe_has_it():
    methods = {m.name: m for m in METHODS}
    assert not methods["attribution"].overrides
    assert not methods["leave_one_out"].overrides
