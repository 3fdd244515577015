"""Families whose problems were drawn once from reasoning-gym and are shipped as Parquet files (see tools/task_rows)."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from creditgraph.components.tasks.base import Problem, Task, check_split, in_split, words_of
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.streams import key_of

ROWS = Path(__file__).parent / "rows"


class LibraryTask(Task):
    """Base of families with rows: `generate` returns each row of a split once, in an order keyed by the seed.

    `draw` varies a row in a way that keeps its truth (other labels, other numbers): the endless supply that the warm
    start learns from. Its problems belong to splits by their question too, so held-out rows are never taught.
    """

    @abstractmethod
    def from_row(self, row: dict[str, Any], difficulty: Any) -> Problem | None:
        """The problem of a row; None if it has another difficulty."""

    def generate(self, seed: int, index: int, difficulty: Any = None, split: str = "train") -> Problem:
        """Problem `index` of a split: a JSON-able dict, the same for the same arguments everywhere.

        Raises:
            DataError: no such split, or fewer problems of this difficulty than `index` asks for.
        """
        check_split(self.name, split)
        difficulty = self.difficulty() if difficulty is None else difficulty
        problems = _order(self, seed, difficulty, split)
        if index >= len(problems):
            raise DataError(
                f"{self.name}: expected a problem for each of 'size', got {len(problems)} in split '{split}' of "
                f"{difficulty}. Set size: {len(problems)}, or widen the difficulty."
            )
        return dict(problems[index])

    def lesson(self, seed: int, index: int, progress: float = 0.0) -> Problem:
        """Problem `index` of the endless list that `draw` makes, none of them of a held-out split."""
        return super().generate(seed, index, self.warm_up[int(progress * len(self.warm_up))])

    def state(self, thoughts: Sequence[str]) -> str:
        """All thoughts, whatever their order: no one of them says what the others did."""
        return " ".join(sorted(" ".join(words_of(thought)) for thought in thoughts))

    def problems(self, difficulty: Any) -> list[Problem]:
        """The problems of all rows of a difficulty, in the order of the file."""
        return _problems(self, difficulty)


@cache
def load_rows(name: str) -> list[dict[str, Any]]:
    """All rows of a family, in the order of the file; raises DataError where the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = ROWS / f"{name}.parquet"
    try:
        return list(pq.read_table(path).to_pylist())
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path}: the problems of {name} cannot be read ({error}). Install the package again, or write them with "
            "tools/task_rows."
        ) from None


@cache
def _problems(task: LibraryTask, difficulty: Any) -> list[Problem]:
    found = (task.from_row(row, difficulty) for row in load_rows(task.name))
    return [problem for problem in found if problem is not None]


@cache
def _order(task: LibraryTask, seed: int, difficulty: Any, split: str) -> list[Problem]:
    inside = {p["question"]: p for p in _problems(task, difficulty) if in_split(p["question"], split)}
    return [inside[question] for question in sorted(inside, key=lambda q: key_of(task.name, seed, q))]
