"""Reports of replicas, folded pair by pair as ranks do, against sums and means over all of them."""

from dataclasses import dataclass

import pytest
import torch

from creditgraph.pipeline.core.component import Component, ModelSpec
from creditgraph.pipeline.core.encoding import decode
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.graph import Graph, build_graph
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import TokenLogprobs, TrainReport
from creditgraph.pipeline.core.sockets import Node
from creditgraph.pipeline.core.trace import NO_TRACE
from creditgraph.pipeline.run.distributed.team import Collectives, Ranks, Team
from creditgraph.pipeline.run.executor import Executor
from creditgraph.pipeline.run.node_runner import NodeReport
from creditgraph.pipeline.run.placement import RankView
from creditgraph.pipeline.run.run_settings import RunSettings

said = []
NOTHING = TrainReport(metrics={}, seconds={})


@dataclass(frozen=True, kw_only=True)
class Text:
    text: TrainReport


@dataclass(frozen=True, kw_only=True)
class Report:
    report: TrainReport


class Engines(Component):
    """An engine on the learner's GPUs."""

    @classmethod
    def shares_devices(cls, config, device, world):
        return True

    def setup(self, context):
        super().setup(context)
        context.slots.add_engine(lambda: said.append("engine gives back"))

    def run(self, *, report: TrainReport) -> Text:
        said.append("engine runs")
        return Text(text=NOTHING)


class Learner(Component):
    placement = "collective"

    def setup(self, context):
        super().setup(context)
        context.slots.begin()
        context.slots.add_learner(lambda: said.append("learner offloads"), lambda: said.append("learner onloads"))
        said.append("learner is set up")

    def initial(self):
        return {"report": NOTHING}

    def run(self, *, text: TrainReport) -> Report:
        self.context.slots.begin()
        said.append("learner runs")
        return Report(report=NOTHING)


def report(replica):
    metrics = {"score/rows": 10.0 + replica, "score/mean": 0.1 * replica, "seconds/score": float((replica * 7) % 5)}
    metrics |= {"score/odd": 3.0 * replica} if replica % 2 else {}
    return NodeReport(metrics, [{"row": replica}], metrics["seconds/score"], {"score/rows"})


class OfAll(Collectives):
    """Rank 0's lane, with the other replicas' values made on the spot, folded as a tree."""

    def __init__(self, replicas):
        self.replicas = replicas

    def fold_to_first(self, value, fold):
        others = []
        for replica in range(1, self.replicas):
            made = report(replica)
            packed = [{k: [v, 1] for k, v in made.metrics.items()}, made.rejected, made.seconds, sorted(made.counts)]
            others.append({"score": packed})
        values = [value, *others]
        while len(values) > 1:
            values = [fold(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
        return values[0]


class TwoReplicas(OfAll):
    """Rank 0's lane; the other replica has row 8."""

    def to_first(self, value):
        other = logprobs(8)
        return [value, dict.fromkeys(value, other) if isinstance(value, dict) else other]


class Pair(Team):
    def collectives(self, name):
        return TwoReplicas(2)


def logprobs(*uids):
    return TokenLogprobs(uid=torch.tensor(uids), logprobs=Jagged.from_rows([[float(u)] for u in uids], torch.float32))


class Made(Team):
    def collectives(self, name):
        return OfAll(self.ranks.num_replicas)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_merged_reports_are_sums_means_and_the_slowest(replicas):
    place = RankView(Graph(()), Made(Ranks(world=replicas, num_replicas=replicas)))
    result = place.merge({"score": report(0)})["score"]
    all_of_them = [report(r) for r in range(replicas)]
    odd = [3.0 * r for r in range(replicas) if r % 2]
    assert result.metrics == pytest.approx(
        {
            "score/rows": sum(10.0 + r for r in range(replicas)),
            "score/mean": sum(0.1 * r for r in range(replicas)) / replicas,
            "score/odd": sum(odd) / len(odd),
            "seconds/score": max(r.seconds for r in all_of_them),
        }
    )
    assert result.rejected == [{"row": r} for r in range(replicas)]
    assert result.seconds == max(r.seconds for r in all_of_them)
    assert result.counts == {"score/rows"}


class Alone(Engines):
    """An engine on GPUs of its own."""

    @classmethod
    def shares_devices(cls, config, device, world):
        return False


def runners(delay, overlap=True, use="Engines"):
    nodes = {"engine": {"use": f"{__name__}:{use}", "in": {"report": f"learner.report@{delay}"}}}
    nodes["learner"] = {"use": f"{__name__}:Learner", "in": {"text": "engine.text"}}
    graph = build_graph({"nodes": nodes})
    view = RankView(graph, Team())
    made = view.runners(RunSettings(overlap=overlap, device="cpu"), ModelSpec(), {}, None, NO_TRACE)
    return view, {name: runner.context for name, runner in made.items()}


def test_outputs_may_be_alive_where_every_reader_is_done_before_the_node_runs_again():
    assert runners(1)[1]["learner"].lockstep
    assert not runners(2, use="Alone")[1]["learner"].lockstep
    assert not runners(2, overlap=False)[1]["learner"].lockstep, "an older version is read"


def test_nodes_that_share_devices_take_turns():
    view, contexts = runners(1)
    assert view.slots.shared
    assert contexts["engine"].slots is contexts["learner"].slots is view.slots
    assert not runners(1, use="Alone")[0].slots.shared
    with pytest.raises(ConfigError, match=r"engine: expected a learner that waits while engine samples, .*sleep=never"):
        runners(2)


def test_the_learners_turn_lasts_from_its_setup_to_the_next_iteration(tmp_path):
    said.clear()
    view, _ = runners(1)
    with Executor(view.graph, RunSettings(iterations=2, device="cpu")) as executor:
        executor.setup()
        executor.restore()
        executor.run()
    turn = ["engine gives back", "learner onloads"]
    once = ["learner offloads", "engine runs", *turn, "learner runs"]
    assert said == ["engine gives back", "learner is set up", *once, *once, "learner offloads"]


def test_batches_of_collective_nodes_belong_to_replicas():
    node = Node("scored", "toy:Learner", Learner, Learner.Config(), {}, {})
    graph = Graph((node,))
    view = RankView(graph, Pair(Ranks(world=2, num_replicas=2)))
    assert view.recorded(node, logprobs(6, 7)).uid.tolist() == [6, 7, 8]
    assert view.recorded(node, NOTHING) is NOTHING
    # In a checkpoint too: each replica gets its own again, and one process the rows of all.
    held = [("scored", "logprobs", 0, logprobs(6, 7)), ("scored", "report", 0, NOTHING)]
    groups = {name: decode(group) for name, group in view.in_flight(held, 1).items()}
    assert sorted(groups) == ["values", "values@1"]
    for rank, world, rows in ((0, 2, [6, 7]), (1, 2, [8]), (0, 1, [6, 7, 8])):
        again = RankView(graph, Team(Ranks(rank=rank, world=world, num_replicas=world))).values_of(dict(groups))
        assert again["scored", "logprobs", 0].uid.tolist() == rows
        assert isinstance(again["scored", "report", 0], TrainReport)
