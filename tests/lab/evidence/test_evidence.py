"""Declarations, sweeps, verdicts and pages, on runs that are made up."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from creditgraph.lab.bench.paired import paired
from creditgraph.lab.evidence.across import across_families
from creditgraph.lab.evidence.declaration import (
    Cell,
    Claim,
    Declaration,
    Entry,
    Family,
    Point,
    best_point,
    read_declaration,
    widened,
)
from creditgraph.lab.evidence.measure import Lab, dated, forget, seconds_left, summary, wanted_pairs
from creditgraph.lab.evidence.pages import (
    NOTHING,
    across_block,
    cells_block,
    claims_block,
    costs_block,
    paper_block,
    progress_block,
    readme_block,
    withdrawn_block,
)
from creditgraph.lab.evidence.rates import rate_variance
from creditgraph.lab.evidence.verdicts import Results, _word, as_text, collapsed, read_results
from creditgraph.pipeline.core.errors import ConfigError


def entry(**settings):
    return Entry(recipe="toy_grpo", **settings)


def claim(better="good", worse="grpo", **settings):
    settings = {"cell": "small", "page": "grpo"} | settings
    expects = "none" if settings.get("untestable") else "higher"
    fixed = {"text": f"{better} wins.", "paper": "2402.03300", "source": "ours", "prediction": "ahead"}
    settings = {"expects": expects} | settings
    return Claim(better=better, worse=worse, **fixed, **settings)


def declared(**changes):
    """Three methods: `good` gains .1 over `grpo` with every seed, `same` nothing."""
    cell = {"title": "A cell.", "family": "chains", "regime": "any", "tokens": 1000, "seeds": 3, "widenings": 1}
    cell["sweep_seeds"] = (100, 101)
    cell |= {"methods": {"grpo": entry(), "good": entry(baseline="grpo"), "same": entry(baseline="grpo", seconds=7)}}
    claims = {"good": claim(), "same": claim("same"), "steps": claim(axis="steps"), "less": claim("grpo", "good")}
    claims["large"] = claim("", "", cell="", untestable="needs a GPU")
    family = Family(title="Chains", settings=("data=chains",))
    return Declaration(families={"chains": family}, cells={"small": Cell(**cell | changes)}, claims=claims)


def plain(run):
    """A run's name without the mark of its settings."""
    return re.sub("-[0-9a-f]{6}-lr", "-lr", run)


class Runs:
    """Writes metrics of runs that gain most at a rate of 4.5e-4 or 1.35e-3, and counts them."""

    def __init__(self, steps=1.0, broken=()):
        self.steps, self.broken, self.trained, self.settings = steps, broken, [], []

    def __call__(self, plan, methods, seeds):
        failed = {}
        self.settings.append(plan.overrides)
        for method in methods:
            name, _, point = plain(method.name).partition("-lr")
            rate, _, batch = point.partition("x")
            assert (f"prompts.batch={batch}" in method.overrides) == bool(batch)
            assert f"learner.optimizer.lr={rate}" in method.overrides
            assert ("data.eval.split=validation" in plan.overrides) == (min(seeds) >= 100)
            for seed in seeds:
                run = plan.name(method, seed)
                if run in plan.known or plan.is_finished(plan.curve(method, seed)):
                    continue
                if any(broken in f"{plan.folder.name}/{plain(run)}" for broken in self.broken):
                    failed[plain(run)] = f"exit code 1, see {plan.folder}/logs"
                    continue
                self.trained.append(run)
                best = 1.35e-3 if name == "good" else 4.5e-4
                gain = (
                    0.3
                    - 40 * abs(float(rate) - best)
                    + 0.1 * (name == "good")
                    + 0.001 * (seed % 2) * (name == "same")
                    - 0.01 * (batch == "8")
                )
                self.write(plan.folder / run, gain + 0.01 * seed % 1)
        return failed

    def write(self, folder, gain):
        rows = [{"iteration": i, "engine/sampled_tokens": 300.0, "learner/steps": self.steps} for i in range(4)]
        rows = [r | {"seconds/iteration": 1.0, "learner/trained_tokens": 250.0} for r in rows]
        rows = [r | {"engine/prefill_tokens": 30.0, "engine/scored_tokens": 60.0} for r in rows]
        rows[0] |= {"evaluator/accuracy": 0.2, "evaluator/sampled_tokens": 100.0, "engine/sampled_tokens": 400.0}
        rows[0] |= {"evaluator/prefill_tokens": 20.0, "engine/prefill_tokens": 50.0}
        rows.append({"iteration": 4, "evaluator/accuracy": 0.2 + 1.2 * gain})
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def measured(tmp_path, runs=None, **changes):
    declaration = declared(**changes)
    lab = Lab(declaration=declaration, folder=tmp_path, train=runs or Runs())
    return declaration, {"small": lab.measure("small")}


