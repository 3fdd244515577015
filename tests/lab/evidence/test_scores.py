"""Scores of the methods of measured cells: which commands are run, and what is read from their results."""

import argparse
import json

import pytest

from creditgraph.lab.commands import creditbench
from creditgraph.lab.evidence.declaration import Cell, Declaration, Entry, Family
from creditgraph.lab.evidence.measure import Lab
from creditgraph.lab.evidence.scores import ScoreBench
from creditgraph.lab.prediction.cells import read_cells
from creditgraph.pipeline.core.errors import DataError

METHODS = {"grpo": Entry(recipe="toy_grpo"), "small": Entry(recipe="toy_grpo", set=("prompts.batch=4",))}
OTHER = {"grpo": Entry(recipe="toy_grpo"), "four": Entry(recipe="toy_srpo", set=("expander.suffixes=4",))}


def declared():
    common = {"title": "A cell.", "regime": "any", "tokens": 100.0}
    cells = {
        "one": Cell(family="chains", methods=METHODS, **common),
        "two": Cell(family="chains", methods=OTHER, **common),
        "turns": Cell(family="thoughts", methods={"grpo": Entry(recipe="toy_grpo_thoughts")}, **common),
        "open": Cell(family="chains", methods={"new": Entry(recipe="toy_rredcot")}, **common),
    }
    families = {n: Family(title="Chains", settings=("data=chains",)) for n in ("chains", "thoughts")}
    return Declaration(families=families, cells=cells, claims={})


def measured(cell, rate=1e-4):
    row = {"lr": rate, "seeds": [0], "accuracy": [0.5], "start": [0.2]}
    return {"methods": dict.fromkeys(declared().cells[cell].methods, row)}


class Commands:
    """Writes what creditbench would: a Pearson correlation of .1 times the length of the method's text."""

    def __init__(self, broken=""):
        self.seen, self.broken = {}, broken
        self.parser = argparse.ArgumentParser()
        creditbench.configure(self.parser)

    def __call__(self, arguments, log):
        assert arguments[0] == "creditbench"
        options = self.parser.parse_args(arguments[1:])
        state = f"{options.output.parents[2].name}/{options.output.parent.name}"
        self.seen[state] = options
        if state == self.broken:
            return 1
        entry = {"gradient": dict.fromkeys(("cosine", "tokens", "steps", "noise", "signal"), (None, None))}
        methods = {m: {"mean": {"pearson": (0.1 * len(m), 0), "bias": (-0.5, 0)}, **entry} for m in options.methods}
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "result.json").write_text(json.dumps({"methods": methods}))
        return 0


def trained(plan, methods, seeds):
    """A policy with nine checkpoints."""
    for method in methods:
        for iteration in range(9):
            (plan.folder / plan.name(method, 0) / "checkpoints" / f"{iteration:06d}").mkdir(parents=True, exist_ok=True)
    return {}


def bench(tmp_path, launch, cells=("one", "two", "turns"), rate=1e-4):
    lab = Lab(declaration=declared(), folder=tmp_path, train=trained)
    results = {name: measured(name, rate) for name in cells}
    return ScoreBench(lab=lab, results=results, launch=launch, jobs=1, say=lambda text: None)


def test_a_family_is_judged_once_per_state_with_the_methods_of_its_measured_cells(tmp_path):
    launch = Commands()
    scores, failed = bench(tmp_path, launch).measure(["one", "two", "turns", "open"])
    assert not failed
    assert sorted(launch.seen) == [f"{f}/{s}" for f in ("chains", "thoughts") for s in ("start", "third", "two_thirds")]
    start, third = launch.seen["chains/start"], launch.seen["chains/third"]
    # A batch of four prompts is no other credit, so it is judged with the others' batch, once.
    assert start.methods == ["toy_grpo", "toy_srpo,expander.suffixes=4"]
    assert (start.run, start.suite) == (None, "responses")
    assert launch.seen["thoughts/start"].suite == "turns"
    # Of nine checkpoints, those after three and six iterations.
    assert (third.iteration, launch.seen["chains/two_thirds"].iteration) == (2, 5)
    assert third.run.name.startswith("grpo-")
    assert set(scores) == {"one", "two", "turns"}
    assert scores["two"]["scores"]["third"]["four"] == {"pearson": pytest.approx(2.8), "|bias|": 0.5}
    assert scores["one"]["scores"]["start"]["small"] == scores["one"]["scores"]["start"]["grpo"]


def test_what_failed_is_said_and_done_again_alone(tmp_path):
    launch = Commands(broken="chains/third")
    scores, failed = bench(tmp_path, launch, ["one"]).measure(["one"])
    (policy,) = (tmp_path / "scores" / "chains").glob("grpo-*")
    log = policy.with_name(f"credit-{policy.name}") / "third" / "0.log"
    assert failed == [f"chains, third: no scores of any method, see {log}"]
    assert set(scores["one"]["scores"]) == {"start", "two_thirds"}
    again = Commands()
    _, failed = bench(tmp_path, again, ["one"]).measure(["one"])
    assert (list(again.seen), failed) == (["chains/third"], [])


def test_another_cell_of_a_family_has_its_new_methods_judged_with_the_same_policy(tmp_path):
    first, more = Commands(), Commands()
    before, _ = bench(tmp_path, first, ["one"]).measure(["one"])
    scores, _ = bench(tmp_path, more, ["one", "two"]).measure(["two"])
    assert list(more.seen) == ["chains/start", "chains/third", "chains/two_thirds"]
    assert more.seen["chains/third"].methods == ["toy_srpo,expander.suffixes=4"]
    assert more.seen["chains/third"].run == first.seen["chains/third"].run
    assert set(scores["two"]["scores"]["start"]) == {"grpo", "four"}
    assert scores["one"] == before["one"]


def test_another_policy_of_a_family_has_all_methods_judged_again(tmp_path):
    first, again = Commands(), Commands()
    bench(tmp_path, first, ["one"]).measure(["one"])
    bench(tmp_path, again, ["one"], rate=3e-4).measure(["one"])
    assert [options.methods for options in again.seen.values()] == [o.methods for o in first.seen.values()]
    assert again.seen["chains/third"].run != first.seen["chains/third"].run


def test_the_file_of_scores_is_what_the_study_reads(tmp_path):
    scores, _ = bench(tmp_path, Commands()).measure(["one", "two", "turns"])
    files = tmp_path / "results.json", tmp_path / "scores.json"
    files[0].write_text(json.dumps({"cells": {name: measured(name) for name in scores} | {"open": measured("open")}}))
    files[1].write_text(json.dumps({"cells": scores}))
    cells, notes = read_cells([files[0]], files[1])
    assert [cell.family for cell in cells] == ["chains", "chains", "thoughts"]
    assert cells[1].scores["four"]["pearson@two_thirds"] == pytest.approx(2.8)
    assert cells[1].gain == {"grpo": pytest.approx(0.3), "four": pytest.approx(0.3)}
    assert len(notes) == 1
    assert "open" in notes[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": {"one": {"methods": {}}}}', "{}"])
def test_a_file_that_holds_no_scores_is_named(tmp_path, text):
    files = tmp_path / "results.json", tmp_path / "scores.json"
    files[0].write_text(json.dumps({"cells": {"one": measured("one")}}))
    files[1].write_text(text)
    with pytest.raises(DataError, match=r"scores.json: .*expected"):
        read_cells([files[0]], files[1])
