"""tools/evidence: the shipped declaration composes and keeps its own rules, and one small cell takes every stage."""

import subprocess
import sys
from pathlib import Path

import pytest

from creditgraph.lab.bench.methods import Method
from creditgraph.lab.evidence.declaration import rated, read_declaration
from creditgraph.lab.evidence.trial import trial
from creditgraph.lab.evidence.verdicts import Results, read_results
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "evidence"
DECLARED = read_declaration(ROOT / "tools" / "evidence.yaml")
CELLS = DECLARED.cells | DECLARED.quick


def clamp(node):
    return getattr(node.config.objective.build().config, "min_advantage", None)


@pytest.mark.parametrize("name", CELLS)
def test_every_method_composes_and_has_a_fair_baseline(name):
    cell = CELLS[name]
    learners = {}
    for method, entry in cell.methods.items():
        settings = DECLARED.settings(name, sweep=True)
        overrides = rated(method, entry, 1e-4, settings).overridden(*settings)
        experiment = build_experiment(compose(overrides), method)
        (learners[method],) = [node for node in experiment.graph.nodes if node.name == "learner"]
        assert experiment.data["eval"]["split"] == "validation"
    for method, entry in cell.methods.items():
        if entry.baseline:
            own, base = learners[method].config, learners[entry.baseline].config
            assert (own.minibatches, own.epochs) == (base.minibatches, base.epochs), method
            assert clamp(learners[method]) == clamp(learners[entry.baseline]), method


def test_sweeps_have_three_rates_and_claims_eight_seeds():
    for name, cell in DECLARED.cells.items():
        assert len(cell.rates) >= 3, name
        assert len(cell.sweep_seeds) >= 2, name
        assert cell.seeds >= 8, name


def test_every_page_of_a_method_has_its_claims():
    pages = {claim.page for claim in DECLARED.claims.values()}
    shown = {p.stem for p in (ROOT / "docs" / "papers").glob("*.md") if "<!-- evidence -->" in p.read_text()}
    assert pages == shown


def test_the_results_are_of_declared_cells():
    cells = read_results(ROOT / "docs" / "evidence" / "results.json")
    assert set(cells) <= set(DECLARED.cells)
    assert set(Results(DECLARED, cells).cells) == set(cells), "measured in another form: run tools/evidence --cells …"


def test_estimate_and_mistakes(tmp_path):
    done = subprocess.run([TOOL, "--estimate", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*DECLARED.cells, "in"]
    done = subprocess.run([TOOL, "--cells", "trace", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "evidence: no cell 'trace'. Did you mean 'traces'?" in done.stderr
    for options, text in (
        (["--recipe", "rredcot", "--scores"], "--recipe goes with neither --quick nor --scores"),
        (["--against", "rredcot"], "--against is the baseline of a recipe; name it with --recipe"),
    ):
        done = subprocess.run([TOOL, *options, "--out", tmp_path], capture_output=True, text=True)
        assert done.returncode == 1
        assert text in done.stderr


def test_a_recipe_of_ones_own_has_eight_families():
    grpo, other = (Method(recipe, recipe) for recipe in ("toy_grpo", "toy_rrpo"))
    own = trial(DECLARED, other, grpo)
    assert len({cell.family for cell in own.cells.values()}) == len(own.cells) == 8  # as the pages say


def test_quick_takes_every_stage_and_a_run_is_that_of_the_command(tmp_path):
    done = subprocess.run([TOOL, "--quick", "--jobs", "1", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entry = read_results(tmp_path / "results.json")["quick"]
    assert entry["failed"] == {}
    assert [len(row["tried"]) for row in entry["methods"].values()] == [2, 2]
    assert [row["seeds"] for row in entry["methods"].values()] == [[0, 1], [0, 1]]
    rate = entry["methods"]["grpo"]["lr"]
    settings = DECLARED.settings("quick")
    method = rated("grpo", DECLARED.quick["quick"].methods["grpo"], rate, settings)
    run = tmp_path / "quick" / "runs" / f"{method.name}-s1"
    iterations = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()) + 1
    alone = method.overridden(*settings, "run.seed=1", f"run.root={tmp_path}", "run.name=alone")
    command = [sys.executable, "-m", "creditgraph", "train", *alone, f"run.iterations={iterations}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = f"checkpoints/{iterations - 1:06d}/tensors.safetensors"
    assert (run / last).read_bytes() == (tmp_path / "alone" / last).read_bytes()


DECLARATION = """\
families:
  one: {title: One, settings: [data=chains_one, prompts.batch=4, data.train.size=40, data.eval.size=20]}
  two: {title: Two, settings: [data=chains, prompts.batch=4, data.train.size=40, data.eval.size=20]}
claims: {}
cells:
  a: &cell
    {title: A., family: one, regime: "", tokens: 6000, every: 9, rates: [1.0e-4, 3.0e-4], sweep_seeds: [100], seeds: 2,
     widenings: 0, methods: {grpo: {recipe: toy_grpo}}}
  b: {<<: *cell, family: two}
"""
RECIPE = """\
# @package _global_
defaults: [/graph: grpo, /setup: toy]
nodes: {advantage: {use: "ideas:Mine"}}
"""
IDEA = '''\
from creditgraph.components.advantage.group import GroupAdvantage


class Mine(GroupAdvantage):
    """Group advantage."""
'''


def test_a_recipe_of_ones_own_in_every_family(tmp_path):
    (tmp_path / "cells.yaml").write_text(DECLARATION)
    (tmp_path / "ideas.py").write_text(IDEA)
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "pipeline").mkdir()  # the user's; the runs have ours
    (tmp_path / "pipeline" / "__init__.py").write_text("raise RuntimeError('not of creditgraph')\n")
    (tmp_path / "configs" / "recipe" / "mine.yaml").write_text(RECIPE)
    command = [TOOL, "--declaration", "cells.yaml", "--out", "runs", "--config-dir", "configs", "--recipe", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # The same method under another name: the same numbers in both families.
    assert "mine is ahead of grpo in 0 of 2 families; mean of families +0.000 [+0.000, +0.000]" in done.stdout
    assert sorted(read_results(tmp_path / "runs" / "mine.json")) == ["a", "b"]
    done = subprocess.run([*command, "--again", "--cells", "a"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mine-" in done.stderr
    assert "grpo-" not in done.stderr  # the baseline's runs are kept
