"""The base of segmenters: their outputs and metrics."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import Component, same_rows
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Segments, Trajectories


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Boundaries of each response."""

    segments: Annotated[Segments, same_rows("trajectories")]


class Segmenter(Component):
    """Base of segmenters."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("segments", "segments", "segments per response"),)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when it is first used."""
        return load_tokenizer(self.context.model)

    def outputs(self, trajectories: Trajectories, ends: Jagged) -> Outputs:
        """Logs the number of segments, and returns their exclusive `ends`, int32, one row per trajectory."""
        self.context.log(segments=len(ends.values) / max(len(ends), 1))
        return Outputs(segments=Segments(uid=trajectories.uid, ends=ends))
