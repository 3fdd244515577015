"""Recorded credit: each check finds the fault that was planted for it, and right records pass."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from creditgraph.pipeline.app.audit.audit import failures, run_checks
from creditgraph.pipeline.app.audit.records import read_records
from creditgraph.pipeline.app.audit.records_credit import CREDIT
from creditgraph.pipeline.app.audit.records_tokens import RECORDS
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.app.cli import main


def right():
    """Two groups of three rows with their centred rewards; tokens 2 and 5 are an observation and a second turn's."""
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    groups = ["a", "a", "a", "b", "b", "b"]
    means = {"a": 1 / 3, "b": 2 / 3}
    mask = [[True, True, False, True]] * 6
    rows = [[r - means[g] if m else 0.0 for m in row] for r, g, row in zip(rewards, groups, mask, strict=True)]
    return {
        "advantage": rows,
        "reward": rewards,
        "group": groups,
        "mask": [list(row) for row in mask],
        "turn": [[0, 0, -1, 1]] * 6,
        "valid": [True] * 6,
    }


def not_a_number(rows):
    rows["advantage"][0][1] = float("nan")


def on_an_observation(rows):
    rows["advantage"][2][2] = 0.5


def last_turn_only(rows):
    rows["advantage"] = [[0.0, 0.0, 0.0, row[3]] for row in rows["advantage"]]


def one_baseline_for_all(rows):
    mean = np.mean(rows["reward"])
    rows["advantage"] = [[r - mean] * 2 + [0.0, r - mean] for r in rows["reward"]]


def turned_round(rows):
    rows["advantage"] = [[-x for x in row] for row in rows["advantage"]]


def rejected_with_credit(rows):
    rows["valid"][0] = False


def no_credit(rows):
    for row in range(3):
        rows["advantage"][row] = [0.0] * 4


FAULTS = {
    "records_numbers": not_a_number,
    "records_outside": on_an_observation,
    "records_turns": last_turn_only,
    "records_baseline": one_baseline_for_all,
    "records_order": turned_round,
    "records_invalid": rejected_with_credit,
    "records_silent": no_credit,
}


def table(tmp_path, rows):
    file = tmp_path / "rollouts.parquet"
    pq.write_table(pa.table(rows), file)
    return file


def test_every_check_has_a_fault():
    assert FAULTS.keys() == {check.name for check in CREDIT}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, tmp_path):
    rows = right()
    FAULTS[name](rows)
    (records,) = read_records(table(tmp_path, rows), {})
    assert name in {result.check.name for result in failures(run_checks(records, RECORDS))}


def test_right_records_pass(tmp_path):
    (records,) = read_records(table(tmp_path, right()), {})
    results = run_checks(records, CREDIT)
    assert not failures(results)
    assert {r.check.name for r in results if r.finding.verdict == "not applicable"} == {"records_invalid"}


def test_columns_have_names(tmp_path, capsys):
    rows = right()
    rows["points"] = rows.pop("reward")
    file = str(table(tmp_path, rows))
    assert main(["audit", file]) not in (0, 1)
    text = capsys.readouterr().err
    assert "has the columns advantage, group, mask, points, turn, valid; reward is missing" in text
    assert "--columns reward=COLUMN" in text
    assert main(["audit", file, "--columns", "reward=points"]) == 0
    assert main(["audit", file, "--columns", "prize=points"]) not in (0, 1)
    assert "expected one of advantage, reward, group, mask, valid, turn" in capsys.readouterr().err


def test_columns_may_be_given_with_commas_or_in_several_options(tmp_path, capsys):
    rows = right()
    names = {"points": "reward", "prompt": "group"}
    rows.update({theirs: rows.pop(ours) for theirs, ours in names.items()})
    file = str(table(tmp_path, rows))
    assert main(["audit", file, "--columns", "reward=points,group=prompt"]) == 0
    assert main(["audit", file, "--columns", "reward=points", "--columns", "group=prompt"]) == 0
    assert main(["audit", file, "--columns", "reward=poinds,group=prompt"]) not in (0, 1)
    assert "poinds is missing. Name them: --columns reward=COLUMN. Did you mean 'points'?" in capsys.readouterr().err


def test_the_uid_of_verl_is_read_as_prompt_rollout_and_output(tmp_path):
    rows = right()
    rows["uid"] = [f"{group}_{i % 3}_0" for i, group in enumerate(rows.pop("group"))]
    (records,) = read_records(table(tmp_path, rows), {})
    results = run_checks(records, CREDIT)
    assert not failures(results)
    assert records.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert "groups are their ids without the last 2 of the parts" in results[0].finding.message
    rows["uid"] = list("abcdef")
    rows["advantage"] = [[1.0] * 4] * 6
    (records,) = read_records(table(tmp_path, rows), {})
    found = {r.check.name: r.finding for r in run_checks(records, CREDIT)}
    assert found["records_baseline"].message.startswith("not judged: each row has a group id of its own")


