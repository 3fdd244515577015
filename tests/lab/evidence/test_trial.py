"""A method of one's own on the test bed: which cells it gets, what is said of its baseline, and the text by hand."""

import re
from dataclasses import replace

import pytest

from creditgraph.lab.bench.methods import METHODS, Method
from creditgraph.lab.evidence.declaration import Cell, Declaration, Entry, Family
from creditgraph.lab.evidence.measure import forget
from creditgraph.lab.evidence.trial import run_name, trial, trial_text, unfair
from creditgraph.lab.evidence.verdicts import Results
from creditgraph.pipeline.core.errors import ConfigError

KNOWN = {method.name: method for method in METHODS}
MINE = Method("mine,prompts.batch=8", "mine", ("prompts.batch=8",))


def cell(family, tokens, *methods, **more):
    entries = {f"m{i}": method for i, method in enumerate(methods)}
    return Cell(title="A.", family=family, regime="", tokens=tokens, methods=entries, **more)


def declared():
    grpo, other = Entry(recipe="toy_grpo"), Entry(recipe="toy_rrpo")
    cells = {
        "large": cell("a", 900, grpo, other),
        "small": cell("a", 500, grpo, other, rates=(1e-5, 1e-4), seeds=4, every=3),
        "other first": cell("a", 100, other, grpo),
        "settings": cell("a", 100, Entry(recipe="toy_grpo", set=("prompts.batch=4",))),
        "cell settings": cell("b", 100, grpo, set=("prompts.batch=4",)),
        "b": cell("b", 700, grpo),
    }
    return Declaration(families={f: Family(title=f, settings=(f"data={f}",)) for f in "ab"}, cells=cells, claims={})


def test_each_family_has_the_budget_of_its_shortest_cell_of_plain_grpo():
    own = trial(declared(), MINE, KNOWN["grpo_4_steps"])
    assert {name: (c.family, c.tokens) for name, c in own.cells.items()} == {"small": ("a", 500), "b": ("b", 700)}
    small = own.cells["small"]
    assert (small.rates, small.seeds, small.every) == ((1e-5, 1e-4), 4, 3)
    assert small.methods == {
        "grpo_4_steps": Entry(recipe="toy_grpo", set=("learner.minibatches=4",)),
        "mine_prompts.batch_8": Entry(recipe="mine", set=("prompts.batch=8",), baseline="grpo_4_steps"),
    }
    with pytest.raises(ConfigError, match="--recipe toy_grpo is its own baseline; name another"):
        trial(declared(), Method("toy_grpo", "toy_grpo"), KNOWN["grpo"])


def test_a_baseline_with_other_steps_is_named():
    assert unfair(KNOWN["rrpo"], KNOWN["grpo"]) == ""
    assert unfair(KNOWN["s_trace"], KNOWN["grpo_4_steps"]) == ""
    said = unfair(KNOWN["s_trace"], KNOWN["grpo"])
    assert said.startswith("s_trace takes other optimiser steps per batch (learner 4 × 1) than grpo (learner 1 × 1)")


def results(own, gains, fewest=9.0):
    """Cell → entry in which mine gains so much over the baseline, with both of two seeds."""
    base, mine = "grpo", run_name(MINE)
    cells = {}
    for name, gain in gains.items():
        rows = {base: {"accuracy": [0.5, 0.5], "lr": 1e-4}, mine: {"accuracy": [0.5 + gain] * 2, "lr": 3e-4}}
        pair = {"better": mine, "worse": base, "axis": "tokens", "fewest_steps": [fewest, 9.0]}
        pair |= {"accuracies": [[0.5 + gain] * 2, [0.5] * 2], "took": {"steps": [11.0, 12.0]}}
        cells[name] = {"digest": own.digest(name), "methods": rows, "pairs": [pair]}
    return Results(own, cells)


def cells(text):
    """A table without what aligns its columns."""
    return re.sub(" +", " ", text)


def test_the_text_by_hand():
    own = trial(declared(), MINE, KNOWN["grpo"])
    text = cells(trial_text(results(own, {"small": 0.2, "b": -0.1}), MINE, KNOWN["grpo"]))
    row = "0.500 ± 0.000 at 0.0001 | 0.700 ± 0.000 at 0.0003 | +0.200 [+0.200, +0.200] | 0.000 | 12 and 11 |"
    assert f"| a | 500 | {row}" in text
    # t(.975, 1) = 12.706, and the deviation of .2 and −.1 over √2 is .15.
    assert text.endswith(
        "mine prompts.batch=8 is ahead of grpo in 1 of 2 families; mean of families +0.050 [-1.856, +1.956], "
        "with families as the units."
    )
    slow = trial_text(results(own, {"small": 0.2}, fewest=1.0), MINE, KNOWN["grpo"])
    assert "not ranked: fewer than two optimiser steps" in slow
    assert "ahead" not in slow
    assert trial_text(Results(own, {}), MINE, KNOWN["grpo"]) == "Not measured yet."
    failed = results(own, {"b": 0.1})
    failed.cells["b"] = {"methods": {"grpo": failed.cells["b"]["methods"]["grpo"]}, "pairs": []}
    text = cells(trial_text(failed, MINE, KNOWN["grpo"]))
    assert "| b | 700 | 0.500 ± 0.000 at 0.0001 | failed | – | – | – |" in text


def test_the_runs_of_one_method_are_forgotten(tmp_path):
    names = ["grpo-aaaaaa-lr1-s0", "mine-bbbbbb-lr1-s0", "mine_2-bbbbbb-lr1-s0"]
    for part in ("sweep", "runs"):
        for name in names:
            (tmp_path / "small" / part / name).mkdir(parents=True)
    forget(tmp_path, ["small"], run_name(replace(MINE, name="mine")))
    assert sorted(p.name for p in (tmp_path / "small").glob("*/*")) == sorted([names[0], names[2]] * 2)
    forget(tmp_path, ["small"])
    assert not list(tmp_path.iterdir())
