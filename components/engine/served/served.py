"""An external engine whose model runs in servers: what stands between its component and a pool, for every dialect."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch

from components.engine.adapters import merged
from components.engine.served.channel import ChannelSettings, FileChannel, as_sent
from components.engine.served.dialect import Dialect, Probe, ScoreAnswer, ScoreAsk
from components.engine.served.external import ExternalEngine, ExternalPolicy, check_score, reference_logprobs
from components.engine.served.member import PoolSettings
from components.engine.served.pool import ServerPool
from components.engine.served.rows import Rows
from components.engine.served.server import Address, find_servers, share_gpus, visible_gpus
from components.engine.weights import local_folder
from pipeline.core.payloads import Weights

PROBE_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the servers of an engine are, and how they are treated. Base of the settings of engines that can be served."""

    servers: int = 0
    """server processes to start on this host; 0 with neither addresses nor rendezvous runs the engine in this
    process"""
    addresses: tuple[str, ...] = ()
    """host:port of servers that run already, in place of starting some"""
    rendezvous: str = ""
    """engines.json written by who starts the servers (SLURM steps, another run), waited for"""
    tensor_parallel: int = 1
    """GPUs over which one engine, or each server that is started here, cuts the model"""
    pool: PoolSettings = field(default_factory=PoolSettings)
    """time limits, back-pressure, retries"""
    channel: ChannelSettings = field(default_factory=ChannelSettings)
    """how weights reach the servers"""

    def __post_init__(self) -> None:
        for name, least in (("servers", 0), ("tensor_parallel", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}; wanted at least {least}.")

    @property
    def served(self) -> bool:
        """Whether there are servers."""
        return bool(self.servers or self.addresses or self.rendezvous)


class Servers:
    """Pool and weight channel of an engine.

    Args:
        engine: after its own `setup`.
        dialect: of its servers.
        settings: where they are.
        tolerance: nats by which log-probs of a probe may differ after an update; 0 sends no probe.
    """

    def __init__(self, engine: ExternalEngine, dialect: Dialect, settings: ServerSettings, tolerance: float) -> None:
        context = engine.context
        self.engine, self._tolerance, self.streams = engine, tolerance, dialect.streams
        # Servers that were started here are this replica's own; servers found elsewhere are those of all replicas.
        elsewhere, ranks = bool(settings.addresses or settings.rendezvous), context.ranks
        self._shared, self._near = elsewhere and ranks.num_replicas > 1, not elsewhere
        self._aside = ThreadPoolExecutor(1, "creditgraph-probe")
        wanted = settings.channel.dtype
        self._dtype: torch.dtype = getattr(torch, context.model.dtype if wanted == "model" else wanted)
        self._scratch = None if context.run_dir else tempfile.TemporaryDirectory(prefix="creditgraph-run-")
        folder = context.run_dir or Path(self._scratch.name if self._scratch else ".")
        gpus: list[list[str]] = []
        if torch.device(context.device).type == "cuda" and not elsewhere:
            gpus = share_gpus(
                settings.servers,
                settings.tensor_parallel,
                visible_gpus(),
                ranks.local_rank,
                ranks.world,
                ranks.per_replica,
            )
        found = find_servers(
            settings.servers,
            settings.addresses,
            settings.rendezvous,
            settings.pool.start_seconds,
            context.node,
            ranks.replica,
            gpus,
        )
        # Replicas that start servers of their own share the run directory, and perhaps a host.
        pool, own = settings.pool, f"engines.{ranks.replica}.json" if ranks.replica else "engines.json"
        if pool.port and not elsewhere:
            pool = dataclasses.replace(pool, port=pool.port + ranks.replica * settings.servers)
        self.channel = FileChannel(settings.channel, self._dtype)
        temporary = [folder] if self._scratch else []
        self.pool = ServerPool(dialect, pool, found, folder, context.node, [*self.channel.folders, *temporary], own)
        vocabulary, length = engine.vocab_size, min(PROBE_TOKENS, engine.context_length)
        ids = [(7919 * n + 13) % vocabulary for n in range(length)]
        self._probe = ScoreAsk(row=0, group=0, context=ids[:1], tokens=ids[1:], temperature=1.0)
        self.pool.start()
        context.trace.watch(context.node, self.pool.in_flight)

    def load(self, weights: Weights) -> ServedPolicy:
        """Publishes weights and has every server load them; the handle on them."""
        if weights.adapter is None:
            whole = weights if weights.path is None else dataclasses.replace(weights, path=local_folder(weights.path))
            tensors = self.engine.names.resolve(whole)
            distinct = {name: tensor for name, tensor in tensors.items() if name not in self.engine.names.tied}
            published = Weights(version=weights.version, tensors=distinct)
        else:
            published = weights
        follows = self._shared and self.engine.context.ranks.replica > 0
        # Servers on other hosts may see a new file late, and those in groups of ranks begin when all have come this
        # far.
        update = self.channel.describe(published) if follows else self.channel.publish(published, early=self._near)
        if self._tolerance:
            if weights.adapter is not None:
                tensors = self.engine.names.resolve(merged(as_sent(weights, self._dtype), self.engine.context.model))
            wanted = self._aside.submit(self._reference, tensors, torch.get_num_threads(), update.written)
            update = dataclasses.replace(
                update, probe=Probe(ask=self._probe, logprobs=wanted, tolerance=self._tolerance)
            )
        self.engine.version = -1  # no handle is valid while servers change
        self._meet()  # no replica samples any more
        if follows:
            self._meet()
        self.pool.update(update)
        for server, begin, end in self.pool.updates:
            name = f"weights {weights.version}"
            self.engine.context.trace.write(
                name, "weight update", begin, end, server, iteration=self.engine.context.iteration
            )
        if not follows:
            self._meet()  # all servers hold the weights, or are out
        self.channel.retire(weights.version)
        self.count()
        return ServedPolicy(self.engine, weights.version, self)

    def _reference(
        self, tensors: dict[str, torch.Tensor], threads: int, written: Future[None] | None
    ) -> tuple[float, ...]:
        """Log-probs of the probe; computed in a thread while servers load, after what they wait for is written."""
        if written is not None:
            wait([written])
        torch.set_num_threads(threads)  # OpenMP counts for each thread that starts work
        sent = {
            name: tensor.to(self._dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
        }
        ids = [*self._probe.context, *self._probe.tokens]
        return tuple(
            reference_logprobs(self.engine.model, sent, ids, getattr(torch, self.engine.context.model.dtype)).tolist()
        )

    def _meet(self) -> None:
        """Waits for the other replicas that ask the same servers; the first of them changes the weights, the others verify them."""
        if self._shared:
            self.engine.context.all_sum(torch.zeros(1))

    def addresses(self) -> list[Address]:
        """Where the servers are."""
        return [m.address for m in self.pool.members]

    def count(self) -> None:
        """Logs what the pool has counted."""
        counted = self.pool.take_counters()
        self.engine.context.log(servers_ready=counted.pop("servers_ready"))
        self.engine.count(**counted)

    def close(self) -> None:
        """Ends the servers and removes their weight files."""
        self.pool.close()
        self._aside.shutdown()
        self.channel.close()
        if self._scratch is not None:
            self._scratch.cleanup()


class ServedPolicy(ExternalPolicy):
    """Handle on servers that hold the weights of one version."""

    def __init__(self, engine: ExternalEngine, version: int, servers: Servers) -> None:
        super().__init__(engine, version)
        self._servers = servers

    def sample(self, rows: Rows) -> None:
        """Each row is asked for, and goes on, by itself: in one request that ends with the row where the server streams, thought by
        thought otherwise."""
        if rows.watched and self._servers.streams:
            self._servers.pool.stream(rows.start(whole=True), rows.feed, rows.again)
        else:
            self._servers.pool.generate(rows.start(), rows.advance)
        self._servers.count()

    def score_rows(self, asks: Sequence[ScoreAsk]) -> list[ScoreAnswer]:
        """Every ask at whichever server holds its context."""
        answers: dict[int, ScoreAnswer] = {}
        by_row = {ask.row: ask for ask in asks}

        def take(row: int, answer: ScoreAnswer) -> None:
            answers[row] = check_score(by_row[row], answer, self.version)

        self._servers.pool.score(asks, take)
        self._servers.count()
        return [answers[ask.row] for ask in asks]
