"""A method of one's own: which cells it gets, what is said of its baseline, verdicts by hand, and the command."""

import argparse
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import creditgraph.testing
from creditgraph.components.advantage.group import GroupAdvantage
from creditgraph.lab.bench.methods import METHODS, TURNS, Method
from creditgraph.lab.commands import evidence
from creditgraph.lab.evidence.controls import OracleTurns, in_thought
from creditgraph.lab.evidence.declaration import DECLARED, Cell, Declaration, Entry, Family, read_declaration
from creditgraph.lab.evidence.measure import forget
from creditgraph.lab.evidence.trial import CODES, is_of_turns, judge, run_name, trial, trial_text, unfair
from creditgraph.lab.evidence.verdicts import Results
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged

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
        "old": cell("a", 100, grpo, withdrawn="It says nothing."),
        "b": cell("b", 700, grpo),
        "turns": cell("b", 50, Entry(recipe="toy_grpo_thoughts")),
    }
    recipe = {f: Cell(title="A.", family=f, regime="", tokens=300, methods={"grpo": grpo}) for f in "ab"}
    families = {f: Family(title=f, settings=(f"data={f}",)) for f in "ab"}
    return Declaration(families=families, cells=cells, claims={}, recipe=recipe)


def test_in_full_each_family_has_the_budget_of_its_shortest_cell_of_plain_grpo():
    own = trial(declared(), MINE, KNOWN["grpo_4_steps"], full=True)
    assert {name: (c.family, c.tokens) for name, c in own.cells.items()} == {"small": ("a", 500), "b": ("b", 700)}
    small = own.cells["small"]
    assert (small.rates, small.seeds, small.every) == ((1e-5, 1e-4), 4, 3)
    assert small.methods == {
        "grpo_4_steps": Entry(recipe="toy_grpo", set=("learner.minibatches=4",)),
        "mine_prompts.batch_8": Entry(recipe="mine", set=("prompts.batch=8",), baseline="grpo_4_steps"),
    }
    assert list(trial(declared(), MINE, TURNS[0], full=True, turns=True).cells) == ["turns"]
    with pytest.raises(ConfigError, match="toy_grpo is its own baseline; name another"):
        trial(declared(), Method("toy_grpo", "toy_grpo"), KNOWN["grpo"])


def test_in_short_two_families_have_controls():
    own = trial(declared(), MINE, KNOWN["grpo"])
    assert list(own.cells) == ["a", "b"]
    assert list(own.cells["a"].methods) == ["grpo", "oracle", "flipped", "mine_prompts.batch_8"]
    four = trial(declared(), MINE, KNOWN["grpo_4_steps"]).cells["a"]
    assert {n: four.baseline_of(n) for n in four.methods} == {
        "grpo": "", "oracle": "grpo", "flipped": "grpo", "grpo_4_steps": "grpo", "mine_prompts.batch_8": "grpo_4_steps",
    }  # fmt: skip


def test_the_shipped_declaration_has_both_forms():
    declaration = read_declaration(DECLARED)
    short = trial(declaration, KNOWN["rrpo"], KNOWN["grpo"])
    assert len({c.family for c in short.cells.values()}) == 2
    assert all(c.methods["oracle"].rate == c.methods["flipped"].rate > 0 for c in short.cells.values())
    full = {c.family for c in trial(declaration, KNOWN["rrpo"], KNOWN["grpo"], full=True).cells.values()}
    assert len(full) == 10
    assert "chains_reset" in full
    turns = Method("x", "toy_gigpo_thoughts")
    assert is_of_turns(turns)
    (short,) = trial(declaration, turns, TURNS[0], turns=True).cells.values()
    assert list(short.methods) == ["grpo_turns", "oracle", "flipped", "x"]
    assert not is_of_turns(KNOWN["grpo"])


def test_the_oracle_over_turns_blames_the_first_wrong_turn_alone():
    out = creditgraph.testing.batch("toy_grpo_thoughts", "sampler.group_size=8")
    names = {"trajectories": "sampler.trajectories", "turns": "sampler.turns", "rewards": "rewards.rewards"}
    parts = {name: out[port] for name, port in names.items()}
    plain, own = (cls().run(**parts).credit.advantage for cls in (GroupAdvantage, OracleTurns))
    turns, right = parts["turns"], parts["rewards"].correct.tolist()
    blamed = set()
    for row, state in enumerate(turns.state):
        ends = row + 1 == len(turns) or int(turns.turn[row + 1]) == 0
        goes_wrong = " right" in state and (ends or " wrong" in turns.state[row + 1])
        kept = right[row] or goes_wrong
        assert own.row(row).tolist() == (plain.row(row).tolist() if kept else [0.0] * len(own.row(row)))
        if not right[row] and goes_wrong:
            assert int(turns.episode[row]) not in blamed  # one turn of an episode
            blamed.add(int(turns.episode[row]))
    failed = {int(e) for e, good in zip(turns.episode, right, strict=True) if not good}
    assert blamed == failed != set()