def test_a_family_may_be_judged_by_another_metric_than_greedy_accuracy(tmp_path):
    lab = Lab(declaration=declared(), folder=tmp_path, train=Runs())
    family = lab.declaration.families["chains"]
    # What is compared is part of a cell's form.
    other = dataclasses.replace(family, metric="evaluator/mean_at_1")
    cell = lab.cell("small")
    assert cell.digest(other) != cell.digest(family)
    lab.declaration.families["chains"] = other
    assert lab.plan("small", sweep=False).metric == "evaluator/mean_at_1"
    assert "Accuracy is `evaluator/mean_at_1`" in cells_block(Results(lab.declaration, {}))


def test_a_family_with_a_model_of_its_own(tmp_path, monkeypatch):
    lab = Lab(declaration=declared(), folder=tmp_path, train=Runs())
    family, before = lab.declaration.families["chains"], lab.declaration.digest("small")
    lab.declaration.families["chains"] = dataclasses.replace(family, warm_start="--seed 1")
    # Results with another model are not those of this cell.
    assert lab.declaration.digest("small") != before
    assert lab.plan("small", sweep=False).overrides[-1] == f"model.path={tmp_path}/models/chains"
    commands = []

    def run(command, **_):
        commands.append(command)
        Path(command[-1]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):  # the second time it is there
        lab.make_models(["small", "small"], lambda line: None)
    assert commands == [["tools/make_tiny_model", "--seed", "1", "--out", f"{tmp_path}/models/chains.part"]]


def test_a_sweep_widens_at_an_edge_and_its_best_rate_is_frozen(tmp_path):
    runs = Runs()
    _, cells = measured(tmp_path, runs)
    good, grpo = (cells["small"]["methods"][n] for n in ("good", "grpo"))
    assert list(good["tried"]) == ["5e-05", "0.00015", "0.00045", "0.00135"]
    assert (good["lr"], grpo["lr"]) == (0.00135, 0.00045)
    assert list(grpo["tried"]) == ["5e-05", "0.00015", "0.00045", "0.00135"]  # the best was at the edge at first
    fresh = [run for run in map(plain, runs.trained) if run[-4:-1] != "-s10" and not run.endswith(("s100", "s101"))]
    assert sorted(fresh) == sorted(
        [
            f"{n}-lr{r}-s{s}"
            for n, r in (("grpo", "0.00045"), ("good", "0.00135"), ("same", "0.00045"))
            for s in range(3)
        ]
    )
    done = len(runs.trained)
    assert measured(tmp_path, runs)[1] == cells  # finished runs are kept
    assert len(runs.trained) == done


def test_widening_by_hand():
    def of(rates):
        return {Point(rate): value for rate, value in rates.items()}

    assert widened(of({1e-4: 0.5, 3e-4: 0.7, 9e-4: 0.6}), 3) is None
    assert widened(of({1e-4: 0.5, 3e-4: 0.7}), 3) == pytest.approx(9e-4)
    assert widened(of({1e-4: 0.7, 3e-4: 0.7}), 3) == pytest.approx(3.33e-5)  # of equals the lower one
    assert widened(of({1e-4: 1.0, 3e-4: 0.7}), 3) is None  # nothing beyond can be better
    assert best_point({Point(3e-4, 2): 0.7, Point(1e-4, 4): 0.7, Point(1e-4, 2): 0.7}) == Point(1e-4, 2)


def test_batches_are_swept_like_rates(tmp_path):
    runs = Runs()
    _, cells = measured(tmp_path, runs, batches=(4, 8), set=("prompts.batch=16",))
    good = cells["small"]["methods"]["good"]
    assert (good["lr"], good["batch"]) == (0.00135, 4)  # 8 prompts cost .01
    assert list(good["tried"])[:2] == ["5e-05 x 4", "5e-05 x 8"]
    assert [len(values) for values in good["tried"].values()] == [2] * 8
    assert not any("prompts.batch=16" in plan for plan in runs.settings)


