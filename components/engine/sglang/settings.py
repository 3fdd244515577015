"""Settings of `engine.sglang`."""

from dataclasses import dataclass, field

from creditgraph.components.engine.channel import PLACE
from creditgraph.components.engine.served.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """Settings of SGLang's processes."""

    python: str = ""
    """Python interpreter of the environment with SGLang, which needs a separate one; "" is this interpreter"""
    environment: dict[str, str] = field(default_factory=dict)
    """environment variables of server processes, added to those of this process"""
    arguments: tuple[str, ...] = ()
    """further arguments of sglang.launch_server; they come last, so they override others"""


@dataclass(frozen=True, kw_only=True)
class SGLangSettings(ServerSettings):
    """Settings of SGLang's servers."""

    servers: int = field(default=1, metadata=PLACE)
    """server processes to start on this host"""
    process: ProcessSettings = field(default_factory=ProcessSettings)
    """how SGLang is started"""
    entropy_vocab: int = 1024
    """largest vocabulary for which entropies are requested"""
    gpu_memory: float = 0.5
    """share of the GPU's free memory for weights and KV cache (SGLang's mem_fraction_static); the learner needs the
    rest, unless it takes turns with the servers (sleep)"""
    deterministic: bool = True
    """whether SGLang runs in its deterministic mode: the same seeds give the same responses, whatever else runs.
    Without it SGLang ignores seeds and is faster; a run cannot then be repeated, and a resumed one samples again"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_vocab < 0:
            raise ValueError(f"entropy_vocab: expected at least 0, got {self.entropy_vocab}.")
        if not 0 < self.gpu_memory <= 1:
            raise ValueError(f"gpu_memory: expected 0 < gpu_memory ≤ 1, got {self.gpu_memory}.")
