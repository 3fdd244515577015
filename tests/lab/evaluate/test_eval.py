"""`creditgraph eval … suite=…` from the command line to the files: results, resuming and comparing."""

import json
import os
import shutil
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from small_suite import SUITE, evaluate, items, records, write_suite

from creditgraph.components.data.sources import parse_source
from creditgraph.components.models.load import resolve_model_path
from creditgraph.components.tasks import TASKS
from creditgraph.lab.evaluate.sets import data_entry
from creditgraph.pipeline.app.cli import main

CHAINS = TASKS["chains"]

# One process makes the run and the whole evaluation once for both files of the group.
pytestmark = pytest.mark.xdist_group("evaluation")


# --- results ---


def test_records_have_every_item_once_and_say_what_happened(model):
    rows = records(model, "one")
    keys = [(r["pass"], r["problem"], r["sample"]) for r in rows]
    assert sorted(keys) == sorted(
        [("greedy", i, 0) for i in range(5)] + [("sampled", i, s) for i in range(5) for s in range(4)]
    )
    assert len({r["problem_id"] for r in rows}) == 5
    assert len({r["seed"] for r in rows}) == 25
    for r in rows:
        assert r["task"] == "one"
        assert 0 < len(r["tokens"]) <= 96
        assert r["logprob"] < 0
        assert r["reward"] == float(r["correct"])
        assert r["valid"]
        assert r["flagged"] is None  # a model has no training data that we know of
        assert r["finish_reason"] in ("final", "eos", "length", "thoughts")
        assert (r["answer"] is None) == (r["reason"] == "no answer in the response")


def test_results_are_those_of_the_records(model):
    results = json.loads((model / "results.json").read_text())
    task = results["tasks"]["one"]
    rows = records(model, "one")
    right = np.zeros((5, 4))
    for r in rows:
        if r["pass"] == "sampled":
            right[r["problem"], r["sample"]] = r["correct"]
    greedy = [r["correct"] for r in rows if r["pass"] == "greedy"]
    result = {name: m["value"] for name, m in task["metrics"].items()}
    assert list(result) == ["greedy pass@1", "avg@4", "pass@2", "pass@4", "maj@4"]
    assert result["greedy pass@1"] == pytest.approx(np.mean(greedy))
    assert result["avg@4"] == pytest.approx(right.mean())
    assert result["pass@4"] == pytest.approx(right.any(1).mean())
    # Pairs without a right sample: C(4 − c, 2) of 6.
    wrong = 4 - right.sum(1)
    assert result["pass@2"] == pytest.approx(np.mean(1 - wrong * (wrong - 1) / 12))
    assert all(m["low"] <= m["value"] <= m["high"] for m in task["metrics"].values())
    assert task["responses"] == 25
    assert list(results["tasks"]["late"]["metrics"]) == ["avg@4", "pass@2", "pass@4", "maj@4"]
    both = [results["tasks"][t]["metrics"]["avg@4"]["value"] for t in ("one", "late")]
    assert results["mean"]["metrics"]["avg@4"]["value"] == pytest.approx(np.mean(both))
    assert "greedy pass@1" not in results["mean"]["metrics"]
    page = (model / "results.md").read_text()
    for part in (
        "# Small: tiny, checkpoint initial",
        "| one ",
        "mean of tasks",
        f"{100 * result['avg@4']:.1f} [",
        "Contamination not checked",
    ):
        assert part in page


def test_seeds_depend_on_problem_and_sample_alone(model, configs, tmp_path):
    """Other chunks, fewer problems, and the other task first: the same responses."""
    assert evaluate(configs, "model=tiny", f"root={tmp_path}", "chunk=100", "tasks=one", "tasks.one.problems=3") == 0
    few = {
        (r["pass"], r["problem"], r["sample"]): r
        for r in records(tmp_path / "model-tiny" / "eval" / "small" / "initial", "one")
    }
    for r in records(model, "one"):
        key = (r["pass"], r["problem"], r["sample"])
        if r["problem"] < 3:
            assert (few[key]["tokens"], few[key]["seed"]) == (r["tokens"], r["seed"])


# --- resuming ---