def test_no_method_is_tried_at_rates_of_its_own(tmp_path):
    # Only `good` is best at the edge of 1.35e-3 in the end, and all are tried there.
    _, cells = measured(tmp_path)
    assert len({tuple(row["tried"]) for row in cells["small"]["methods"].values()}) == 1


def test_a_known_rate_is_not_swept(tmp_path):
    runs = Runs()
    methods = {"grpo": entry(rate=4.5e-4), "good": entry(baseline="grpo")}
    declaration = declared(methods=methods | {"same": entry(baseline="grpo")})
    lab = Lab(declaration=declaration, folder=tmp_path, train=runs)
    row = lab.measure("small")["methods"]["grpo"]
    assert (row["lr"], row["tried"]) == (4.5e-4, {})
    assert rate_variance(row, 2) == 0
    assert not [run for run in runs.trained if run.startswith("grpo-") and "-s10" in run]


def test_a_cell_that_is_measured_again_takes_seeds_of_its_own(tmp_path):
    declaration = declared(first_seed=50)
    row = Lab(declaration=declaration, folder=tmp_path, train=Runs()).measure("small")["methods"]["good"]
    assert row["seeds"] == [50, 51, 52]
    assert declaration.digest("small") != declared().digest("small")
    with pytest.raises(ValueError, match="none of them in sweep_seeds"):
        dataclasses.replace(declaration.cells["small"], sweep_seeds=(52,))


def test_noise_of_a_sweep_by_hand():
    # Two seeds: 4 resamples (00, 01, 10, 11) have means a: 0, .5, .5, 1 and b: .4, .4, .4, .4, so that b is chosen
    # once and a three times. Over all seeds a has .5 and b .4: variance of (.4, .5, .5, .5) is 3/4 · 1/4 · .01.
    row = {"tried": {"1e-4": [0.0, 1.0], "3e-4": [0.4, 0.4]}, "accuracy": [0.5, 0.5]}
    assert rate_variance(row, 2) == pytest.approx(0.001875)
    # Twelve seeds, of which 4,096 resamples are drawn: b of mean .4 is chosen where fewer than five of twelve draws
    # of a, half of whose seeds have 1, are 1. That is Binomial(12, 1/2) ≤ 4, so q = 794/4096 (at 4/12 a is lower).
    row = {"tried": {"1e-4": [0.0, 1.0] * 6, "3e-4": [0.4] * 12}, "accuracy": [0.5, 0.5]}
    assert rate_variance(row, 12) == pytest.approx(794 / 4096 * (1 - 794 / 4096) * 0.01, rel=0.05)
    # Kept means: the fresh seeds deviate by .2, so that of four sweep seeds by .1, and b − a = −.1 is exceeded by
    # normal noise of .1·√2 with probability .24: variance .24 · .76 · .01.
    row = {"tried": {"1e-4": 0.5, "3e-4": 0.4}, "accuracy": [0.3, 0.7, 0.5]}
    assert rate_variance(row, 4) == pytest.approx(0.24 * 0.76 * 0.01, rel=0.05)
    assert rate_variance({"tried": {"1e-4": 0.5}, "accuracy": [0.5]}, 4) == 0


def test_accuracy_is_compared_at_equal_tokens_and_at_equal_steps(tmp_path):
    _, cells = measured(tmp_path)
    # 1,200 tokens in all, 4 steps; gain at 1,000 tokens: 1.2 · gain · 1000/1200
    row = cells["small"]["methods"]["grpo"]
    assert row["accuracy"] == pytest.approx([0.5, 0.51, 0.52], abs=1e-4)
    assert row["end"] == pytest.approx([0.56, 0.572, 0.584], abs=1e-4)
    assert row["steps"] == pytest.approx([10 / 3] * 3, abs=1e-4)
    pairs = {p["axis"]: p for p in cells["small"]["pairs"] if (p["better"], p["worse"]) == ("good", "grpo")}
    tokens, steps = pairs["tokens"], pairs["steps"]
    assert {axis: p["at"] for axis, p in pairs.items()} == {
        "tokens": 1000, "processed": 1000, "steps": 4, "trained": 1000,
    }  # fmt: skip
    # Of each iteration 300 sampled tokens, 30 of prompts and 60 of scoring: 1.3 processed tokens for one.
    assert row["processed"] == pytest.approx([1300] * 3)
    assert row["seconds"] == pytest.approx([10 / 3] * 3, abs=1e-4)
    assert tokens["accuracies"][0][0] - tokens["accuracies"][1][0] == pytest.approx(0.1, abs=1e-4)
    assert steps["took"]["tokens"] == [1200, 1200]


