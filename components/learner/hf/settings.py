"""Settings of `learner.hf`."""

from dataclasses import dataclass
from typing import Literal

from creditgraph.components.learner.settings import LearnerSettings, StepSettings

Recompute = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True)
class HFStepSettings(StepSettings):
    """How a transformers model is trained, whatever its loss."""

    recompute: Recompute = "none"
    """activations recomputed in the backward pass: none; full, all but the layers' inputs and, on a GPU, the outputs of
    attention: least memory, about a third more time"""
    fsdp_size: int = 0
    """ranks that hold one copy of parameters, gradients and optimiser state together (FSDP2); must divide the run's. 1:
    each rank has all of them; fewer than all ranks: several sharded copies. 0 chooses: on GPUs the fewest ranks with
    which they take a quarter of each GPU's memory, on a CPU 1"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp_size < 0:
            raise ValueError(f"expected fsdp_size ≥ 0 (0 chooses), got {self.fsdp_size}.")


@dataclass(frozen=True, kw_only=True)
class HFSettings(HFStepSettings, LearnerSettings):
    """Settings of `learner.hf`: those of every learner, and what transformers adds."""

    compile: bool = False
    """whether torch.compile fuses norms and gated products, which transformers computes one operation after the other;
    for GPUs and large models, since compiling takes time at the start; needs a C++ compiler"""


def choose_fsdp_size(weights: int, trained: int, element_bytes: int, copies: int, world: int, gpu_bytes: int) -> int:
    """The fewest ranks with which a model and its training state take at most a quarter of each GPU's memory.

    Activations, the engine and its cache take the rest.

    Args:
        weights: parameters of the model.
        trained: those of them that are trained; adapters come on top of `weights`.
        element_bytes: bytes of a parameter as it computes.
        copies: whole models beside the trained parameters: frozen ones, and the reference.
        world: ranks of the run, which the result divides.
        gpu_bytes: memory of one GPU.

    >>> seven = 7_600_000_000
    >>> [choose_fsdp_size(seven, seven, 2, 0, world, 80 << 30) for world in (1, 4, 8, 32)]
    [1, 4, 8, 8]
    >>> choose_fsdp_size(494_000_000, 494_000_000, 2, 1, 8, 80 << 30)
    1
    """
    # float32 weights, gradients and two moments
    state = 16 * trained + copies * element_bytes * weights
    fitting = (n for n in range(1, world) if world % n == 0 and state <= n * gpu_bytes / 4)
    return next(fitting, world)