def test_a_killed_evaluation_goes_on_to_the_same_bytes(model, configs, tmp_path):
    """SIGKILL in the fifth chunk: four are on disk, and are not sampled again."""
    arguments = ["eval", "suite=small", "model=tiny", f"root={tmp_path}", "chunk=6", "-c", configs]
    pid = os.fork()  # a new interpreter would spend most of its time importing
    if not pid:
        os.environ["EVAL_TOYS_KILL"] = "5"
        try:
            main(arguments)
        finally:
            os._exit(1)  # it was not killed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    folder = tmp_path / "model-tiny" / "eval" / "small" / "initial"
    before = {name: data for name, data in items(folder).items() if name.endswith(".parquet")}
    assert len(before) == 4
    assert not (folder / "results.json").exists()
    verified = (tmp_path / "verified").read_text().splitlines()
    (folder / "items" / "one" / ".tmp-sampled-000004.parquet").write_bytes(b"half of a chunk")
    assert main(arguments) == 0
    (folder / "items" / "one" / ".tmp-sampled-000004.parquet").unlink(missing_ok=True)
    assert items(folder) == items(model)
    after = (tmp_path / "verified").read_text().splitlines()
    assert len(after) == 25 + 16  # every item verified once in both processes together
    assert sum(c == "\n" for c in (model.parents[3] / "verified").read_text()) == 41
    assert len(verified) == sum(pq.read_metadata(folder / name).num_rows for name in before)