def test_costs_per_step_and_prompt_are_multiples_of_the_baseline(tmp_path):
    srpo, rrpo = (Entry(recipe=f"toy_{name}", baseline="grpo") for name in ("srpo", "rrpo"))
    declaration, cells = measured(tmp_path, methods={"grpo": entry(), "good": srpo, "same": rrpo})
    rows = cells["small"]["methods"]
    # At 1,000 tokens: 5 steps of 2 prompts are 100 tokens a prompt, 4 of 4 prompts 62.5, and 8 of 2 prompts 62.5.
    for name, steps, batch, length in (("grpo", 5, 2, 60), ("good", 4, 4, 30), ("same", 8, 2, 60)):
        rows[name] |= {"steps": [steps] * 3, "batch": batch, "length": [length] * 3}
    rows["good"]["processed"] = [2600] * 3  # grpo and rrpo: 1,300, so 130 and 81.25 a prompt
    text = costs_block(Results(declaration, cells))
    assert "| `srpo` | `grpo` | 0.62 (1) | 1.25 (1) | 0.62 (1) | 0.50 (1) |" in text
    assert "sampled tokens: no difference shown, 1.00 (1) times RRPO's; processed tokens: no difference" in text
    # A second cell, of the same numbers: an interval of no width, and half of RRPO's tokens are fewer.
    cells["other"] = json.loads(json.dumps(cells["small"]))
    declaration.cells["other"] = declaration.cells["small"]
    for cell in cells.values():
        cell["methods"]["good"]["steps"] = [8] * 3
    text = costs_block(Results(declaration, cells))
    assert "sampled tokens: SRPO takes less, 0.50 [0.50, 0.50] (2) times RRPO's" in text
    del rows["good"]["processed"]  # an older result
    assert "| `srpo` | `grpo` | 0.31 [0.31, 0.31] (2) | 0.62 (1) |" in costs_block(Results(declaration, cells))
    # A seed of silent groups alone, which took no step: 3,000 tokens over 10 steps of 2 prompts are 150 a prompt.
    for cell in cells.values():
        cell["methods"]["grpo"]["steps"] = [0.0, 5, 5]
    text = costs_block(Results(declaration, cells))
    assert "| `srpo` | `grpo` | 0.21 [0.21, 0.21] (2) | 0.42 (1) |" in text


def test_verdicts_follow_the_corrected_p_value(tmp_path):
    declaration, cells = measured(tmp_path)
    verdicts = Results(declaration, cells).verdicts()
    words = {name: v.word for name, v in verdicts.items()}
    assert words == {
        "good": "shown",
        "same": "no difference above .05",
        "steps": "shown",
        "less": "refuted here",
        "large": "not testable here",
    }
    # differences of same: 0, .001, 0 → t = 1, p = .4226; the largest of four
    assert verdicts["same"].result.p == pytest.approx(0.4226, abs=1e-3)
    assert verdicts["same"].corrected == pytest.approx(0.4226, abs=1e-3)
    # Every claim here was made up after the data, so that no prediction counts; once they are committed before, all do.
    assert all(v.late for v in verdicts.values() if v.result)
    assert not any(sum(counts.values()) for counts in Results(declaration, cells).scored().values())
    cells["small"]["claims"] = list(declaration.claims)
    assert Results(declaration, cells).scored()["higher"] == {"right": 2, "wrong": 2, "open": 0}


def test_words_by_hand():
    def word(differences, tests=1):
        result = paired(differences, tests=tests)
        return _word(result, min(tests * result.p, 1.0))

    # Mean 0, deviation .02 of four: error .01, t(.95, 3) = 2.353, so the 90 % interval is ± .024.
    assert word([0.02, -0.02, 0.014, -0.014]) == "no difference above .05"
    assert word([0.2, -0.2, 0.14, -0.14]) == "undecided"
    assert word([0.2, 0.22, 0.18]) == "shown"
    # p = .002·(…): t = 17.3 with two degrees of freedom, p = .0033; of 20 tests that is .067.
    assert word([0.2, 0.22, 0.18], tests=20) == "undecided"
    assert paired([0.2, 0.22, 0.18], tests=20).detectable > 2 * paired([0.2, 0.22, 0.18]).detectable


