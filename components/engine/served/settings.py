"""Settings of engines whose model may run in servers."""

from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from creditgraph.components.engine.base import EngineSettings
from creditgraph.components.engine.channel import PLACE, ChannelSettings


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Time limits, back-pressure and retries of a pool of servers."""

    host: str = ""
    """address that servers listen on, where each demands the run's key; "": a Unix socket in a folder that only this
    user may enter, or for SGLang's servers, and with a port, 127.0.0.1"""
    port: int = 0
    """port of the first server, the others follow; 0 uses free ports"""
    start_seconds: float = 600.0
    """seconds until a server must respond that this run or a job starts, and until the file of `rendezvous` must be
    there"""
    connect_seconds: float = 60.0
    """seconds until a server of `addresses` must respond; it runs already, so it has loaded its model"""
    update_seconds: float = 300.0
    """seconds until a server must have loaded new weights"""
    hang_seconds: float = 60.0
    """seconds without a good health check after which a server is lost; its requests are sent to other servers"""
    stall_seconds: float = 600.0
    """seconds after which a server is lost that has requests but neither samples nor responds"""
    max_in_flight: int = 256
    """requests at one server at a time; further ones wait in this process"""
    retries: int = 4
    """wrong or missing responses to one request before the run stops"""
    restarts: int = 3
    """how often a server that this run started is restarted"""
    in_flight: Literal["finish", "abort"] = "finish"
    """requests that run when weights change: finish on the old weights, or abort and send again under the new ones"""

    def __post_init__(self) -> None:
        for name in (
            "start_seconds",
            "connect_seconds",
            "update_seconds",
            "hang_seconds",
            "stall_seconds",
            "max_in_flight",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}.")
        for name in ("port", "retries", "restarts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest difference [nats] between log-probs of engine and learner at equal weights, by the coarsest dtype of the
    two and of the transfer."""

    float32: float = 1e-3
    """sums in another order differ by about 1e-5; weights that are one update old often by less than 1e-3"""
    bfloat16: float = 0.5
    """bfloat16 keeps 8 bits, so a logit between 32 and 64 is a multiple of 1/4; engine and learner round it, and all
    that leads to it, in another order, and each may be one step off. Finds wrong weights, not old ones"""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name}: expected more than 0, got {value}.")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSettings):
    """Servers of an engine and their use; base of the settings of vLLM and SGLang."""

    servers: int = field(default=0, metadata=PLACE)
    """server processes to start on this host; 0 with neither addresses nor rendezvous runs the engine in this
    process"""
    addresses: tuple[str, ...] = field(default=(), metadata=PLACE)
    """host:port, or unix:/PATH of a socket, of running servers, instead of starting some"""
    key_file: str = field(default="", metadata=PLACE)
    """file of mode 0600 with the key of the servers in addresses; a rendezvous has the keys of its servers"""
    rendezvous: str = field(default="", metadata=PLACE)
    """engines.json with servers that are started elsewhere (SLURM steps, another run); the engine waits for the file"""
    tensor_parallel: int = 1
    """GPUs over which the engine in this process, or each server that is started, shards the model"""
    max_rows: int = 256
    """rows decoded at once, per server; more wait for room"""
    stream_tokens: int = 8
    """tokens in each message of a server about a row whose text may end it; fewer tokens need more messages, more
    tokens are sampled beyond the end"""
    return_routed_experts: bool = False
    """for models with experts: whether the engine returns which experts it chose for each token, so that the learner
    computes with the same ones (router replay)"""
    check_every: int = 1
    """updates between two checks that the engine computes with the weights it was given: its log-probs of a fixed
    sequence of 16 tokens against the learner's, which computes them on the device that holds the weights; 0 never"""
    tolerance: Tolerance = field(default_factory=Tolerance)
    """largest difference in that check"""
    sleep: Literal["auto", "always", "never"] = field(default="auto", metadata=PLACE)
    """whether an engine on the learner's GPUs gives their memory back while the learner learns, which in return moves
    its optimiser and gradients to the CPU while the engine samples; auto: where the GPUs do not suffice for both"""
    pool: PoolSettings = field(default_factory=PoolSettings, metadata=PLACE)
    """time limits, back-pressure, retries"""
    channel: ChannelSettings = field(default_factory=ChannelSettings)
    """how weights reach the servers"""

    def __post_init__(self) -> None:
        for name, least in (
            ("servers", 0),
            ("check_every", 0),
            ("tensor_parallel", 1),
            ("max_rows", 1),
            ("stream_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}.")

        if self.return_routed_experts and self.model:
            raise ValueError(
                "return_routed_experts: expected an engine of the learner's model, which computes with these experts, "
                f"got one with a model of its own ({self.model}). Set it to false."
            )
        if self.elsewhere and self.sleep == "always":
            raise ValueError(
                "sleep: expected servers that this run starts, got addresses or rendezvous of others, whose GPUs this "
                "run does not hand out. Set servers instead, or sleep=never."
            )

    def tolerance_of(self, *dtypes: torch.dtype) -> float:
        """Largest difference in the check, with a model and weights of these dtypes."""
        exact = all(dtype == torch.float32 for dtype in dtypes)
        return self.tolerance.float32 if exact else self.tolerance.bfloat16

    @property
    def served(self) -> bool:
        """Whether there are servers."""
        return bool(self.servers or self.elsewhere)

    @property
    def elsewhere(self) -> bool:
        """Whether something else starts the servers."""
        return bool(self.addresses or self.rendezvous)
