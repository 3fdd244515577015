"""`weights.average`: an exponential moving average of a learner's weights, for an engine that is a teacher."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from creditgraph.components.models.weights import read_folder
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.payloads import Weights


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The average, under the version of the newest weights in it."""

    weights: Weights


class WeightAverage(Component):
    """Averages weights over iterations: θ̄ ← (1 − α) θ̄ + α θ, beginning with the first ones, the initial model.

    An engine that is wired from it is a slowly moving teacher (SDPO, 2601.20802; α = .05 as in TRL's trainer). The
    average is kept in float32 and published in the dtype of θ. Of LoRA adapters the two factors are averaged apart.
    α = 1 passes θ on. Weights whose names or shapes change end the run.
    """

    paper = "2601.20802"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How fast the average moves."""

        rate: float = 0.05
        """α, weight of the newest weights"""

        def __post_init__(self) -> None:
            if not 0 < self.rate <= 1:
                raise ValueError(f"expected 0 < rate ≤ 1 (1 follows the learner), got {self.rate}.")

    config: Config
    _average: dict[str, Tensor] | None = None

    def run(self, *, weights: Weights) -> Outputs:
        """Moves the average by one step; weights without tensors are passed on."""
        weights = weights.storable()
        tensors = weights.tensors if weights.path is None else read_folder(weights.path)
        if tensors is None:
            return Outputs(weights=weights)
        fresh = {name: tensor.detach().float() for name, tensor in tensors.items()}
        known = self._average
        if known is None:
            known = fresh
        elif {n: t.shape for n, t in known.items()} != {n: t.shape for n, t in fresh.items()}:
            raise DataError(
                f"node '{self.context.node}': expected {len(known)} tensors with the names and shapes of the "
                f"first weights, got version {weights.version} with {len(fresh)}, which differ. Start a new run."
            )
        else:
            known = {name: t.lerp(fresh[name].to(t.device), self.config.rate) for name, t in known.items()}
        self._average = known
        moved = {name: t.to(tensors[name].dtype, copy=True) for name, t in known.items()}
        return Outputs(weights=dataclasses.replace(weights, tensors=moved, path=None, scored=None))

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {} if self._average is None else {"average": dict(self._average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from the average of `state_dict`."""
        self._average = state.get("average")
