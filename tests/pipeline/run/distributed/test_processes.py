"""The same graph on one rank and on several, in real processes: same results, one run directory, first error first."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from creditgraph.pipeline.core.graph import build_graph
from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.distributed.team import DistributedError, allow_files, first_host, plan_ranks, rendezvous
from creditgraph.pipeline.run.distributed.wire_format import join, pack, unpack
from creditgraph.pipeline.run.metrics import read_metrics
from creditgraph.pipeline.run.recording import read_payload
from creditgraph.pipeline.run.timeline.files import read_trace
from creditgraph.pipeline.run.timeline.heartbeat import heartbeats

RANK_GRAPH = Path(__file__).parents[2] / "toys" / "rank_graph.py"


class Outcome:
    """How the ranks of a run ended."""

    def __init__(self, path, codes, seconds):
        self.path, self.codes, self.seconds = path, codes, seconds

    def text(self, rank):
        return Path(f"{self.path}.{rank}").read_text()

    @property
    def metrics(self):
        return read_metrics(self.path / "metrics.jsonl")

    def weights(self):
        """Of the newest checkpoint, from its shards."""
        newest = max(p for p in (self.path / "checkpoints").iterdir() if p.name.isdigit())
        shards = sorted((newest / "shards" / "learner").iterdir())
        return [x for shard in shards for x in json.loads(shard.read_text())]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "OMP_NUM_THREADS": "1"}
    environment = {
        k: v for k, v in environment.items() if not k.startswith("SLURM_") and k not in ("RANK", "WORLD_SIZE")
    }
    folder = tmp_path_factory.mktemp("ranks")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(RANK_GRAPH)], env=environment, **pipes) as server:
        assert json.loads(server.stdout.readline()) == "ready"

        def start(world, name, **options):
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            path = folder / name
            server.stdin.write(json.dumps({"world": world, "path": str(path), "port": port, **options}) + "\n")
            server.stdin.flush()
            return Outcome(path, *json.loads(server.stdout.readline()))

        yield start
        server.stdin.close()


@pytest.fixture(scope="module")
def alone(launch):
    return launch(1, "alone")


@pytest.mark.parametrize(("world", "size"), [(2, 1), (4, 2), (2, 2)])
def test_several_ranks_end_with_the_weights_of_one(launch, alone, world, size):
    result = launch(world, f"world{world}x{size}", size=size)
    assert result.codes == [0] * world, result.text(0)
    assert result.weights() == pytest.approx(alone.weights(), rel=1e-12)
    keys = [
        "score/mean",
        "score/rows",
        "learner/norm",
        "learner/rows",
        "evaluator/accuracy",
        "source/position",
        "score/version",
    ]
    for one, many in zip(alone.metrics, result.metrics, strict=True):
        assert {k: many[k] for k in keys if k in one} == pytest.approx({k: one[k] for k in keys if k in one})
    replicas = world // size
    assert result.metrics[0]["evaluator/replicas"] == replicas
    assert result.metrics[0]["rejected/source"] == replicas  # a row of each replica
    rejected = [json.loads(line) for line in (result.path / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == replicas * 5
    assert all("iteration" not in result.text(r) for r in range(1, world))  # rank 0 alone shows progress


def test_records_hold_all_replicas_in_one_file(launch, alone):
    result = launch(2, "records", iterations=1)
    for output in ("source.batch", "score.rewards", "score.credit"):
        one, two = (read_payload(x.path / "record" / output / "000000.parquet") for x in (alone, result))
        assert one.uid.tolist() == two.uid.tolist()
        assert one.origin == two.origin == output
    assert one.advantage.equal(two.advantage)


def test_overlapping_lanes_and_a_late_wire(launch):
    runs = [launch(world, f"overlap{world}", delay=2, late=True) for world in (1, 2)]
    assert [r.codes for r in runs] == [[0], [0, 0]], runs[1].text(0)
    assert runs[1].weights() == pytest.approx(runs[0].weights(), rel=1e-12)


def test_traces_of_ranks_fit_on_one_clock(launch):
    result = launch(2, "traces", iterations=3)
    assert result.codes == [0, 0], result.text(0)
    spans = {}
    for rank in range(2):
        events, bad = read_trace(result.path / "traces" / f"rank-{rank}.json")
        assert bad == 0
        assert {e["pid"] for e in events} == {rank}
        for e in events:
            if e["ph"] == "X" and "iteration" in e["args"]:
                spans[rank, e["name"], e["cat"], e["args"]["iteration"]] = (e["ts"], e["ts"] + e["dur"])
    for i in range(3):
        # Each learner begins after every rank has scored, for it gets all rows. Clocks of one host differ by what a
        # barrier takes, which is long on a busy machine.
        scored = max(spans[r, "score", "verification", i][1] for r in range(2))
        assert all(spans[r, "learner", "learning", i][0] >= scored - 1_000_000 for r in range(2))
    assert [b["rank"] for b in heartbeats(result.path)] == [0, 1]
    assert result.metrics[0]["utilisation/learner"] <= 1


def test_resumes_at_another_number_of_replicas(launch):
    """2 replicas, then 1, then 3: data position, weights in shards and rollouts in flight go on as in one run."""
    expected = launch(1, "whole", late=True, iterations=6)
    for world, iterations in ((2, 2), (1, 4), (3, 6)):
        actual = launch(world, "changing", late=True, iterations=iterations)
        assert actual.codes == [0] * world, actual.text(0)
    assert "continuing after iteration 3" in actual.text(0)
    assert actual.weights() == pytest.approx(expected.weights(), rel=1e-12)
    assert [m["iteration"] for m in actual.metrics if "learner/norm" in m] == list(range(6))


def test_a_stop_seen_by_one_rank_stops_all_and_the_run_goes_on(launch, alone):
    stopped = launch(2, "stopped", fault=["score", 1, 1, "stop"])
    assert stopped.codes == [75, 75]
    assert len(stopped.metrics) == 2
    assert launch(2, "stopped").codes == [0, 0]
    assert Outcome(stopped.path, [], 0).weights() == pytest.approx(alone.weights(), rel=1e-12)
    lanes = launch(2, "stopped_lanes", delay=2, iterations=40, every=0, fault=["score", 1, 3, "stop"])
    assert lanes.codes == [75, 75]
    assert len(lanes.metrics) < 60


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (["score", 1, 2, "raise"], {}),
        (["score", 0, 2, "raise"], {"delay": 2}),  # in the generation thread of the rank that serves the store
        (["learner", 1, 2, "diverge"], {"size": 2}),
    ],
)
def test_the_first_error_is_in_front_on_every_rank(launch, fault, options):
    node, rank, _, what = fault
    result = launch(2, f"{node}{rank}{what}", fault=fault, **options)
    assert 0 not in result.codes
    assert result.seconds < 30
    text = "no rows left on score" if what == "raise" else "FloatingPointError: diverged"
    for r in range(2):
        last = [line for line in result.text(r).splitlines() if line.startswith(("creditgraph:", "(rank"))]
        assert last[0].startswith(f"creditgraph: rank {rank} ({socket.gethostname()}): ")
        assert (
            f"{node} (toy:{node.title().replace('er', '') if node == 'learner' else 'Score'}), iteration 2" in last[0]
        )
        assert text in last[0]
        assert last[1:] == ([] if r == rank else [f"(rank {r} stops because of it)"])


@pytest.mark.parametrize(
    ("rank", "text"), [(1, "rank 1 died without reporting an error (killed"), (0, "rank 0: the store is gone")]
)
def test_a_killed_rank_is_named_by_the_other(launch, rank, text):
    result = launch(2, f"killed{rank}", fault=["source", rank, 2, "kill"])
    assert result.codes[rank] == -9
    assert result.codes[1 - rank] == 1
    assert result.seconds < 30
    assert text in result.text(1 - rank)


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_waits_for_a_living_one_as_long_as_it_takes(launch, alone, size):
    """Size 2: rank 1 waits for its leader's whole generation. Size 1: rank 0 waits for the other replica's."""
    result = launch(2, f"long{size}", size=size, fault=["score", 2 - size, 2, "sleep"], sleep=12, dead=6, patience=4)
    assert result.codes == [0, 0], result.text(0)
    assert result.weights() == pytest.approx(alone.weights(), rel=1e-12)
    late = "s for other ranks, which are alive (rank 1 in score of iteration 2 since "
    assert (late in result.text(0)) == (size == 1)


@pytest.mark.parametrize(
    ("rank", "text"),
    [(1, "rank 1 gave no sign of life for 6 s"), (0, "rank 0: its store gave no sign of life for 6 s")],
)
def test_a_silent_rank_is_dead_although_its_connections_are_open(launch, rank, text):
    """SIGSTOP is what others see of a host that lost its power: no packet says that it is gone."""
    result = launch(2, f"frozen{rank}", fault=["score", rank, 2, "freeze"], dead=6)
    assert result.codes[1 - rank] == 1
    assert result.seconds < 60
    assert text in result.text(1 - rank)


def test_ranks_that_do_not_fit_are_reported_before_anything_loads(launch):
    result = launch(3, "odd", size=2)
    assert result.codes == [2, 2, 2]
    assert (
        "'learner' (toy:Learn): one replica takes 2 processes, but the run has 3; expected a multiple. Start "
        "2 or 4, for "
        "example "
        "torchrun --nproc-per-node 2 --no-python creditgraph train …"
    ) in result.text(0)
    assert not result.path.exists()
    assert "the run has 1; expected a multiple. Start 2, or a multiple of it" in launch(1, "few", size=2).text(0)


def test_environments():
    assert rendezvous({}).ranks == Ranks()
    batch_script = {"SLURM_JOB_ID": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert rendezvous(batch_script).ranks == Ranks()
    step = {
        **batch_script,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[02-03]",
    }
    result = rendezvous(step)
    assert (result.ranks, result.address, result.port, result.hosts_store) == (
        Ranks(rank=5, world=8, local_rank=1),
        "n02",
        20004,
        False,
    )
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "7"}
    assert rendezvous(torchrun).hosts_store
    assert not rendezvous({**torchrun, "TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    with pytest.raises(
        DistributedError,
        match=r"expected all .* torchrun sets, got RANK without WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
    ):
        rendezvous({"RANK": "0"})
    with pytest.raises(DistributedError, match=r"WORLD_SIZE is 'two'; expected a number"):
        rendezvous({**torchrun, "WORLD_SIZE": "two"})
    with pytest.raises(DistributedError, match=r"rank 2 of 2 processes; expected 0 to 1"):
        rendezvous({**torchrun, "RANK": "2"})
    with pytest.raises(DistributedError, match=r"expected a node list such as node\[01-04\], got ''"):
        first_host("")


def test_replicas_are_limited(srpo):
    graph = build_graph({"nodes": srpo})
    assert plan_ranks(graph, Ranks(rank=3, world=4)).replica == 3
    with pytest.raises(DistributedError, match=r"2000 replicas; expected at most 1024"):
        plan_ranks(graph, Ranks(rank=3, world=2000))


def test_the_limit_of_open_files_is_raised_or_refused_before_the_start(srpo, monkeypatch):
    graph = build_graph({"nodes": srpo})
    limits, chosen = [1024, 5000], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: chosen.append(limit))
    allow_files(graph, 512)  # 1,024 + 4 × 511
    assert chosen == [(3068, 5000)]
    with pytest.raises(DistributedError, match=r"at least 5,116 for 1,024 ranks, got a hard limit of 5,000"):
        allow_files(graph, 1024)
    monkeypatch.setattr(graph["learner"].cls, "files", classmethod(lambda cls, config, world: 13 * (world - 1)))
    with pytest.raises(DistributedError, match=r"at least 9,711 for 512 ranks \(6,643 of learner \("):
        allow_files(graph, 512)
    assert len(chosen) == 1


def test_values_travel_bit_for_bit():
    value = {
        ("node", "out", -1): [
            torch.tensor([float("nan"), -0.0]),
            torch.arange(3, dtype=torch.bfloat16),
            torch.tensor(True),
            None,
        ],
        "odd": torch.zeros(3, 0, dtype=torch.int8),
        "text": "ü",
    }
    result = unpack(pack(value))
    assert list(result) == list(value)
    for a, b in zip(result["node", "out", -1][:3], value["node", "out", -1][:3], strict=True):
        assert a.dtype == b.dtype
        assert (
            a.view(torch.uint8 if a.dtype == torch.bool else torch.int16).tolist()
            == b.view(torch.uint8 if b.dtype == torch.bool else torch.int16).tolist()
        )
    assert result["odd"].shape == (3, 0)
    assert join([3, 4]) == 3
