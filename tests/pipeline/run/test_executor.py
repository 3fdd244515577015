import json
import logging
import time
from dataclasses import dataclass, replace

import pytest
import torch
import toy_graph as toy

from creditgraph.pipeline.core.component import Component, ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError
from creditgraph.pipeline.core.graph import Graph
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.payloads import Rewards, Weights
from creditgraph.pipeline.core.sockets import Wire
from creditgraph.pipeline.run.compose.experiment import Experiment
from creditgraph.pipeline.run.executor import Executor, RunSettings
from creditgraph.pipeline.run.node_runner import ContractError, NodeFailure
from creditgraph.pipeline.run.run_directory import RunDirectory
from creditgraph.pipeline.run.session import GraphSession


def run_in_memory(graph, iterations=5, overlap=False):
    seen = []

    class Sink:
        def log(self, iteration, metrics):
            seen.append({"iteration": iteration, **metrics})

        def sync(self): ...
        def close(self): ...

    with Executor(graph, RunSettings(iterations=iterations, overlap=overlap), sinks=[Sink()]) as executor:
        executor.setup()
        executor.restore()
        outcome = executor.run()
    return executor, outcome, seen


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_delayed_wire_reads_k_iterations_ago_and_the_initial_value_before(delay):
    _, outcome, rows = run_in_memory(toy.make_graph(delay), iterations=5)
    # learner publishes version i + 1 in iteration i; iteration i reads that of i − k, version max(0, i − k + 1).
    assert [r["score/version"] for r in rows[:5]] == [max(0, i - delay + 1) for i in range(5)]
    assert outcome.status == "finished"
    assert outcome.exit_code == 0


def test_final_pass_sees_the_final_weights_and_runs_nothing_else():
    executor, outcome, rows = run_in_memory(toy.make_graph(2), iterations=4)
    assert rows[-1]["iteration"] == 4
    assert outcome.final["evaluator/version"] == 4
    assert outcome.final["evaluator/accuracy"] == float(executor.components["learner"].weights.sum())
    assert "score/mean" not in rows[-1]
    assert executor.components["source"].position == 4


def test_metrics_carry_node_names_times_and_rejected_rows():
    _, _, rows = run_in_memory(toy.make_graph(1), iterations=4)
    assert rows[0]["source/position"] == 1.0
    assert {"seconds/source", "seconds/learner", "seconds/iteration", "seconds/executor"} <= set(rows[0])
    # Iteration 0 has one from setup beside its own.
    assert [r.get("rejected/source") for r in rows[:4]] == [2.0, None, None, 1.0]


def test_rejected_rows_are_written(tmp_path):
    toy.train(tmp_path / "r", 4)
    rows = [json.loads(line) for line in (tmp_path / "r" / "rejected.jsonl").read_text().splitlines()]
    assert rows == [
        {"node": "source", "iteration": 0, "row": {"row": -1}, "reason": "empty"},
        {"node": "source", "iteration": 0, "row": {"row": 1}, "reason": "no answer"},
        {"node": "source", "iteration": 3, "row": {"row": 4}, "reason": "no answer"},
    ]


def test_values_are_dropped_when_nobody_needs_them():
    executor, _, _ = run_in_memory(toy.make_graph(2), iterations=6)
    assert sorted(executor._values._values) == [("learner", "weights", 4), ("learner", "weights", 5)]


def test_outputs_carry_their_origin_and_a_passed_through_payload_keeps_both():
    seen = []

    class Pass(Component):
        def run(self, *, rewards: Rewards) -> toy.RewardsOut:
            seen.append(rewards)
            return toy.RewardsOut(rewards=rewards)

    graph = toy.make_graph(1)
    nodes = (
        *graph.nodes,
        toy.node("again", Pass, {"rewards": "score.rewards"}),
        toy.node("last", Pass, {"rewards": "again.rewards"}),
    )
    run_in_memory(Graph(nodes), iterations=1)
    assert [r.origin for r in seen] == ["score.rewards", "again.rewards"]
    assert seen[0].value is seen[1].value


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"score_fails": 3}, "score (toy:Score), iteration 3: KeyError: 'lost'"),
        ({"learn_fails": 3}, "learner (toy:Learn), iteration 3: ValueError: diverged"),
    ],
)
def test_a_failure_names_node_and_iteration_and_stops_both_lanes(where, sentence, overlap):
    begin = time.perf_counter()
    with pytest.raises(NodeFailure) as caught:
        run_in_memory(toy.make_graph(2, sleep=0.002, **where), iterations=100_000, overlap=overlap)
    assert str(caught.value) == sentence
    assert caught.value.__cause__ is not None
    assert time.perf_counter() - begin < 60  # to its end it would take 400 seconds


def one_node(cls):
    return Graph((toy.node("node", cls),))


