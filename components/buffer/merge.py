"""Joins trajectories of several nodes into one training batch."""

from dataclasses import dataclass

import torch

from creditgraph.pipeline.core.component import Component, Count
from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All rows, and their prompts."""

    trajectories: Trajectories
    prompts: Prompts


class Merge(Component):
    """Concatenates the trajectories of all wires, in the order of the wires, and unites their prompts."""

    metrics = (
        Metric("trajectories", "rows", "trajectories of all wires"),
        Metric("groups", "groups", "groups among them"),
    )

    def run(self, *, trajectories: list[Trajectories], prompts: list[Prompts]) -> Outputs:
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
        every = Prompts.concat(prompts)
        first = {uid: row for row, uid in reversed(list(enumerate(every.uid.tolist())))}
        return Outputs(
            trajectories=merged, prompts=every.select(torch.tensor(sorted(first.values()), dtype=torch.int64))
        )
