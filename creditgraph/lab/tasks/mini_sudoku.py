"""The family "mini_sudoku": 4×4 sudoku, one cell per thought; a wrong cell cannot be taken back.

Puzzles are those of reasoning-gym's mini_sudoku, each with one solution. Cells are a1 (top left) to d4 (bottom right):

    question   a1 2 a4 3 b3 1 … (the given cells, row by row)
    solution   a2 1 </thought> … b1 4 \\boxed{ 2 1 4 3 4 3 1 2 1 2 3 4 3 4 2 1 } </thought>

Cells may be filled in any order; the last thought boxes the grid, row by row.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem, step_labels, words_of
from creditgraph.lab.tasks.library import LibraryTask
from creditgraph.pipeline.core.streams import key_of

CELLS = [f"{row}{column}" for row in "abcd" for column in "1234"]
SHARE_WRONG = 0.3  # of the cells, for which the teacher has a misconception
RATES = (0.2, 0.6)  # how often it then writes the next digit, uniform between cells
# Places of the other cells in the same row, column or block.
GROUPS = [{(i // 4, "row"), (i % 4, "column"), (i // 8 * 2 + i % 4 // 2, "block")} for i in range(16)]
PEERS = [[j for j in range(16) if j != i and GROUPS[i] & GROUPS[j]] for i in range(16)]


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        empty: fewest and most empty cells, from 4 to 11.
        hard_cells: fewest and most empty cells for which the small model's teacher has a misconception; None sets no
            limits.
    """

    empty: tuple[int, int] = (6, 10)
    hard_cells: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        low, high = self.empty
        if not 4 <= low <= high <= 11:
            raise ValueError(f"empty: expected 4 ≤ fewest ≤ most ≤ 11, got [{low}, {high}].")
        if self.hard_cells is not None and not 0 <= self.hard_cells[0] <= self.hard_cells[1]:
            raise ValueError(f"hard_cells: expected 0 ≤ fewest ≤ most, got {list(self.hard_cells)}.")


class MiniSudoku(LibraryTask):
    """4×4 sudoku, a cell per thought.

    A thought is right when its cell is empty and has the digit of the one solution; the last one also boxes the grid.
    """

    name = "mini_sudoku"
    model = "tiny_mini_sudoku"
    difficulty = Difficulty

    def from_row(self, row: dict[str, Any], difficulty: Difficulty) -> Problem | None:
        """The problem of a row."""
        return _problem(row["puzzle"], row["solution"], difficulty)

    def draw(self, draw: Draw, difficulty: Difficulty) -> Problem | None:
        """A row with digits, bands, rows, stacks and columns exchanged, and perhaps its diagonal mirrored."""
        rows = self.problems(difficulty)
        row = rows[int(draw() * len(rows))]
        digits = sorted("1234", key=lambda _: draw())
        lines = [_lines(draw), _lines(draw)]
        mirrored = draw() < 0.5
        places = [4 * b + a if mirrored else 4 * a + b for a, b in product(*lines)]
        puzzle, solved = (
            "".join("0" if row[grid][i] == "0" else digits[int(row[grid][i]) - 1] for i in places)
            for grid in ("puzzle", "solved")
        )
        return _problem(puzzle, solved, difficulty)

    def solution(self, problem: Problem) -> list[str]:
        """Fills, one after another, the first cell that only one digit fits, else the first empty one."""
        return _thoughts(_filled(problem, lambda cell: problem["solved"][cell]))

    def answer(self, problem: Problem) -> str:
        """The grid row by row."""
        return " ".join(problem["solved"])

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """The first thought with a cell that is not empty, a digit that is not its, or a wrong or missing box.

        >>> task, problem = MiniSudoku(), _problem("2003001010303021", "2143431212343421", Difficulty())
        >>> task.first_error(problem, ["a2 1 </thought>", "a2 1 </thought>"]), task.first_error(problem, ["a2 4"])
        (2, 1)
        """
        empty = {CELLS[i] for i, digit in enumerate(problem["puzzle"]) if digit == "0"}
        for i, thought in enumerate(thoughts, 1):
            cell, digit, *rest = [*words_of(thought), "", ""]
            if cell not in empty or digit != problem["solved"][CELLS.index(cell)]:
                return i
            empty.remove(cell)
            box = f"\\boxed{{ {self.answer(problem)} }} {THOUGHT_END}" if not empty else THOUGHT_END
            if " ".join(rest).strip() != box:
                return i
        return len(thoughts) + 1 if empty else 0

    def words(self) -> list[str]:
        """Cells and digits."""
        return [*CELLS, *step_labels(11)]

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Writes the digit after the right one at the rate of the cell's misconception."""
        wrong = misconceptions()

        def digit(cell: int) -> str:
            right = problem["solved"][cell]
            return str(int(right) % 4 + 1) if draw() < wrong.get(cell, 0.0) else right

        return _thoughts(_filled(problem, digit))


@cache
def misconceptions() -> dict[int, float]:
    """Place of a cell → how often the teacher writes the digit after the right one."""
    draw = random.Random(key_of("mini_sudoku", "misconceptions")).random
    drawn = [(draw(), round(RATES[0] + draw() * (RATES[1] - RATES[0]), 3)) for _ in CELLS]
    return {cell: rate for cell, (chosen, rate) in enumerate(drawn) if chosen < SHARE_WRONG}


def _problem(puzzle: str, solved: str, difficulty: Difficulty) -> Problem | None:
    empty = [i for i, digit in enumerate(puzzle) if digit == "0"]
    low, high = difficulty.hard_cells or (0, 16)
    hard = sum(i in misconceptions() for i in empty) if difficulty.hard_cells else 0
    if not (difficulty.empty[0] <= len(empty) <= difficulty.empty[1] and low <= hard <= high):
        return None
    question = " ".join(f"{CELLS[i]} {digit}" for i, digit in enumerate(puzzle) if digit != "0")
    return {"task": "mini_sudoku", "question": question, "puzzle": puzzle, "solved": solved}


def _lines(draw: Draw) -> list[int]:
    """The four rows (or columns) in a new order that keeps the blocks together."""
    bands = [[0, 1], [2, 3]] if draw() < 0.5 else [[2, 3], [0, 1]]
    return [line for band in bands for line in (band if draw() < 0.5 else band[::-1])]


def _filled(problem: Problem, digit: Any) -> tuple[list[tuple[int, str]], list[str]]:
    """The cells in the order they are filled, each with its digit, and the grid in the end."""
    grid, order = list(problem["puzzle"]), []
    while "0" in grid:
        empty = [i for i in range(16) if grid[i] == "0"]
        forced = [i for i in empty if len({grid[j] for j in PEERS[i]} - {"0"}) >= 3]
        cell = (forced or empty)[0]
        grid[cell] = digit(cell)
        order.append((cell, grid[cell]))
    return order, grid


def _thoughts(filled: tuple[list[tuple[int, str]], list[str]]) -> list[str]:
    texts = [f"{CELLS[cell]} {digit}" for cell, digit in filled[0]]
    texts[-1] += f" \\boxed{{ {' '.join(filled[1])} }}"
    return [f"{text} {THOUGHT_END}" for text in texts]
