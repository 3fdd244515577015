"""Joins trajectories of several nodes into one training batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.core.component import Component, Count
from pipeline.core.errors import AlignmentError
from pipeline.core.metric import Metric
from pipeline.core.payloads import Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All rows."""

    trajectories: Trajectories


class Merge(Component):
    """Concatenates the trajectories of all wires, in the order of the wires; an empty batch adds nothing."""

    metrics = (
        Metric("trajectories", "rows", "trajectories of all wires"),
        Metric("groups", "groups", "groups among them"),
    )

    def run(self, *, trajectories: list[Trajectories]) -> Outputs:
        """Concatenates the batches; raises AlignmentError when a trajectory arrives on two wires."""
        merged = Trajectories.concat(trajectories)
        # A trajectory on two wires would count twice in the loss.
        repeated = len(merged) - len(torch.unique(merged.uid))
        if repeated:
            origins = ", ".join(part.origin or f"part {i}" for i, part in enumerate(trajectories))
            raise AlignmentError(
                f"node '{self.context.node}': expected each trajectory on one wire only, got {repeated} more than once "
                f"from {origins}. Remove the wire that repeats them."
            )
        self.context.log(trajectories=Count(len(merged)), groups=Count(len(torch.unique(merged.group))))
        return Outputs(trajectories=merged)
