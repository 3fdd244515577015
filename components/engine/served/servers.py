"""The servers of an engine: their pool, the channel for weights, and other replicas that use the same servers."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from components.engine.channel import FileChannel
from components.engine.messages import ScoreRequest, ScoreResponse
from components.engine.probe import Probe
from components.engine.rows import Rows
from components.engine.served.addresses import Address, find_servers, share_gpus, visible_gpus
from components.engine.served.dialect import Dialect
from components.engine.served.pool import ServerPool
from components.engine.served.settings import ServerSettings
from pipeline.core.component import Context, same_device
from pipeline.core.payloads import Weights


class Servers:
    """An engine's model in servers of any kind (a `Backend`).

    Args:
        context: context of the engine's node.
        dialect: dialect of its servers.
        settings: settings of the servers.
    """

    def __init__(self, context: Context, dialect: Dialect, settings: ServerSettings) -> None:
        self._context = context
        ranks = context.ranks
        # Servers that this process starts are its replica's own; those that run elsewhere are shared by all replicas.
        self._own = not settings.elsewhere
        self._shared = settings.elsewhere and ranks.num_replicas > 1
        self._follows = self._shared and ranks.replica > 0
        gpus: list[list[str]] = []
        if torch.device(context.device).type == "cuda" and self._own:
            gpus = share_gpus(settings.servers, settings.tensor_parallel, visible_gpus(), ranks)
        addresses = find_servers(settings, context.node, ranks.replica, gpus)
        # Replicas that start their own servers share the run directory, and perhaps a host.
        pool = settings.pool
        if pool.port and self._own:
            pool = dataclasses.replace(pool, port=pool.port + ranks.replica * settings.servers)
        self._executor = ThreadPoolExecutor(1, "creditgraph-probe", same_device())
        self._scratch = None if context.run_dir else tempfile.TemporaryDirectory(prefix="creditgraph-run-")
        folder = context.run_dir or Path(self._scratch.name if self._scratch else ".")
        self.channel = FileChannel(settings.channel, settings.channel.sent_dtype(context.model), near=self._own)
        self.pool = ServerPool(
            dialect,
            pool,
            addresses,
            folder,
            context.node,
            [self.channel.folder, *([folder] if self._scratch else [])],
            f"engines.{ranks.replica}.json" if ranks.replica else "engines.json",
        )
        self.pool.start()
        context.trace.watch(context.node, self.pool.in_flight)

    def restore(self) -> bool:
        """Returns False: servers always get whole weights, because their previous weights are not known."""
        return False

    def load(self, weights: Weights, probe: Probe | None) -> None:
        """Publishes weights and has every server load them."""
        if self._follows:
            update = self.channel.describe(weights)
        else:
            update = self.channel.publish(weights)
        if probe is not None:
            expected = self._executor.submit(self._expected, probe, torch.get_num_threads(), update.checksum)
            update = dataclasses.replace(update, probe=probe, expected=expected)
        # The first replica changes the weights when none samples any more; the others then verify them.
        self._meet()
        if self._follows:
            self._meet()
        self.pool.update(update)
        if not self._follows:
            self._meet()
        for server, begin, end in self.pool.updates:
            name = f"weights {weights.version}"
            self._context.trace.write(name, "weight update", begin, end, server, iteration=self._context.iteration)
        if probe is not None:
            self._context.log(update_difference=max(server.difference for server in self.pool.servers))
        self.channel.retire(weights.version)

    @staticmethod
    def _expected(probe: Probe, threads: int, written: Future[str]) -> list[float]:
        """Log-probs of the probe; computed in a thread while servers load, once the files they need are written."""
        wait([written])
        torch.set_num_threads(threads)  # OpenMP counts for each thread that starts work
        return probe.expected()

    def _meet(self) -> None:
        """Waits for the other replicas that use the same servers."""
        if self._shared:
            self._context.all_sum(torch.zeros(1))

    def sample(self, rows: Rows) -> None:
        """Sends one request per row, which ends with the row."""
        self.pool.generate(rows.start(), rows.feed, rows.reset)

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResponse]:
        """Sends each row to the server that has its context cached."""
        return self.pool.score(requests)

    def addresses(self) -> list[Address]:
        """The addresses of the servers."""
        return [server.address for server in self.pool.servers]

    def take_counters(self) -> dict[str, float]:
        """The pool's counts since the last call."""
        self._context.log(servers_ready=self.pool.num_ready())
        return self.pool.take_counters()

    def close(self) -> None:
        """Ends the servers and removes their weight files."""
        self.pool.close()
        self._executor.shutdown()
        self.channel.close()
        if self._scratch is not None:
            self._scratch.cleanup()
