"""What a learner needs of a model and its optimiser: scores, passes, steps, weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from creditgraph.components.learner.objective import Meters
from creditgraph.components.learner.offload import HostMemory
from creditgraph.components.learner.optimizer import Update
from creditgraph.components.learner.packing.pack import PackedBatch
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.jagged import Jagged

LossOf = Callable[[int, Jagged, Jagged], Tensor]
"""(number of the micro-batch, log-probs and entropies of its response tokens) → its share of the loss"""


class Backend(ABC):
    """The model of a learner, perhaps sharded over the ranks of a replica, and its optimiser.

    Attributes:
        max_context: longest sequence the model supports, in tokens; 0 means no limit.
        packs: whether it supports packed sequences, and so shared prefixes.
    """

    max_context: int
    packs: bool = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self._host = HostMemory()

    @abstractmethod
    def score(self, batches: Iterable[PackedBatch], temperature: float, reference: bool) -> list[Jagged]:
        """Log-probs of micro-batches under the present or the reference weights, without gradient."""

    @abstractmethod
    def forward_backward(self, batches: Iterable[PackedBatch], temperature: float, loss: LossOf) -> Tensor:
        """Forward and backward passes; gradients add up until `update`. Returns this rank's loss, float64 []."""

    @abstractmethod
    def update(self) -> Update:
        """Does one optimiser step, the same on all ranks; a non-finite gradient changes no weight."""

    @abstractmethod
    def skip_update(self) -> Update:
        """Advances only the schedule; gradients are dropped."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in Hugging Face names, one at a time, valid until the next update; all ranks iterate."""

    @property
    def exports_alone(self) -> bool:
        """Whether `export` needs no other rank, so that this one may call it whenever its weights do not change."""
        return self.context.ranks.world == 1

    @abstractmethod
    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors that only learning needs (optimiser state, gradients), and those whose memory must stay."""

    def offload(self) -> None:
        """Moves the former to the CPU, so that engines have the memory."""
        self._host.offload(*self.offloadable())

    def onload(self) -> None:
        """Moves back what `offload` has moved, bit for bit; before any other method but `export` and `score`."""
        self._host.onload()

    def sum(self, value: Tensor) -> Tensor:
        """Returns a tensor summed over replicas, on every rank."""
        return self.context.all_sum(value)

    def whole(self, value: Tensor) -> Tensor:
        """Returns what this replica's ranks have computed, on each of them; its shape is the same on all."""
        return value

    def values(self, meters: Meters) -> dict[str, float]:
        """Returns the metrics of all replicas, on every rank."""
        return meters.values(self.context.all_sum, self.context.ranks)

    def pass_metrics(self) -> dict[str, float]:
        """Returns further metrics of the passes since the last call."""
        return {}
