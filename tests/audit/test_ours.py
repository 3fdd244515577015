"""Our own graphs, components and objectives under the audit."""

import argparse
import json
from pathlib import Path

import pytest

from creditgraph.components.learner.objective import ObjectiveSettings
from creditgraph.pipeline.app.audit.audit import failures, run_checks
from creditgraph.pipeline.app.audit.batch import make
from creditgraph.pipeline.app.audit.contract import CONTRACT
from creditgraph.pipeline.app.audit.loss import LOSS
from creditgraph.pipeline.app.audit.ours import component_target, objective_target, trajectories_of, turn_rows
from creditgraph.pipeline.app.audit.targets import AuditError
from creditgraph.pipeline.app.commands import audit
from creditgraph.pipeline.core.registry import load_class

CONFIGS = Path(__file__).parents[2] / "configs"
GRAPHS = sorted(path.stem for path in (CONFIGS / "graph").glob("*.yaml"))
# What the credit of a graph needs that a made-up batch does not have.
NOT_MADE = {
    "distill": "policy",
    "gae_turns": "values",
    "hicra": "credit",
    "ibpo": "revisions",
    "igpo": "values",
    "intervention": "errors",
    "ppo": "segments",
    "prime": "segments",
    "rlsd": "policy",
    "rredcot": "segments",
    "sdpo": "policy",
    "trace_td": "values",
    "turn_ppo": "values",
    "vapo": "segments",
    "vineppo": "segments",
}
CREDITOR = {"intervention": "expander"}  # the node of the credit, where it is not "advantage"
DECLARED = {
    "cispo": {"loss_clip"},
    "fipo": {"loss_gradient"},
    "gigpo": {"gradient_stop", "gradient_turns"},
    "grpo_lambda": {"loss_chain", "loss_lengths"},
    "gspo": {"loss_token_credit"},
    "ibpo": {"loss_token_credit"},
    "maxrl": {"monotone", "reward_shift"},
    "mt_grpo": {"gradient_turns"},
    "p_trace": {"loss_chain", "loss_lengths"},
    "s_trace": {"loss_chain", "loss_lengths"},
    "turn_ppo": {"loss_token_credit"},
}


def recipe_of(graph):
    """The toy recipe named like the graph, or the first one of it."""
    named = CONFIGS / f"recipe/toy_{graph}.yaml"
    recipes = [named] if named.exists() else sorted((CONFIGS / "recipe").glob("toy_*.yaml"))
    return next(path.stem for path in recipes if f"/graph: {graph}," in path.read_text())


def audited(capsys, *arguments):
    parser = argparse.ArgumentParser()
    audit.configure(parser)
    code = audit.main(parser.parse_args([*arguments, "--json"]))
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_shipped_graph_fails(graph, capsys):
    code, rows = audited(capsys, f"recipe={recipe_of(graph)}")
    assert [(r["check"], r["message"]) for r in rows if r["verdict"] == "fail"] == []
    assert code == 0
    assert {r["target"] for r in rows} >= {CREDITOR.get(graph, "advantage"), "learner.objective"}
    declared = {r["check"] for r in rows if r["verdict"] == "declared"}
    assert declared == DECLARED.get(graph, set())
    credit = [r for r in rows if r["target"] == CREDITOR.get(graph, "advantage")]
    if graph in NOT_MADE:
        assert [r["verdict"] for r in credit] == ["not applicable"]
        assert f"needs {NOT_MADE[graph]}" in credit[0]["message"]
    else:
        assert sum(r["verdict"] == "pass" for r in credit) >= 15


def test_a_trace_is_biased_by_its_weights():
    # Token 1 of 2 weighs 1 + d against 1: the cosine with equal weights is that of the check at d → 1.
    target = objective_target(ObjectiveSettings(use="trace", config={"decay": 0.0}), "trace")
    assert not failures(run_checks(target, LOSS))
    found = {r.check.name: r.finding for r in run_checks(objective_target(ObjectiveSettings(use="trace"), "t"), LOSS)}
    assert found["loss_chain"].verdict == "declared"
    assert 0.02 < found["loss_chain"].size < 0.2


def test_a_component_with_inputs_of_a_model_is_refused():
    with pytest.raises(AuditError, match=r"needs revisions, revision_rewards, which depend on a model"):
        component_target(load_class("advantage.counterfactual"), "advantage.counterfactual", {})
    with pytest.raises(AuditError, match="returns no credit"):
        component_target(load_class("rewards.outcome"), "rewards.outcome", {})


def test_the_settings_of_a_component_are_those_given(capsys):
    _, rows = audited(capsys, "advantage.group", "-s", "normalize=mean", "--layer", "metamorphic")
    assert {r["layer"] for r in rows} == {"contract", "metamorphic"}
    target = component_target(load_class("advantage.group"), "a", {"normalize": "mean"})
    result = target.advantages(make([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]))
    assert result[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rows_of_a_batch_become_trajectories():
    batch = make([1.0, 0.0], [0, 0], turns=[[0, 0, -1, 1], [0]], truncated=[False, True])
    rows = trajectories_of(batch)
    assert rows.response_tokens.lengths.tolist() == [4, 1]
    assert rows.thought_ends.to_lists() == [[2, 3, 4], [1]]
    assert list(rows.finish_reason) == ["eos", "length"]


def test_turns_of_a_batch_become_rows():
    batch = make([1.0, 0.0], [4, 4], turns=[[0, 0, -1, 1], [0]], turn_rewards=[[0.5, 0.25], [0.75]])
    rows, turns, row, inside = turn_rows(batch)
    # Row 0 has a turn of two tokens and one of one token, row 1 one of one; the outcome is with the last turn.
    assert (row.tolist(), rows.lengths.tolist(), rows.groups.tolist()) == ([0, 0, 1], [2, 1, 1], [4, 4, 4])
    assert inside.tolist() == [[True, True, False, False], [False, False, False, True], [True, False, False, False]]
    assert (turns.reward.tolist(), rows.rewards.tolist()) == ([0.5, 1.25, 0.75], [1.75, 1.75, 0.75])
    assert (turns.episode.tolist(), turns.turn.tolist()) == ([1000, 1000, 1002], [0, 1, 0])
    assert (turns.done.tolist(), turns.state) == ([False, True, True], ["start", "", "start"])


def test_a_declaration_of_no_check_is_refused():
    target = component_target(load_class("advantage.group"), "a", {})
    target = type(target)(name="a", call=target.call, reads=target.reads, declares={"row_oder": "x"})
    with pytest.raises(AuditError, match="Did you mean 'row_order'"):
        run_checks(target, CONTRACT)