def test_a_pair_through_a_common_opponent(tmp_path):
    declaration, cells = measured(tmp_path)
    results = Results(declaration, cells)
    pair = results.pair("small", "good", "same", "steps")
    good, same = (results.pair("small", m, "grpo", "steps") for m in ("good", "same"))
    assert pair["accuracies"] == [good["accuracies"][0], same["accuracies"][0]]
    assert pair["took"]["tokens"] == [1200, 1200]
    assert results.pair("small", "good", "none", "steps") is None


def test_a_result_of_an_earlier_rule_is_kept_and_says_so(tmp_path):
    _, cells = measured(tmp_path)
    assert Results(declared(), cells).earlier("small") == []
    cells["small"]["sweep"] |= {"union": False, "sweep_seeds": [7]}
    later = Results(declared(batches=(4, 8)), cells)
    assert later.earlier("small") == ["1 seeds", "each method at rates of its own", "one batch size"]
    assert "Rates were chosen by an earlier rule: 1 seeds, each" in cells_block(later)


def test_raw_data_of_a_cell_in_progress(tmp_path):
    declaration, _ = measured(tmp_path, Runs(broken=("same-",)))
    lab = Lab(declaration=declaration, folder=tmp_path, train=Runs())
    entry = lab.progress("small")
    kinds = [run.partition("/")[0] for run in entry["finished"]]
    assert (kinds.count("sweep"), kinds.count("runs")) == (
        2 * 5 * 2,
        2 * 3,
    )  # all at 0, `same` is best at the lowest rate
    file = tmp_path / "progress.json"
    file.write_text(json.dumps({"cells": {"small": entry}}))
    text = progress_block(Results(declaration, {}), file)
    assert "[small](#small): in progress, no verdict. 20 runs of the sweep and 6 fresh runs" in text
    assert progress_block(Results(declared(tokens=900), {}), file) == "Nothing."


def test_another_machine_goes_on_with_a_sweep(tmp_path):
    declaration, cells = measured(tmp_path / "whole")
    here = Lab(declaration=declaration, folder=tmp_path / "here", train=Runs(broken=("same-",)))
    here.measure("small")
    kept = here.progress("small") | {"commit": "abc"}
    there = Lab(declaration=declaration, folder=tmp_path / "there", train=(runs := Runs()), kept={"small": kept})
    entry = there.measure("small")
    known = {run.partition("/")[2] for run in kept["finished"] if run.startswith("sweep/")}
    assert known
    assert known.isdisjoint(runs.trained)
    assert entry == cells["small"] | {"sweep_commit": "abc"}
    file = tmp_path / "progress.json"
    file.write_text(json.dumps({"cells": {"small": kept}}))
    assert progress_block(Results(declaration, {"small": entry}), file) == "Nothing."  # it is complete
    assert "(the sweep: abc)" in cells_block(Results(declaration, {"small": entry}))
    assert there.progress("small")["finished"].items() >= kept["finished"].items()
    # Of another form nothing is known.
    assert (
        Lab(declaration=declared(tokens=900), folder=tmp_path, train=Runs(), kept={"small": kept}).known("small") == {}
    )


def test_a_budget_that_ends_before_the_second_step_decides_nothing(tmp_path):
    declaration, cells = measured(tmp_path, Runs(steps=0.5))
    results = Results(declaration, cells)
    assert results.verdicts()["good"].word == "not testable here"
    assert "the second optimiser step of good and grpo" in claims_block(results)
    assert "2 (not ranked)" in cells_block(results)
    assert "1 (" not in readme_block(results)


def test_equal_steps_of_other_batches_decide_nothing(tmp_path):
    declaration, cells = measured(tmp_path)
    claim = dataclasses.replace(declaration.claims["good"], axis="steps")
    declaration = dataclasses.replace(declaration, claims={"good": claim})
    methods = cells["small"]["methods"]
    for good, grpo, testable in ((4, 4, True), (1, 4, False)):
        methods["good"]["batch"], methods["grpo"]["batch"] = good, grpo
        verdict = Results(declaration, cells).verdicts()["good"]
        assert (verdict.word != "not testable here") == testable
    assert "the steps are of 1 against 4 prompts" in claims_block(Results(declaration, cells))
    tokens = dataclasses.replace(declaration, claims={"good": dataclasses.replace(claim, axis="tokens")})
    assert Results(tokens, cells).verdicts()["good"].word != "not testable here"


