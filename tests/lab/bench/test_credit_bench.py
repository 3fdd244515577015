"""Running the credit part of recipes, and the whole bench on two problems."""

import json
import math

import pytest
import torch

from creditgraph.lab.bench.credit_bench import EXACT, CreditBench, Options, choose_rows
from creditgraph.lab.bench.credit_report import cell, draw, table
from creditgraph.lab.bench.measured_run import MeasuredRun, shared_outputs
from creditgraph.lab.bench.methods import BASELINE, METHODS, Method
from creditgraph.pipeline.app.credit.sessions import learner_of
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.payloads import Prompts, Weights

SMALL = ("prompts.batch=2", "data.train.size=40", "sampler.group_size=4")


@pytest.fixture(scope="module")
def weights():
    from creditgraph.components.models.load import resolve_model_path

    return Weights(version=0, path=resolve_model_path("tiny"))


@pytest.fixture(scope="module")
def grpo(weights):
    experiment = BASELINE.experiment(*SMALL)
    with MeasuredRun(experiment, 0, weights, uids_from_top=True) as run:
        yield experiment, run


def test_credit_is_what_the_learner_would_read(grpo):
    _, run = grpo
    assert len(run.trajectories) == 8
    assert torch.equal(run.credit.uid, run.trajectories.uid)
    assert run.rollouts == ["sampler"]
    assert "evaluator" not in run.by_node
    assert "learner" not in run.by_node
    assert run.cost(rollouts=True).sampled_tokens == len(run.trajectories.response_tokens.values)
    assert run.cost(rollouts=False).sampled_tokens == 0


SAMPLERS = ("grpo", "srpo", "rredcot", "vineppo", "spo_tree", "treerl", "ibpo", "score", "critique_grpo")


@pytest.mark.parametrize("method", [m for m in METHODS if m.name in SAMPLERS], ids=lambda m: m.name)
def test_every_node_that_samples_says_how_much(weights, method):
    # Token sums of iterations with an evaluation rest on the nodes' own counts.
    experiment = method.experiment("prompts.batch=2", "data.train.size=40")
    with MeasuredRun(experiment, 0, weights) as run:
        by_engine = run.cost(rollouts=True).sampled_tokens + run.cost(rollouts=False).sampled_tokens
        assert run.logged("sampled_tokens") == by_engine > 0


def test_rollouts_are_shared_where_they_are_sampled_alike(grpo, weights):
    _, run = grpo
    other = Method("drgrpo", "toy_drgrpo").experiment(*SMALL)
    given = shared_outputs(other.graph, run)
    assert sorted(given) == ["prompts", "sampler"]
    with MeasuredRun(other, 0, weights, shared=given, shared_costs={n: run.costs[n] for n in given}) as second:
        assert torch.equal(second.trajectories.uid, run.trajectories.uid)
        assert not second.own_rollouts
        assert second.cost(rollouts=True) == run.cost(rollouts=True)
    hotter = Method("hot", "toy_grpo", ("sampler.temperature=0.5",)).experiment(*SMALL)
    assert sorted(shared_outputs(hotter.graph, run)) == ["prompts"]


def test_own_rollouts_answer_the_same_prompts_under_other_uids(grpo, weights):
    _, run = grpo
    resets = Method("srpo_oracle", "toy_srpo_oracle").experiment("prompts.batch=2", "data.train.size=40")
    given = shared_outputs(resets.graph, run)
    with MeasuredRun(resets, 0, weights, shared=given) as own:
        assert own.own_rollouts
        assert set(own.trajectories.prompt_uid.tolist()) <= set(run.by_node["prompts"]["batch"].uid.tolist())
        assert not set(own.trajectories.uid.tolist()) & set(run.trajectories.uid.tolist())
        assert own.cost(rollouts=True).sampled_tokens > 0
        assert "prompts" in own.shared


def test_payloads_are_found_by_kind(grpo):
    _, run = grpo
    assert run.first(Prompts) is run.by_node["prompts"]["batch"]
    assert isinstance(run.first(Verifier), Verifier)
    assert run.first(Policy).version == 0
    with pytest.raises(ConfigError, match="the graph has no Weights"):
        run.first(Weights)


def test_a_graph_without_a_learner_of_credit_is_refused(grpo):
    from creditgraph.pipeline.core.graph import Graph

    experiment, _ = grpo
    bare = Graph(tuple(n for n in experiment.graph.nodes if n.name != "learner"))
    with pytest.raises(ConfigError, match=r"0 nodes of the graph .* expected exactly one"):
        learner_of(bare)


def test_rows_are_chosen_by_key(grpo):
    _, run = grpo
    assert choose_rows(run.trajectories.uid, 8, 0).tolist() == list(range(8))
    some = choose_rows(run.trajectories.uid, 3, 0)
    assert len(some) == 3
    assert some.tolist() == sorted(some.tolist())
    assert some.tolist() == choose_rows(run.trajectories.uid, 3, 0).tolist()


def test_the_whole_bench(tmp_path):
    methods = [BASELINE, Method("drgrpo", "toy_drgrpo"), Method("srpo_oracle", "toy_srpo_oracle")]
    options = Options(samples=4, max_rows=6, overrides=("prompts.batch=3", "data.train.size=60"))
    result = CreditBench(methods, [0, 1], options).measure()
    entries = result["methods"]
    assert list(entries) == [EXACT, "grpo", "drgrpo", "srpo_oracle"]
    assert entries[EXACT]["mean"]["spearman"][0] == pytest.approx(1.0)
    assert entries["grpo"]["tokens_relative"][0] == pytest.approx(1.0) or math.isnan(
        entries["grpo"]["tokens_relative"][0]
    )
    # the same rollouts: the same places of credit, and uniform credit within a chain
    first = entries["grpo"]["seeds"][0]
    assert first["thoughts"] == entries["drgrpo"]["seeds"][0]["thoughts"]
    assert first["error_share"] == pytest.approx(first["uniform_share"]) or math.isnan(first["error_share"])
    assert entries["grpo"]["own_rollouts"] is False
    assert entries["srpo_oracle"]["own_rollouts"] is True
    assert entries["srpo_oracle"]["seeds"][0]["rollout_tokens"] > 0
    text = table(result)
    assert len(text.splitlines()) == 2 + 4 + 3
    assert "2 seeds" in text
    draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    json.dumps(result)


def test_a_failing_method_is_named_and_the_others_are_measured():
    # A kind of engine without attribution: the node refuses while it runs.
    broken = Method(
        "broken", "toy_rredcot", ("value.use=value.gradient_attribution", "~value.value", "engine.attributions=false")
    )
    options = Options(samples=2, overrides=("prompts.batch=2", "data.train.size=40"))
    result = CreditBench([BASELINE, broken], [0], options).measure()
    assert list(result["methods"]) == [EXACT, "grpo"]
    assert "gradients need attributions on" in result["failed"]["broken"]
    assert "Failed: broken (value (value.gradient_attribution)" in table(result)


def test_cells():
    assert cell((0.414, 0.026), 2) == "0.41 ±0.03"
    assert cell((0.414, math.nan), 2) == "0.41"
    assert cell((math.nan, math.nan), 2) == "-"