def test_a_signal_to_end_is_obeyed_in_order(model, configs, tmp_path, monkeypatch, capsys):
    """SIGTERM in the third chunk: the exit code of a preempted run, two chunks on disk, and the old handler back."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("EVAL_TOYS_TERM", "3")
    with pytest.raises(SystemExit) as left:
        evaluate(configs, "model=tiny", f"root={tmp_path}", "chunk=6")
    assert left.value.code == 75
    assert "SIGTERM; start again to continue" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    monkeypatch.delenv("EVAL_TOYS_TERM")
    assert evaluate(configs, "model=tiny", f"root={tmp_path}", "chunk=6") == 0
    assert "one: 16 responses to sample, 9 are on disk" in capsys.readouterr().out
    assert items(tmp_path / "model-tiny" / "eval" / "small" / "initial") == items(model)


def test_a_finished_evaluation_samples_nothing_again(model, configs, tmp_path, capsys):
    shutil.copytree(model.parents[3], tmp_path / "again")
    assert evaluate(configs, "model=tiny", f"root={tmp_path / 'again'}") == 0
    assert not (tmp_path / "verified").exists()
    assert "responses to sample" not in capsys.readouterr().out
    assert items(tmp_path / "again" / "model-tiny" / "eval" / "small" / "initial") == items(model)


def test_another_version_of_the_suite_is_not_mixed_in(model, run, tmp_path, capsys):
    shutil.copytree(model.parents[3], tmp_path / "m")
    changed = write_suite(tmp_path / "c", version=2, defaults={**SUITE["defaults"], "temperature": 0.5})
    arguments = ["model=tiny", f"root={tmp_path / 'm'}", "tasks=late"]
    assert evaluate(changed, *arguments) == 2
    text = capsys.readouterr().err
    for part in (
        "another evaluation",
        "suite_version: was 1, now 2",
        "task.temperature: was 1.0, now 0.5",
        "label=NAME",
        "--fresh",
    ):
        assert part in text
    # The other run is not sampled either: mistakes of all subjects show first.
    assert evaluate(changed, f"run={run}", *arguments) == 2
    assert "responses to sample" not in capsys.readouterr().out
    assert evaluate(changed, *arguments, "label=cool") == 0
    folder = tmp_path / "m" / "model-tiny" / "eval" / "small"
    assert json.loads((folder / "initial-cool" / "results.json").read_text())["version"] == 2
    assert items(folder / "initial") == items(model)
    assert evaluate(changed, *arguments, "--fresh") == 0
    assert json.loads((folder / "initial" / "results.json").read_text())["version"] == 2


# --- runs, comparison, contamination ---


def test_runs_side_by_side_with_paired_differences(run, configs, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    arguments = [f"run={run},{other}", "model=tiny", f"root={tmp_path}", "tasks=one"]
    assert evaluate(configs, *arguments, "--compare") == 2
    assert "only reads" in capsys.readouterr().err
    assert evaluate(configs, *arguments) == 0
    assert "| one " in capsys.readouterr().out
    result = json.loads((run / "eval" / "small" / "comparison.json").read_text())
    assert result["subjects"] == ["r", "other", "tiny"]
    same = result["tasks"]["one"]["differences"]["other"]
    assert same["problems"] == 5
    assert all((m["value"], m["low"], m["high"], m["resolved"]) == (0, 0, 0, False) for m in same["metrics"].values())
    values = {n: m["value"] for n, m in result["tasks"]["one"]["metrics"]["avg@4"].items()}
    gap = result["tasks"]["one"]["differences"]["tiny"]["metrics"]["avg@4"]
    assert gap["value"] == pytest.approx(values["tiny"] - values["r"])
    assert gap["low"] <= gap["value"] <= gap["high"]
    verified = (tmp_path / "verified").read_text()
    assert evaluate(configs, *arguments, "--compare") == 0
    assert "tiny − r" in capsys.readouterr().out
    assert (tmp_path / "verified").read_text() == verified


def test_checkpoints_have_records_of_their_own_and_other_weights(run, configs):
    for checkpoint, name in (("latest", "000001"), ("0", "000000"), ("initial", "initial")):
        assert evaluate(configs, f"run={run}", f"checkpoint={checkpoint}", "tasks=one", "contamination=false") == 0
        assert (run / "eval" / "small" / name / "results.json").exists()
    prints = {
        p.parent.name: json.loads(p.read_text())["weights"] for p in (run / "eval" / "small").glob("*/results.json")
    }
    assert len(set(prints.values())) == 3
    first, last = (records(run / "eval" / "small" / n, "one") for n in ("000000", "000001"))
    assert [r["seed"] for r in first] == [r["seed"] for r in last]  # the same random numbers for every policy
    assert sum(r["logprob"] for r in first) != sum(r["logprob"] for r in last)


def test_a_model_folder_can_stand_for_a_checkpoint(run, model, configs, tmp_path):
    exported = shutil.copytree(resolve_model_path("tiny"), tmp_path / "exported")
    assert evaluate(configs, f"run={run}", f"checkpoint={exported}", "tasks=one", "contamination=false", "chunk=6") == 0
    rows = records(run / "eval" / "small" / "exported", "one")
    assert [r["tokens"] for r in rows] == [r["tokens"] for r in records(model, "one")]


def test_problems_that_are_in_the_training_data_are_flagged(run, configs, tmp_path):
    """The training data of this run gets two of the problems, one in capitals and inside other text."""
    assert evaluate(configs, f"run={run}", "tasks=one", "contamination=false") == 0
    assert {r["flagged"] for r in records(run / "eval" / "small" / "000001", "one")} == {None}
    source = parse_source(data_entry("chains_one", "", "one"), "one")
    texts = [CHAINS.generate(source.seed, i, source.difficulty, source.split)["question"] for i in range(5)]
    questions = ["copied: " + texts[3].upper(), "s1 + 1", texts[1]]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = {"source": "file", "path": str(tmp_path / "train.jsonl"), "template": "plain"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate(configs, f"run={run}", "tasks=one", "label=checked") == 0
    folder = run / "eval" / "small" / "000001-checked"
    flagged = {r["problem"]: r["flagged"] for r in records(folder, "one")}
    assert flagged == {0: False, 1: True, 2: False, 3: True, 4: False}
    report = json.loads((folder / "contamination.json").read_text())["one"]
    assert (report["n"], report["flagged"], report["train_rows"]) == (13, 2, 3)
    assert [(i["problem"], i["train_row"]) for i in report["overlapping"]] == [(1, 2), (3, 0)]
    task = json.loads((folder / "results.json").read_text())["tasks"]["one"]
    assert task["without_flagged"]["problems"] == 3
    rows = [r for r in records(folder, "one") if r["pass"] == "sampled" and not r["flagged"]]
    assert task["without_flagged"]["metrics"]["avg@4"]["value"] == pytest.approx(np.mean([r["correct"] for r in rows]))
    assert "one, without flagged" in (folder / "results.md").read_text()


def test_training_data_out_of_reach_is_said_and_kept_so(run, configs, tmp_path, capsys):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = {"source": "file", "path": str(tmp_path / "absent.jsonl")}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate(configs, f"run={run}", "tasks=one") == 0
    assert "contamination is not checked" in capsys.readouterr().out
    assert "absent.jsonl" in (run / "eval" / "small" / "000001" / "results.md").read_text()