def test_steps_that_are_asked_for_are_where_methods_are_compared(tmp_path):
    _, cells = measured(tmp_path, steps=3, select="steps")
    assert [p["at"] for p in cells["small"]["pairs"] if p["axis"] == "steps"] == [3.0] * 3


def test_failed_runs_are_listed_and_their_seeds_left_out(tmp_path):
    declaration, cells = measured(tmp_path, Runs(broken=("runs/good-lr0.00135-s1", "sweep/good-lr5e-05-s100")))
    # Where the runs are is nobody's business but the user's: results.json is published.
    assert cells["small"]["failed"] == {
        "good-lr0.00135-s1": "exit code 1, see small/runs/logs",
        "good-lr5e-05-s100": "exit code 1, see small/sweep/logs",
    }
    assert cells["small"]["methods"]["good"]["seeds"] == [0, 2]
    assert cells["small"]["pairs"][0]["seeds"] == [0, 2]
    text = cells_block(Results(declaration, cells))
    assert "Failed: `good-lr0.00135-s1` (exit code 1, see small/runs/logs)." in text
    row = next(line for line in text.splitlines() if line.startswith("| `good` "))
    assert row.endswith("| 0.33 | 2 |")  # one of three seeds


def test_methods_without_two_seeds_in_common_are_not_compared(tmp_path):
    declaration, cells = measured(tmp_path, Runs(broken=("runs/good-lr0.00135-s1", "runs/good-lr0.00135-s2")))
    assert cells["small"]["methods"]["good"]["seeds"] == [0]
    assert [(p["better"], p["worse"]) for p in cells["small"]["pairs"]] == [("same", "grpo")] * 4
    results = Results(declaration, cells)
    assert results.verdicts()["good"].word == "not yet measured"
    assert "nan" not in claims_block(results)


def test_one_run_without_a_step_is_a_result_of_its_method(tmp_path):
    declaration = declared()
    lab = Lab(declaration=declaration, folder=tmp_path, train=Runs())
    lab.measure("small")
    plan, cell = lab.plan("small", sweep=False), declaration.cells["small"]
    curves = {n: dict(enumerate(plan.curves_of(f"{n}-*"))) for n in cell.methods}
    # 0, 10/3 and 10/3 steps at the budget: 2.2 in the mean
    curves["good"][0] = dataclasses.replace(curves["good"][0], steps=curves["good"][0].steps * 0.0)
    entry = summary(cell, curves, wanted_pairs(declaration, "small"))
    results = Results(declaration, {"small": {"digest": declaration.digest("small"), "failed": {}, **entry}})
    assert results.verdicts()["good"].result is not None


def test_what_runs_warned_of_is_kept_and_shown(tmp_path):
    declaration = declared()
    lab = Lab(declaration=declaration, folder=tmp_path, train=Runs())
    assert "warned" not in lab.measure("small")
    folder = lab.plan("small", sweep=False).folder
    (run,) = folder.glob("good-*-s1")
    (folder / "logs").mkdir()
    said = "value/empty_bank_share was 1 in iterations 0 to 59: no trajectory had a reference answer to score."
    (folder / "logs" / f"{run.name}.log").write_text(
        f"iteration 0\nWARNING another\nWARNING {said}\nrun directory: x\n"
    )
    entry = lab.measure("small")
    assert entry["warned"] == {"good": said}
    results = Results(declaration, {"small": {**entry, "digest": declaration.digest("small")}})
    assert f"Warned: `good` ({said})." in cells_block(results)


def test_a_cell_that_has_changed_since_counts_as_not_measured(tmp_path):
    _, cells = measured(tmp_path)
    results = Results(declared(tokens=900), cells)
    assert results.cells == {}
    assert {v.word for v in results.verdicts().values()} == {"not yet measured", "not testable here"}
    assert NOTHING in cells_block(results)
    assert Results(declared(regime="another reason"), cells).cells == cells


