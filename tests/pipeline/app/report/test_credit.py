"""`creditgraph credit` on a real run: recorded credit comes back, the truth is compared, others say what they need."""

import re

import pytest
import torch

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.credit.side_by_side import TRUTH, compare
from creditgraph.pipeline.app.report.credit import cards
from creditgraph.pipeline.app.report.pack import unpack
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.run.recording import read_payload

RECIPES = ["toy_grpo", "toy_rredcot", "toy_treerl"]


@pytest.fixture(scope="module")
def comparison(real_run):
    return compare(real_run, RECIPES, [], [], None, 4, 8)


def test_the_newest_iteration_with_an_exact_policy_is_taken(comparison):
    assert comparison.iteration == 1
    assert comparison.notes == []


def test_the_runs_own_recipe_gives_its_recorded_credit(comparison, real_run):
    credit = read_payload(real_run / "record" / "advantage.credit" / "000001.parquet")
    rows = credit.index_of(comparison.trajectories.uid)
    column = next(c for c in comparison.columns if c.name == "toy_rredcot")
    # Its objective is the plain policy gradient: effective credit is the advantage on trained tokens.
    expected = torch.where(credit.mask.select(rows).values, credit.advantage.select(rows).values.double(), 0.0)
    assert torch.allclose(column.credit.values, expected, atol=1e-5)


def test_group_credit_is_flat_and_truth_is_not(comparison):
    columns = {c.name: c for c in comparison.columns}
    for row in columns["toy_grpo"].credit.rows():
        assert len(set(row.tolist())) == 1
    assert any(len(set(row.tolist())) > 1 for row in columns[TRUTH].credit.rows())
    # The true advantages of a trajectory add up, over thoughts, to its outcome less the value of the prompt: at most 1.
    assert float(columns[TRUTH].credit.values.abs().max()) <= 1.0


def test_trees_need_rollouts_of_their_own(comparison):
    column = next(c for c in comparison.columns if c.name == "toy_treerl")
    assert column.credit is None
    assert "it needs further sampling: rollouts of its own (expander.tree)" in column.note


@pytest.mark.slow
def test_a_run_of_episodes_is_compared_by_turn(tmp_path):
    small = ["prompts.batch=4", "evaluator.num_problems=4", "evaluator.every=0", "run.device=cpu"]
    small += ["run.iterations=1", "run.record.every=1", f"run.root={tmp_path}", "run.name=r"]
    assert main(["train", "recipe=toy_gigpo_stop", *small]) == 0
    found = compare(tmp_path / "r", ["toy_gigpo_stop", "toy_grpo_stop", "toy_grpo"], [], [], None, 6, 8)
    own, other, whole = found.columns
    record = tmp_path / "r" / "record"
    credit = read_payload(record / "advantage.credit" / "000000.parquet")
    expected = credit.advantage.select(credit.index_of(found.trajectories.uid))
    assert torch.allclose(own.credit.values, expected.values.double(), atol=1e-5)
    assert not torch.allclose(other.credit.values, expected.values.double(), atol=1e-5)
    assert "it needs further sampling: rollouts of its own (sampler.chains)" in whole.note
    rewards = read_payload(record / "rewards.rewards" / "000000.parquet")
    assert found.reward == rewards.value[rewards.index_of(found.trajectories.uid)].tolist()
    assert found.notes == [
        "turns are not sampled here (`creditgraph creditbench --suite turns` does), so no true advantage is shown"
    ]
    assert len(cards(found)) == 6


def test_cards(comparison):
    rows = cards(comparison)
    assert len(rows) == 4
    assert "".join(rows[0]["pieces"]).strip() == comparison.trajectories.text[0].strip()
    assert [len(row) for row in rows[0]["credit"].values()] == [len(rows[0]["pieces"])] * 3


def test_the_command(real_run, tmp_path, capsys):
    page = tmp_path / "credit.html"
    assert (
        main(["credit", "recipe=toy_grpo,toy_vineppo", str(real_run), "--rows", "2", "--samples", "2", "-o", str(page)])
        == 0
    )
    out = capsys.readouterr()
    assert "toy_vineppo" in out.out
    assert "needed further sampling" in out.out
    header, _ = unpack(re.search(r'id="data-credit">([^<]*)<', page.read_text(encoding="utf-8")).group(1))
    assert len(header["cards"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=toy_grpo"], "expected one run directory, got 0"),
        (["runs/x"], "no recipe; expected recipe=NAME"),
        (
            ["recipe=toy_grpo", "runs/x", "--samples", "3"],
            "--samples 3: expected 0 (no true advantage) or an even number",
        ),
        (["recipe=toy_grpo", "runs/x", "--rows", "0"], "--rows 0: expected at least 1"),
        (["recipe=toy_gpro", "runs/x"], "Did you mean"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert main(["credit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_rollouts(make_run):
    with pytest.raises(RunError, match="is not recorded, so there are no rollouts"):
        compare(make_run(records=False), ["toy_grpo"], [], [], None, 4, 0)
