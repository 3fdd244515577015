"""The servers of an engine: their pool, the channel for weights, and other replicas that use the same servers."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from creditgraph.components.engine.channel import FileChannel, Update
from creditgraph.components.engine.messages import RowRequest, ScoreRequest, ScoreResponse
from creditgraph.components.engine.probe import Probe
from creditgraph.components.engine.rows import Rows
from creditgraph.components.engine.served.addresses import Address, find_servers, share_gpus, visible_gpus
from creditgraph.components.engine.served.dialect import Dialect
from creditgraph.components.engine.served.pool import ServerPool
from creditgraph.components.engine.served.settings import ServerSettings
from creditgraph.components.engine.served.tasks import Feed, Reset
from creditgraph.components.engine.served.transfer import Links, Transfer
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.core.ranks import same_device


class Servers:
    """An engine's model in servers of any kind (a `Backend`).

    Args:
        context: context of the engine's node.
        dialect: dialect of its servers.
        settings: settings of the servers.
        nodes: nodes over which each server runs that this process starts.
    """

    def __init__(self, context: Context, dialect: Dialect, settings: ServerSettings, nodes: int = 1) -> None:
        self._context = context
        ranks = context.ranks
        # Servers that this process starts are its replica's own; those that run elsewhere are shared by all replicas.
        self._own = not settings.elsewhere
        self._shared = settings.elsewhere and ranks.num_replicas > 1
        self._follows = self._shared and ranks.replica > 0
        gpus: list[list[str]] = []
        device = torch.device(context.device)
        if device.type == "cuda" and self._own:
            visible = visible_gpus()
            gpus = share_gpus(settings.servers, settings.tensor_parallel // nodes, visible, ranks)
            check_kind(settings.channel.kind, gpus, visible[device.index or 0], context.node)
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
            may_start=lambda: not context.slots.learning,
            replica=ranks.replica if self._shared else 0,
            replicas=ranks.num_replicas if self._shared else 1,
        )
        kind = settings.channel.kind
        self._links = Links(device, pool.update_seconds) if kind == "broadcast" else None
        self._streams = kind != "file"
        self._settings = settings.channel
        self._transfer: Transfer | None = None
        self.pool.start()
        if context.slots.shared and self._own:
            try:
                self.pool.sleep()
            except BaseException:
                self.pool.close()
                raise
            context.slots.add_engine(self.pool.sleep)
        context.trace.watch(context.node, self.pool.in_flight)

    def restore(self) -> bool:
        """Returns False: servers always get whole weights, because their previous weights are not known."""
        return False

    def load(self, weights: Weights, probe: Probe | None) -> None:
        """Publishes weights and has every server load them."""
        # The first replica changes the weights when none samples any more; the others then verify them by its checksum.
        if self._follows:
            self._meet("")
            self.pool.update(self._probed(Update.by_another(weights, self._meet("")), probe))
        else:
            stream = self._streams and weights.adapter is None
            update = self._probed(self._stream(weights) if stream else self.channel.publish(weights), probe)
            self._meet("")
            self.pool.update(update)
            self._meet(update.checksum.result())
        for server, begin, end in self.pool.updates:
            name = f"weights {weights.version}"
            self._context.trace.write(name, "weight update", begin, end, server, iteration=self._context.iteration)
        if probe is not None:
            self._context.log(update_difference=max(server.difference for server in self.pool.servers))
        self.channel.retire(weights.version)

    def _probed(self, update: Update, probe: Probe | None) -> Update:
        if probe is None:
            return update
        written = [] if update.transfer is not None else [update.checksum]
        expected = self._executor.submit(self._expected, probe, torch.get_num_threads(), written)
        return dataclasses.replace(update, probe=probe, expected=expected)

    def _stream(self, weights: Weights) -> Update:
        """An update of tensors that come to the servers without files."""
        if self._transfer is not None:
            self._transfer.close()
        dtype = self._settings.sent_dtype(self._context.model)
        size = self._settings.bucket_mb << 20
        self._transfer = Transfer(weights.pairs, weights.version, dtype, size, self._links)
        return Update(version=weights.version, checksum=self._transfer.checksum, transfer=self._transfer)

    @staticmethod
    def _expected(probe: Probe, threads: int, written: list[Future[str]]) -> list[float]:
        """Log-probs of the probe; computed in a thread while servers load, once the files they need are written."""
        wait(written)
        torch.set_num_threads(threads)  # OpenMP counts for each thread that starts work
        return probe.expected()

    def _meet(self, checksum: str) -> str:
        """Waits for the other replicas that use the same servers; returns what the first one has sent."""
        if not self._shared:
            return checksum
        first: str = self._context.exchange([checksum] * self._context.ranks.num_replicas)[0]
        return first

    def sample(self, rows: Rows) -> None:
        """Sends one request per row, which ends with the row."""
        self.pool.generate(rows.start(), rows.feed, rows.reset)

    def converse(self, rows: int, follow: Callable[[int], RowRequest | None], feed: Feed, reset: Reset) -> bool:
        """Each row goes on by itself, where its first prompt is cached."""
        self.pool.converse(rows, follow, feed, reset)
        return True

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
        if self._transfer is not None:
            self._transfer.close()
        if self._links is not None:
            self._links.close()
        self._executor.shutdown()
        self.channel.close()
        if self._scratch is not None:
            self._scratch.cleanup()


def check_kind(kind: str, gpus: Sequence[Sequence[str]], own: str, node: str) -> None:
    """Raises ConfigError for servers that cannot get weights in this way.

    Args:
        kind: `ChannelSettings.kind`.
        gpus: GPUs of each server that this process starts.
        own: the GPU of this process.
        node: of the engine, for messages.
    """
    used = [gpu for each in gpus for gpu in each]
    if kind == "broadcast" and own in used:
        raise ConfigError(
            f"{node}.channel.kind: expected servers on other GPUs than the learner's for 'broadcast', because NCCL "
            f"takes each GPU once, got a server on GPU {own}, which the learner has too. Set {node}.channel.kind=ipc "
            "(one server of one GPU for each rank) or file."
        )
    if kind == "ipc" and set(used) != {own}:
        raise ConfigError(
            f"{node}.channel.kind: expected servers on GPU {own}, the learner's, for 'ipc', got some on "
            f"{', '.join(sorted(set(used) - {own}))}. Set {node}.channel.kind=broadcast for GPUs of their own, or file."
        )