def test_a_users_mistake_stays_one_and_gains_its_place():
    class Bad(Component):
        def run(self) -> toy.RewardsOut:
            raise ConfigError("no such file.")

    with pytest.raises(ConfigError, match=r"^node \(toy:Bad\), iteration 0: no such file\.$"):
        run_in_memory(one_node(Bad))


@dataclass(frozen=True, kw_only=True)
class Two:
    rewards: Rewards
    weights: Weights


def test_wrong_outputs_get_a_sentence():
    class Nothing(Component):
        def run(self) -> toy.RewardsOut:
            return None

    class Mistyped(Component):
        def run(self) -> Two:
            return Two(rewards=Weights(version=0), weights=Weights(version=0))

    with pytest.raises(
        ContractError,
        match=r"node \(toy:Nothing\), iteration 0: run returned None; expected its declared outputs rewards\.",
    ):
        run_in_memory(one_node(Nothing))
    with pytest.raises(ContractError, match=r"output 'rewards' is a Weights; expected Rewards, as declared\."):
        run_in_memory(one_node(Mistyped))
    assert issubclass(ContractError, CreditgraphError)


def test_a_missing_initial_value_is_a_sentence():
    class NoStart(toy.Learn):
        def initial(self):
            return {}

    graph = toy.make_graph(2)
    nodes = tuple(replace(n, cls=NoStart) if n.name == "learner" else n for n in graph.nodes)
    with pytest.raises(
        ConfigError, match=r"learner\.weights: read with '@2', but initial\(\) of toy:Learn returns no value for it"
    ):
        run_in_memory(Graph(nodes))
    experiment = Experiment(run=RunSettings(), model=ModelSpec(), data={}, graph=Graph(nodes), resolved={})
    with (
        GraphSession(experiment) as session,
        pytest.raises(ConfigError, match=r"learner\.weights: read with '@2', but initial\(\) of toy:Learn returns no"),
    ):
        session.value(Wire("learner", "weights", 2), 0)


@dataclass(frozen=True, kw_only=True)
class PolicyOut:
    policy: Policy


def test_more_iterations_continue_a_finished_run(tmp_path):
    toy.train(tmp_path / "a", 4)
    outcome = toy.train(tmp_path / "a", 7)
    toy.train(tmp_path / "b", 7)
    assert outcome.completed == 7
    assert stable(tmp_path / "a") == stable(tmp_path / "b")


def stable(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("seconds/", "utilisation/"))} for row in rows]


def test_evaluate_alone_uses_the_checkpointed_values(tmp_path):
    toy.train(tmp_path / "r", 5, delay=2)
    with (
        RunDirectory.open(tmp_path / "r", {"nodes": {"delay": 2}}) as run,
        Executor(toy.make_graph(2), RunSettings(iterations=5), run=run) as executor,
    ):
        executor.setup()
        assert executor.restore() == 5
        result = executor.evaluate()
    assert result["evaluator/version"] == 5


def test_a_learner_is_never_run_by_an_evaluation():
    class Watch(Component):
        final_pass = True

        def run(self, *, weights: Weights) -> None: ...

    graph = Graph((*toy.make_graph(1).nodes, toy.node("watch", Watch, {"weights": "learner.weights"})))
    with pytest.raises(
        ConfigError, match=r"learner: evaluating evaluator, watch would train it once more; read its output with '@1'"
    ):
        run_in_memory(graph, iterations=1)


def test_state_of_an_unknown_node_is_said(tmp_path, caplog):
    toy.train(tmp_path / "r", 3)
    graph = Graph(
        tuple(
            n
            for n in toy.make_graph(1).nodes
            if n.name == "evaluator" or n.name == "source" or n.name == "score" or n.name == "learner"
        )
    )
    renamed = tuple(replace(n, name="origin") if n.name == "source" else n for n in graph.nodes)
    rewired = tuple(
        replace(
            n,
            wires={
                s: [replace(w, source="origin") if w.source == "source" else w for w in ws] for s, ws in n.wires.items()
            },
        )
        for n in renamed
    )
    with (
        caplog.at_level(logging.WARNING, "creditgraph"),
        RunDirectory.open(tmp_path / "r", {}, allow_changes=True) as run,
        Executor(Graph(rewired), RunSettings(iterations=4), run=run) as executor,
    ):
        executor.setup()
        executor.restore()
    assert "state of node 'source', which this graph lacks" in caplog.text


def test_weights_published_are_snapshots():
    executor, _, _ = run_in_memory(toy.make_graph(1), iterations=2)
    kept = executor._values._values["learner", "weights", 1].tensors["w"]
    assert torch.equal(kept, executor.components["learner"].weights)
    assert kept is not executor.components["learner"].weights


def test_running_before_restore_is_refused():
    with Executor(toy.make_graph(1), RunSettings(iterations=1)) as executor:
        executor.setup()
        with pytest.raises(RuntimeError, match="call setup\\(\\) and restore\\(\\) first"):
            executor.run()
