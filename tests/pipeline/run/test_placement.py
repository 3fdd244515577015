"""Reports of replicas, folded pair by pair as ranks do, against sums and means over all of them."""

import pytest

from pipeline.core.graph import Graph
from pipeline.run.distributed.team import Collectives, Ranks, Team
from pipeline.run.node_runner import NodeReport
from pipeline.run.placement import RankView


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
