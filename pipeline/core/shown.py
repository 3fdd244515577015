"""How a batch is shown: in one line, as a DataFrame, and in a notebook as what a viewer makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from creditgraph.pipeline.core.errors import extra
from creditgraph.pipeline.core.jagged import Jagged


class Shown:
    """Base of batches, whose fields are columns.

    Attributes:
        viewer: makes the HTML of a batch in a notebook; set by what has one, as this module knows no colours.
    """

    viewer: ClassVar[Callable[[Any], str] | None] = None
    origin: ClassVar[str]
    uid: Tensor

    def __repr__(self) -> str:
        of = f" of {self.origin}" if self.origin else ""
        longest = max((len(value.values) for value in vars(self).values() if isinstance(value, Jagged)), default=0)
        return f"{type(self).__name__}({len(self.uid)} rows{f', {longest:,} tokens' if longest else ''}{of})"

    def _repr_html_(self) -> str | None:
        return None if Shown.viewer is None else Shown.viewer(self)

    def to_pandas(self) -> Any:
        """A DataFrame with the batch's rows: a ragged column holds a list per row, named columns get a column each.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        with extra("train", "to_pandas()"):
            import pandas

        columns: dict[str, Any] = {}
        for name, value in vars(self).items():
            for key, column in value.items() if isinstance(value, dict) else [(name, value)]:
                if isinstance(column, Jagged):
                    columns[key] = column.to_lists()
                elif isinstance(column, Tensor):
                    columns[key] = column.tolist()
                elif name != "origin":
                    columns[key] = column
        return pandas.DataFrame(columns, index=range(len(self.uid)))