def test_a_baseline_with_other_steps_is_named():
    assert unfair(KNOWN["rrpo"], KNOWN["grpo"]) == ""
    assert unfair(KNOWN["s_trace"], KNOWN["grpo_4_steps"]) == ""
    said = unfair(KNOWN["s_trace"], KNOWN["grpo"])
    assert said.startswith("s_trace takes other optimiser steps per batch (learner 4 × 1) than grpo (learner 1 × 1)")


def results(gain, oracle=0.2, flipped=-0.2, spread=0.01, steps=11.0):
    """The short form, in which methods gain so much in both families, more and less by `spread` with the two seeds."""
    own = trial(declared(), MINE, KNOWN["grpo"])
    gains = {"oracle": oracle, "flipped": flipped, run_name(MINE): gain}
    cells = {}
    for name in own.cells:
        rows = {"grpo": {"accuracy": [0.5, 0.5], "lr": 1e-4, "tried": {}}}
        pairs = []
        for method, more in gains.items():
            accuracies = [[0.5 + more - spread, 0.5 + more + spread], [0.5, 0.5]]
            rows[method] = {"accuracy": accuracies[0], "lr": 3e-4, "tried": {}}
            pair = {"better": method, "worse": "grpo", "axis": "tokens"}
            pairs.append(pair | {"accuracies": accuracies, "took": {"steps": [steps, 12.0]}})
        cells[name] = {"digest": own.digest(name), "methods": rows, "pairs": pairs}
    return Results(own, cells)


def test_verdicts_by_hand():
    # Of each family a deviation of .0141 of two: error .01, of the mean of both .0071, with two degrees of freedom
    # t(.975) = 4.303 and t(.95) = 2.920: 95 % within ± .030, 90 % within ± .021.
    assert judge(results(0.04), MINE).word == "helps"
    assert judge(results(-0.04), MINE).word == "hurts"
    assert judge(results(0.005), MINE).word == "no difference above .03"
    noisy = judge(results(0.02), MINE)
    assert (noisy.word, noisy.result.pairs) == ("too noisy", 4)
    assert "a difference of 0.0" in noisy.reason
    for wrong, control in (({"oracle": 0.02}, "oracle"), ({"flipped": 0.0}, "flipped"), ({"steps": 1.0}, "oracle")):
        found = judge(results(0.04, **wrong), MINE)
        assert found.word == "too noisy"
        assert f"the control {control} is not seen" in found.reason
    assert len(set(CODES.values())) == 4
    assert not {1, 2} & set(CODES.values())


def test_the_text_by_hand():
    text = re.sub(" +", " ", trial_text(results(0.2), MINE, KNOWN["grpo"]))
    row = "0.500 ± 0.000 at 0.0001 | 0.700 ± 0.014 at 0.0003 | +0.200 [+0.073, +0.327] | 12 and 11 |"
    assert f"| a | mine_prompts.batch_8 | {row}" in text
    assert text.endswith(
        "mine,prompts.batch=8 against grpo: helps: +0.200 [+0.170, +0.230], with seeds within families as the units."
    )
    assert trial_text(Results(trial(declared(), MINE, KNOWN["grpo"]), {}), MINE, KNOWN["grpo"]) == "Not measured yet."


def test_the_positive_control_blames_one_thought():
    tokens = Jagged.from_rows([[1, 1, 1, 1, 1], [1, 1, 1], [1, 1]], torch.int32)
    ends = Jagged.from_rows([[2, 3, 5], [1, 3], []], torch.int32)
    rows = SimpleNamespace(response_tokens=tokens, thought_ends=ends)
    inside = tokens.with_values(in_thought(rows, torch.tensor([2, 2, 1]))).to_lists()
    # Thoughts of 2, 1 and 2 tokens, of 1 and 2, and a response without thoughts, which counts as one.
    assert inside == [[False, False, True, False, False], [False, True, True], [True, True]]


def test_the_runs_of_one_method_are_forgotten(tmp_path):
    names = ["grpo-aaaaaa-lr1-s0", "mine-bbbbbb-lr1-s0", "mine_2-bbbbbb-lr1-s0"]
    for part in ("sweep", "runs"):
        for name in names:
            (tmp_path / "small" / part / name).mkdir(parents=True)
    forget(tmp_path, ["small"], run_name(replace(MINE, name="mine")))
    assert sorted(p.name for p in (tmp_path / "small").glob("*/*")) == sorted([names[0], names[2]] * 2)
    forget(tmp_path, ["small"])
    assert not list(tmp_path.iterdir())


def called(*arguments):
    parser = argparse.ArgumentParser()
    evidence.configure(parser)
    return evidence.main(parser.parse_args(arguments))


def test_mistakes_and_the_estimate(tmp_path, capsys):
    for arguments, text in (
        (["learner.minibatches=4"], "expected recipe=NAME"),
        (["recipe=toy_gpro"], "no recipe 'toy_gpro'. Did you mean"),
        (["recipe=toy_grpo"], "toy_grpo is its own baseline"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            called(*arguments)
    assert called("recipe=toy_rrpo", "--estimate", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    # Each family: 3 rates · 4 seeds of the method, and 6 fresh runs of each of four methods, at 9 s.
    assert re.findall(r"(\w+) +(\d+) s\n", out) == [("chains", "324"), ("chains_many", "324")]