def test_runs_of_another_declaration_are_not_taken_for_those_of_this(tmp_path):
    runs = Runs()
    measured(tmp_path, runs)
    count = len(runs.trained)
    measured(tmp_path, runs, set=("prompts.batch=4",))
    assert len(runs.trained) == 2 * count
    changed = entry(baseline="grpo", set=("prompts.batch=8",))
    methods = {"grpo": entry(), "good": changed, "same": entry(baseline="grpo")}
    measured(tmp_path, runs, methods=methods)
    assert {plain(run).partition("-")[0] for run in runs.trained[2 * count :]} == {"good"}


def test_numbers_keep_the_commit_at_which_they_were_measured(tmp_path):
    _, cells = measured(tmp_path)
    old = json.loads(json.dumps(cells["small"])) | {"commit": "earlier"}
    assert dated(cells["small"], old)["commit"] == "earlier"
    assert dated(cells["small"], old | {"methods": {}}) == cells["small"]
    assert dated(cells["small"], None) == cells["small"]


def test_pages_show_the_same_numbers(tmp_path):
    declaration, cells = measured(tmp_path)
    results = Results(declaration, cells)
    difference = "+0.100 [+0.100, +0.100]"
    count = "Of 5 claims: 2 shown, 1 refuted here, 1 no difference above .05, 1 not testable here."
    assert claims_block(results).startswith(count)
    for text in (claims_block(results), paper_block(results, "grpo"), cells_block(results)):
        assert difference in text
    assert readme_block(results).startswith("- Of 5 claims: ")
    assert "| `good` | 0.00135 (edge) |" in cells_block(results)
    assert "| `grpo` | 0.00045 |" in cells_block(results)
    assert "good wins." not in paper_block(results, "srpo")


def test_a_withdrawn_comparison_is_on_no_page_but_its_reason_is(tmp_path):
    declaration, cells = measured(tmp_path)
    reason = "It compared batch sizes."
    results = Results(declared(withdrawn=reason), cells)
    assert results.cells == cells  # what only pages read is no other measurement
    words = {name: verdict.word for name, verdict in results.verdicts().items()}
    at_tokens = {n for n, c in declaration.claims.items() if c.axis == "tokens" and c.cell == "small"}
    assert at_tokens
    assert {name for name, word in words.items() if word == "withdrawn"} == at_tokens
    assert reason in withdrawn_block(results)
    assert withdrawn_block(Results(declaration, cells)) == "Nothing."
    for text in (claims_block(results), cells_block(results), across_block(results)):
        assert "+0.100 [+0.100, +0.100]" not in text
    assert "0.610 ± 0.010" in cells_block(Results(declaration, cells))
    assert "0.610 ± 0.010" not in cells_block(results)


def test_results_are_read_back(tmp_path):
    _, cells = measured(tmp_path / "runs")
    file = tmp_path / "results.json"
    file.write_text(as_text(cells))
    assert read_results(file) == cells
    assert read_results(tmp_path / "none.json") == {}
    file.write_text('{"cells": ')
    with pytest.raises(ConfigError, match=r"results.json is no table of results"):
        read_results(file)


def test_collapse_is_the_share_that_ends_below_its_start_or_not_at_all():
    row = {"start": [0.2, 0.2, 0.2, 0.2], "end": [0.1, 0.2, 0.3, 0.15]}
    assert collapsed(row, seeds=4) == 0.5
    assert collapsed(row, seeds=5) == pytest.approx(0.6)  # the fifth run failed


def test_the_estimate_counts_what_is_left(tmp_path):
    runs = Runs()
    lab = Lab(declaration=declared(seconds=10), folder=tmp_path, train=runs)
    # 3 rates · 2 seeds + 3 fresh runs each; two methods at 10 s, one at 7 s
    assert seconds_left(lab, ["small"]) == {"small": 9 * (10 + 10 + 7)}
    lab.measure("small")
    assert seconds_left(lab, ["small"]) == {"small": 0}
    forget(tmp_path, ["small"])
    assert seconds_left(lab, ["small"]) == {"small": 9 * 27}


def test_rates_chosen_by_steps_need_a_number_of_steps():
    with pytest.raises(ValueError, match="expected steps above 0"):
        declared(select="steps")


