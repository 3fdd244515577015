"""Studies of the CPI laboratory: slopes, label curves, checks of bounds, and the tool."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from creditgraph.lab.cpi.bounds import loglog_slope
from creditgraph.lab.cpi.checks import check_bound, check_sampled, count_better, count_checks
from creditgraph.lab.cpi.families import FAMILIES, needle, random_shape, uniform_policy
from creditgraph.lab.cpi.iteration import exact_step
from creditgraph.lab.cpi.report import crossing, measure, table
from creditgraph.lab.cpi.study import label_curve, localiser_curve, sweep, tau_slopes

ROOT = Path(__file__).resolve().parents[2]


def generator(seed=0):
    return np.random.default_rng(seed)


def test_slope_by_hand():
    # y = 3 x² exactly; then log-log points (0,0), (1,1), (2,1): slope (1·1)/(1+0+1) = .5, residuals (−1/6, 1/3, −1/6),
    # SSE = 1/6, s.e. = √(1/6/1/2) = .288675
    x = np.array([0.1, 1.0, 5.0])
    assert loglog_slope(x, 3 * x**2).value == pytest.approx(2)
    slope = loglog_slope(np.exp([0.0, 1.0, 2.0]), np.exp([0.0, 1.0, 1.0]))
    assert (slope.value, slope.error) == (pytest.approx(0.5), pytest.approx(0.2886751))
    with pytest.raises(ValueError, match="at least 3 positive points, got 2"):
        loglog_slope(x[:2], x[:2])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_improvement_slopes(name):
    for seed in range(3):
        shape = random_shape(generator(seed))
        swept = sweep(FAMILIES[name], shape, np.geomspace(5e-4, 0.12, 6))
        assert swept.p.max() / swept.p.min() > 100
        assert (swept.level >= swept.tau).all()
        tolerance = 1e-6 if name == "needle" else 0.25
        slopes, pure = swept.slopes(), swept.slopes(at_level=True)
        assert slopes["rr"].value == pytest.approx(2, abs=tolerance)
        assert slopes["caro"].value == pytest.approx(1, abs=tolerance)
        assert (pure["rr"].value, pure["caro"].value) == (pytest.approx(2, abs=0.01), pytest.approx(1, abs=0.01))
        of_tau = tau_slopes(FAMILIES[name], shape, 0.01, np.geomspace(0.02, 0.35, 4))
        assert (of_tau["rr"].value, of_tau["caro"].value) == (pytest.approx(2, abs=0.03), pytest.approx(2, abs=0.03))


def test_needle_has_the_closed_form_share_of_hard_states():
    shape = random_shape(generator(0))
    swept = sweep(needle, shape, np.array([0.01, 0.05, 0.1]))
    np.testing.assert_allclose(swept.p, (1 - (1 - swept.knobs) ** shape.horizon) / shape.horizon)
    # Uniform π over A actions: the best advantage is 2 gap (1 − 1/A), so with A = num_actions nothing depends on the
    # knob.
    np.testing.assert_allclose(swept.level, 2 * shape.gap * (1 - 1 / shape.num_actions))


def test_label_slopes_on_a_quick_setting():
    shape = random_shape(generator(0))
    swept = sweep(needle, shape, np.geomspace(5e-4, 0.12, 5))
    curve = label_curve(needle, shape, swept, generator(1), repeats=80)
    random, oracle = (loglog_slope(swept.p, curve.labels[k]["step"]).value for k in ("rr", "caro"))
    assert random == pytest.approx(-2, abs=0.3)
    assert oracle == pytest.approx(0, abs=0.2)
    assert loglog_slope(swept.p, curve.draws).value == pytest.approx(-1, abs=0.2)
    # Learning the right action alone needs about 1/p labels: markedly fewer than knowing the step size.
    assert loglog_slope(swept.p, curve.labels["rr"]["greedy"]).value > -1.6


def test_bounds_hold_on_random_mdps_and_the_check_can_fail():
    parts = [check_bound(generator(seed), 6) for seed in range(12)]
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    counts = count_checks(rows)
    for name, row in counts.items():
        assert row["num"] == 72
        assert row["violations_sure"] == row["violations_fit"] == 0, name
        assert row["min_ratio_sure"] >= 1
        if name.endswith("exact"):
            assert row["violations"] == 0
            assert row["num_fit"] == 72
    # Without conservatism a bad target loses return, so the step size is what keeps the bound.
    assert sum(row["full_step_loses"] for row in counts.values()) > 0
    planted = dict(rows, gain_oracle_exact=rows["bound_oracle"] * 0.5)
    assert count_checks(planted)["oracle/exact"]["violations"] > 60
    better = count_better(rows)
    assert better["agree_bounds"] == 1
    assert 0 < better["num_claimed"] < better["num"]


def test_localised_gain_breaks_even_at_twice_p():
    # With the step sizes of the reading, exact gains are α H 𝔸 to first order: p̂ 𝔸̂²/(4 H R_max) against 𝔸²/(2 H
    # R_max), so (1−β)γ τ² p/4 against τ² p²/2 where only 𝒢 has an advantage, and they meet at (1−β)γ = 2 p.
    x, y = localiser_curve(needle, random_shape(generator(0)), 0.05, np.geomspace(0.01, 1, 7))
    np.testing.assert_allclose(y, x / 2, rtol=1e-6)
    assert crossing(x, y) == pytest.approx(2)
    # With CARO's step size for random resets too, they would meet at (1−β)γ = p.
    mdp = needle(random_shape(generator(0)), 0.05)
    usual = exact_step(mdp, uniform_policy(mdp))
    halved = exact_step(mdp, uniform_policy(mdp), alpha=usual.alpha / 2)
    np.testing.assert_allclose(usual.improvement / halved.improvement, 2, rtol=1e-6)


def test_sampled_iterations_mostly_reach_the_bound():
    few, many = check_sampled(generator(0), 8, 8), check_sampled(generator(0), 8, 4096)
    for name in ("rr", "oracle", "localiser"):
        reached = [(rows[f"gain_{name}"] >= rows[f"bound_{name}"]).mean() for rows in (few, many)]
        assert reached[1] >= reached[0]
        assert reached[1] > 0.8


def test_same_seed_same_result():
    def generators(seed, purpose):
        return np.random.default_rng([seed, len(purpose)])

    results = [measure([0], generators, knobs=3, repeats=20, num_mdps=20, sampled={32: 5}) for _ in range(2)]
    assert table(results[0]) == table(results[1])
    other = measure([1], generators, knobs=3, repeats=20, num_mdps=20, sampled={32: 5})
    assert table(other) != table(results[0])


def test_tool_writes_table_result_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cpi_lab", "--quick", "--seeds", "3", "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "tools/cpi_lab"))["main"]()
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["seeds"] == [3]
    assert (tmp_path / "table.txt").read_text() in printed
    assert result["checks"]["localiser/exact"]["violations"] == 0
    assert set(result["families"]) == set(FAMILIES)
    assert "labels over p" in (tmp_path / "table.txt").read_text()
    assert (tmp_path / "cpi_lab.png").stat().st_size > 10_000
    assert "nan" not in printed.lower()


def test_tool_refuses_too_few_knobs():
    wrong = subprocess.run(
        [sys.executable, str(ROOT / "tools/cpi_lab"), "--knobs", "2"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "expected --knobs ≥ 3" in wrong.stderr
