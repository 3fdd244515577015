"""Two replicas of a learner that share two servers: the first changes the weights, between the requests of both."""

import threading

import pytest
import torch

from creditgraph.components.engine.channel import ChannelSettings
from creditgraph.components.engine.served.servers import Servers
from creditgraph.components.engine.served.settings import PoolSettings, ServerSettings
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.ranks import Ranks


def refuse():
    raise AssertionError("a replica that does not send weights has read them")


class Replica:
    """One rank's pool on servers that somebody else keeps."""

    def __init__(self, rank, keeper, barrier, sent):
        self.met, self.first = 0, rank == 0

        def exchange(parts):
            self.met += 1
            sent[rank] = parts
            barrier.wait(60.0)
            received = [part[rank] for part in sent]
            barrier.wait(60.0)
            return received

        ranks, spec = Ranks(rank=rank, world=2, num_replicas=2), ModelSpec(path="tiny", dtype="float32")
        folder = keeper.folder / f"rank-{rank}"
        folder.mkdir()
        context = Context(node="engine", model=spec, ranks=ranks, run_dir=folder, exchange=exchange)
        settings = ServerSettings(
            addresses=tuple(s.address.url for s in keeper.pool.servers),
            key_file=keeper.key_file(),
            pool=PoolSettings(start_seconds=60.0, update_seconds=60.0, hang_seconds=30.0),
            channel=ChannelSettings(path=str(keeper.folder / "shm")),
        )
        self.servers = Servers(context, keeper.pool._dialect, settings)
        self.keeper = keeper

    def work(self, versions):
        """Loads and samples, as an engine does every iteration."""
        for version in versions:
            tensors = {f"layer.{n}": torch.full((4, 3), float(version + n)) for n in range(12)}
            # The second replica has what the first one has; it need not read it.
            stream = None if self.first else refuse
            self.servers.load(Weights(version=version, tensors=tensors if self.first else None, stream=stream), None)
            rows = self.keeper.rows(3, 4)
            self.servers.sample(rows)
            done = rows.completions()
            for row in range(12):
                assert done.tokens.row(row).tolist() == self.keeper.tokens(row, 8)
                assert done.logprobs.row(row).tolist() == pytest.approx(
                    self.keeper.logprobs(version, self.keeper.tokens(row, 8))
                )


def test_two_replicas_share_two_servers(fleet):
    keeper = fleet(2, options=["--seconds", "0.1"])
    barrier, sent = threading.Barrier(2), [None, None]
    replicas = [Replica(rank, keeper, barrier, sent) for rank in range(2)]
    failures = []

    def work(replica):
        try:
            replica.work([1, 2, 3])
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(replica,)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert not failures
        assert [replica.met for replica in replicas] == [6, 6]
        loaded = [(e["server"], e["loaded"]) for e in keeper.records() if "loaded" in e]
        assert len(loaded) == len(set(loaded)) == 6  # every server once per version, by the first replica
        assert all(replica.servers.pool.take_counters().get("retries", 0) == 0 for replica in replicas)
    finally:
        for replica in replicas:
            replica.servers.close()