def test_a_rollout_trace_of_lines(tmp_path):
    rows = right()
    file = tmp_path / "trace.jsonl"
    names = {"advantage": "advantages", "reward": "score", "group": "example_id", "mask": "completion_mask"}
    lines = [{names.get(k, k): v[i] for k, v in rows.items()} for i in range(6)]
    file.write_text("\n".join(map(json.dumps, lines)))
    (records,) = read_records(file, {})
    assert not failures(run_checks(records, RECORDS))
    assert records.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert records.mask.sum() == 18


@pytest.mark.parametrize(
    ("text", "sentence"), [("{", "line 1 is no JSON"), ("[1]\n", "line 1 is no object"), ("", "has the columns (none)")]
)
def test_a_broken_trace_gets_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    with pytest.raises(AuditError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        read_records(file, {})


def test_a_broken_table_gets_one_sentence(tmp_path):
    with pytest.raises(AuditError, match="no such file"):
        read_records(tmp_path / "none.parquet", {})
    file = tmp_path / "text.parquet"
    file.write_text("group,reward")
    with pytest.raises(AuditError, match="no Parquet file"):
        read_records(file, {})
    rows = {"advantage": [1.0], "reward": ["high"], "group": [0]}
    with pytest.raises(AuditError, match="column 'reward' has 'high'; expected numbers"):
        read_records(table(tmp_path, rows), {})
    with pytest.raises(AuditError, match="has no records"):
        read_records(tmp_path, {})


def episodes(advantages):
    """Two groups of two episodes, of two and one rows; a number of each episode on all of its rows."""
    names = ["a", "a", "b", "c", "c", "d"]
    return {
        "advantage": [[advantages[name]] * 2 for name in names],
        "reward": [1.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        "group": [0, 0, 0, 1, 1, 1],
        "trajectory": names,
    }


def verdicts(tmp_path, rows):
    (records,) = read_records(table(tmp_path, rows), {})
    return {r.check.name: r.finding for r in run_checks(records, CREDIT)}


def test_an_episode_counts_once_however_many_rows_it_has(tmp_path):
    once = verdicts(tmp_path, episodes({"a": 0.5, "b": -0.5, "c": -0.5, "d": 0.5}))
    assert (once["records_baseline"].verdict, once["records_order"].verdict) == ("pass", "pass")
    assert once["records_order"].message == "2 pairs"
    by_rows = verdicts(tmp_path, episodes({"a": 1 / 3, "b": -2 / 3, "c": -1 / 3, "d": 2 / 3}))
    assert by_rows["records_baseline"].verdict == "pass"
    assert by_rows["records_baseline"].message.endswith("so an episode of more rows weighs more")
    neither = verdicts(tmp_path, episodes({"a": 0.5, "b": -0.25, "c": -0.25, "d": 0.5}))
    assert neither["records_baseline"].verdict == "fail"
    assert neither["records_baseline"].example["advantages"] == [0.5, -0.25]


def test_credit_that_differs_within_a_response_has_no_baseline_of_its_group(tmp_path):
    rows = right()
    rows["advantage"] = [[2 * row[0], *row[1:]] for row in rows["advantage"]]
    found = verdicts(tmp_path, rows)
    for name in ("records_baseline", "records_order"):
        assert found[name].verdict == "not applicable"
        assert found[name].message.startswith("credit differs within responses")
    assert not [name for name, finding in found.items() if finding.verdict == "fail"]


def test_nothing_passes_where_no_token_is_trained_on(tmp_path):
    found = verdicts(tmp_path, right() | {"mask": [[False] * 4] * 6, "advantage": [[0.0] * 4] * 6})
    assert {finding.verdict for finding in found.values()} == {"not applicable"}


# Whole responses; a critic that warms up; resets, whose prefixes are not trained on; turns; a batch that is whitened; a
# tree, whose rows share tokens; first attempts without credit; revisions, which no reward is recorded for.
@pytest.mark.parametrize(
    "recipe",
    [
        "toy_grpo",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "toy_ppo",
                "toy_srpo",
                "toy_mt_grpo_thoughts",
                "toy_gigpo_stop",
                "toy_prime",
                "toy_spo_tree",
                "toy_score",
                "toy_ibpo",
            )
        ),
    ],
)
def test_a_run_of_ours_passes(recipe, tmp_path, capsys):
    small = ["prompts.batch=2", "evaluator.num_problems=4", "evaluator.every=0", "run.device=cpu"]
    small += ["data.train.size=50", "data.eval.size=10", "run.iterations=2", "run.record.every=1"]
    assert main(["train", f"recipe={recipe}", f"run.root={tmp_path}", "run.name=r", *small]) == 0
    capsys.readouterr()
    # A payload of a class that only the run's graph imports.
    record = tmp_path / "r" / "record"
    held = pq.read_table(next(record.glob("rewards.rewards/*.parquet")))
    note = json.loads(held.schema.metadata[b"creditgraph"]) | {"class": "elsewhere:Own"}
    (record / "own.own").mkdir()
    pq.write_table(held.replace_schema_metadata({"creditgraph": json.dumps(note)}), record / "own.own/000000.parquet")
    assert main(["audit", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    if recipe == "toy_grpo":
        assert "✓ records_baseline" in out
    if recipe == "toy_ppo":
        assert "no token is trained on" in out
    else:
        assert "✓ records_numbers" in out
        assert "✓ records_silent" in out or recipe == "toy_score"
