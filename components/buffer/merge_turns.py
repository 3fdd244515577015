"""Joins turns of several nodes into one training batch."""

from dataclasses import dataclass
from typing import Annotated

from creditgraph.components.buffer.merge import Merge
from creditgraph.pipeline.core.component import same_rows
from creditgraph.pipeline.core.payloads import Prompts, Trajectories, Turns, check_aligned


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """All rows, which turns they are, and their prompts."""

    trajectories: Annotated[Trajectories, same_rows("trajectories")]
    turns: Annotated[Turns, same_rows("trajectories")]
    prompts: Prompts


class MergeTurns(Merge):
    """Concatenates the trajectories and turns of all wires, in the order of the wires, and unites their prompts."""

    def run(  # type: ignore[override]  # another input and output
        self, *, trajectories: list[Trajectories], turns: list[Turns], prompts: list[Prompts]
    ) -> Outputs:
        """Concatenates the batches; raises AlignmentError when turns are not those of the trajectories."""
        joined = super().run(trajectories=trajectories, prompts=prompts)
        merged = Turns.concat(turns)
        check_aligned(joined.trajectories, merged)
        return Outputs(trajectories=joined.trajectories, turns=merged, prompts=joined.prompts)
