"""tools/evidence: the shipped declaration composes and keeps its own rules, and one small cell takes every stage."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from creditgraph.lab.evidence.declaration import DECLARED as DECLARATION_FILE
from creditgraph.lab.evidence.declaration import Point, rated, read_declaration
from creditgraph.lab.evidence.measure import Lab
from creditgraph.lab.evidence.verdicts import Results, read_results
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "evidence"
DECLARED = read_declaration(DECLARATION_FILE)
CELLS = DECLARED.cells | DECLARED.quick
LAB = Lab(declaration=DECLARED, folder=Path("runs"), train=lambda plan, methods, seeds: {})


def clamp(node):
    return getattr(node.config.objective.build().config, "min_advantage", None)


@pytest.mark.parametrize("name", CELLS)
def test_every_method_composes_and_has_a_fair_baseline(name):
    cell = CELLS[name]
    learners = {}
    for method in cell.methods:
        settings = LAB.settings(name, sweep=True)
        point = Point(1e-4, min(cell.batches, default=0))
        overrides = rated(method, cell, point, settings).overridden(*settings)
        experiment = build_experiment(compose(overrides), method)
        (learners[method],) = [node for node in experiment.graph.nodes if node.name == "learner"]
        assert experiment.data["eval"]["split"] == "validation"
    for method, entry in cell.methods.items():
        if entry.baseline:
            own, base = learners[method].config, learners[entry.baseline].config
            assert (own.minibatches, own.epochs) == (base.minibatches, base.epochs), method
            assert clamp(learners[method]) == clamp(learners[entry.baseline]), method


def test_no_cell_has_a_rule_of_its_own():
    for name, cell in DECLARED.cells.items():
        assert len(cell.rates) >= 3, name
        assert len(cell.sweep_seeds) in (4, 8), name
        assert cell.seeds >= 8, name
        assert cell.widenings == 2 or cell.withdrawn, name


def test_every_paper_has_one_primary_claim():
    testable = {claim.paper for claim in DECLARED.claims.values() if not claim.untestable}
    assert testable == {claim.paper for claim in DECLARED.claims.values() if claim.primary}


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)


def test_results_name_commits_that_exist_and_claims_come_before_them():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the history of a repository")
    for name, entry in read_results(ROOT / "docs" / "evidence" / "results.json").items():
        assert not git("cat-file", "-e", f"{entry['commit']}^{{commit}}").returncode, name
        # The declaration has been elsewhere, and a cell has had another name.
        files = (DECLARATION_FILE.relative_to(ROOT), "tools/evidence.yaml")
        text = next(t for file in files if (t := git("show", f"{entry['commit']}:{file}").stdout))
        known = yaml.safe_load(text)["claims"]
        assert set(entry["claims"]) <= set(known), name


def test_another_model_has_the_rates_that_were_best_with_the_first():
    cells, seen = read_results(ROOT / "docs" / "evidence" / "results.json"), 0
    for name, cell in DECLARED.cells.items():
        first, _, number = name.partition("_model_")
        if number and first in cells:
            for method, entry in cell.methods.items():
                assert entry.rate == cells[first]["methods"][method]["lr"], (name, method)
                seen += 1
    assert seen == 20


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
    left = [name for name, cell in DECLARED.cells.items() if not cell.withdrawn]
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*left, "in"]
    done = subprocess.run([TOOL, "--cells", "trace", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert "evidence: no cell 'trace'. Did you mean 'traces'?" in done.stderr


def test_quick_takes_every_stage_and_a_run_is_that_of_the_command(tmp_path):
    done = subprocess.run([TOOL, "--quick", "--jobs", "1", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entry = read_results(tmp_path / "results.json")["quick"]
    assert entry["failed"] == {}
    assert [len(row["tried"]) for row in entry["methods"].values()] == [2, 2]
    assert [row["seeds"] for row in entry["methods"].values()] == [[0, 1], [0, 1]]
    rate = entry["methods"]["grpo"]["lr"]
    settings = DECLARED.settings("quick")
    method = rated("grpo", DECLARED.quick["quick"], Point(rate), settings)
    run = tmp_path / "quick" / "runs" / f"{method.name}-s1"
    iterations = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()) + 1
    alone = method.overridden(*settings, "run.seed=1", f"run.root={tmp_path}", "run.name=alone")
    command = [sys.executable, "-m", "creditgraph", "train", *alone, f"run.iterations={iterations}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = f"checkpoints/{iterations - 1:06d}/tensors.safetensors"
    assert (run / last).read_bytes() == (tmp_path / "alone" / last).read_bytes()
