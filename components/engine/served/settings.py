"""Settings of engines whose model may run in servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from components.engine.channel import PLACE, ChannelSettings


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How a pool treats its servers."""

    host: str = "127.0.0.1"
    """address that servers listen on; whoever reaches it can change their weights, so name one of a closed network
    only"""
    port: int = 0
    """port of the first server, the others follow; 0 takes free ones"""
    start_seconds: float = 600.0
    """until a server that is started must respond"""
    update_seconds: float = 300.0
    """until a server must have loaded new weights"""
    hang_seconds: float = 60.0
    """a server without a good health check for so long is lost; its requests are sent elsewhere"""
    stall_seconds: float = 600.0
    """a server that has requests but neither samples nor responds for so long is lost"""
    max_in_flight: int = 256
    """requests at one server at a time; further ones wait in this process"""
    retries: int = 4
    """wrong or missing responses to one request before the run stops"""
    restarts: int = 3
    """how often a server that this run started is started again"""
    in_flight: Literal["finish", "abort"] = "finish"
    """requests that run when weights change: finish on the old weights, or abort and send again under the new ones"""

    def __post_init__(self) -> None:
        for name in ("start_seconds", "update_seconds", "hang_seconds", "stall_seconds", "max_in_flight"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}.")
        for name in ("port", "retries", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the servers of an engine are, and how they are used; base of the settings of vLLM and SGLang."""

    servers: int = field(default=0, metadata=PLACE)
    """server processes to start on this host; 0 with neither addresses nor rendezvous runs the engine in this
    process"""
    addresses: tuple[str, ...] = field(default=(), metadata=PLACE)
    """host:port of servers that are running already, in place of starting some"""
    rendezvous: str = field(default="", metadata=PLACE)
    """engines.json that lists servers which something else starts (SLURM steps, another run), waited for"""
    tensor_parallel: int = 1
    """GPUs over which the engine in this process, or each server that is started, shards the model"""
    max_rows: int = 256
    """rows decoded at once, per server; more wait for room"""
    stream_tokens: int = 8
    """tokens in each message of a server about a row whose text may end it; fewer cost more work, more are sampled
    in vain"""
    probe: bool = True
    """compares log-probs of a fixed sequence with a transformers forward of the same tensors after each update"""
    pool: PoolSettings = field(default_factory=PoolSettings, metadata=PLACE)
    """time limits, back-pressure, retries"""
    channel: ChannelSettings = field(default_factory=ChannelSettings)
    """how weights reach the servers"""

    def __post_init__(self) -> None:
        for name, least in (("servers", 0), ("tensor_parallel", 1), ("max_rows", 1), ("stream_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}.")

    @property
    def served(self) -> bool:
        """Whether there are servers."""
        return bool(self.servers or self.elsewhere)

    @property
    def elsewhere(self) -> bool:
        """Whether something else starts the servers."""
        return bool(self.addresses or self.rendezvous)