def test_pairs_are_those_of_baselines_and_claims():
    assert wanted_pairs(declared(), "small") == [("good", "grpo"), ("same", "grpo"), ("grpo", "good")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cells: [", r"d\.yaml: while parsing"),
        ("familys: {}", r"d.yaml.familys: unknown setting. Did you mean 'families'\?"),
        (
            "families: {}\ncells: {a: {title: t, family: x, regime: r, tokens: 1, methods: {m: {recipe: toy_grpo}}}}\n"
            "claims: {}",
            "cells.a: no family 'x'",
        ),
        (
            "families: {x: {title: t, settings: [data=chains]}}\nclaims: {}\n"
            "cells: {a: {title: t, family: x, regime: r, tokens: 1, methods: {m: {recipe: toy_grpo}, "
            "k: {recipe: toy_grpo, baseline: n}}}}",
            "methods.k.baseline: expected one of m, got n",
        ),
        ("families: {}\ncells: {}\nclaims: {}\ncells: {}\n", "found duplicate key cells"),
    ],
)
def test_mistakes_in_a_declaration_are_named(tmp_path, text, found):
    (tmp_path / "d.yaml").write_text(text)
    with pytest.raises(ConfigError, match=found):
        read_declaration(tmp_path / "d.yaml")


def test_a_claim_names_methods_of_its_cell():
    values = vars(declared())
    with pytest.raises(ValueError, match=r"claims.good: no method 'goood' in cell 'small'. Did you mean 'good'"):
        Declaration(**values | {"claims": {"good": claim("goood")}})
    with pytest.raises(ValueError, match="either cell, better and worse, or untestable"):
        claim(untestable="no")


def in_families(gains, few=()):
    """Cells in which `good`, and `four` with its four steps, gain so much over `grpo` with both of two seeds.

    Each of `gains` is (family, settings of all methods, gain of `good`, gain of `four`); runs of `few` have one step.
    """
    cells, measured = {}, {}
    for place, (family, settings, good, four) in enumerate(gains):
        name = f"cell{place}"
        methods = {
            "grpo": entry(set=settings),
            "four": entry(set=(*settings, "learner.minibatches=4")),
            "good": Entry(recipe="toy_good", set=settings, baseline="grpo", knows_errors=True),
        }
        if place == 1:  # in this cell the four steps are the first baseline, and grpo is compared with them
            methods = {name: methods[name] for name in ("four", "grpo", "good")}
        other = ("grpo", "four", -four) if place == 1 else ("four", "grpo", four)
        pairs = [
            {
                "better": a,
                "worse": b,
                "axis": "tokens",
                "accuracies": [[0.5 + gain] * 2, [0.5] * 2],
                "took": {"steps": [s, s]},
            }
            for a, b, gain in (("good", "grpo", good), other)
            for s in [1.0 if name in few else 9.0]
        ]
        cells[name] = Cell(title="A.", family=family, regime="", tokens=1000, methods=methods)
        measured[name] = {"methods": {m: {} for m in methods}, "pairs": pairs}
    families = {f: Family(title=f, settings=(f"data={f}",)) for f, *_ in gains}
    declaration = Declaration(families=families, cells=cells, claims={})
    return Results(declaration, {n: {**m, "digest": declaration.digest(n)} for n, m in measured.items()})


def test_gains_over_families_by_hand():
    gains = [("a", (), 0.1, 0.01), ("b", ("prompts.batch=4",), 0.2, 0.02), ("c", (), 0.3, -0.01), ("d", (), 0.0, 0.02)]
    results = in_families([*gains, ("a", (), 0.3, 0.03)])
    good, four = across_families(results)
    # Two cells of a family count as one, settings that both methods have make no other method.
    assert (good.method, good.baseline) == ("good", "grpo")
    assert good.gains == pytest.approx({"a": 0.2, "b": 0.2, "c": 0.3, "d": 0.0})
    assert good.result.difference == pytest.approx(0.175)
    assert good.result.pairs == 4
    assert (four.method, four.baseline) == ("grpo learner.minibatches=4", "grpo")
    assert four.gains == pytest.approx({"a": 0.02, "b": 0.02, "c": -0.01, "d": 0.02})
    assert "| `grpo learner.minibatches=4` | `grpo` | 3 of 4 | +0.013 " in across_block(results)
    assert "`good`" in across_block(results)
    assert "`good`" not in readme_block(results)  # which names what a user can have
    assert across_families(in_families(gains[:3])) == []
    assert across_families(in_families(gains, few=("cell3",))) == []
    assert across_block(in_families(gains[:3])) == NOTHING
