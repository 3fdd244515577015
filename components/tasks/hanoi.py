"""Tower of Hanoi between any two positions: every move can be undone, at the price of the budget of moves.

question   a a b to c b b in 6        (positions of disks d1, d2, d3, smallest first; at most six moves)
solution   d1 c : c a b </thought> d2 b : c b b \\boxed{ done } </thought>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from components.tasks.base import Draw, Problem
from components.tasks.moves import MoveDifficulty, MoveTask, State

PEGS = "abc"
MAX_DISKS = 4


@dataclass(frozen=True, kw_only=True)
class Difficulty(MoveDifficulty):
    """Difficulty of the problems.

    Attributes:
        disks: number of disks, 1 to 4 (the shipped model was trained with 3).
    """

    distance: tuple[int, int] = (3, 7)
    disks: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.disks <= MAX_DISKS:
            raise ValueError(f"disks: expected 1 to {MAX_DISKS}, got {self.disks}.")
        if self.distance[0] >= 2**self.disks:
            raise ValueError(
                f"distance: no two positions of {self.disks} disks are {self.distance[0]} moves apart; expected fewest "
                f"≤ {2**self.disks - 1}."
            )


class Hanoi(MoveTask):
    """Moves disks between three pegs, never a larger one onto a smaller one."""

    name = "hanoi"
    model = "tiny_hanoi"
    difficulty = Difficulty
    sure = 0.45
    warm_up = (Difficulty(distance=(1, 7), slack=(0, 3)),)

    def draw(self, draw: Draw, difficulty: Any) -> Problem | None:
        """Two random positions; None unless they are as far apart as the difficulty says."""
        start, goal = ([int(draw() * 3) for _ in range(difficulty.disks)] for _ in range(2))
        question = f"{self.state_words(tuple(start))} to {self.state_words(tuple(goal))}"
        return self.with_budget(
            {"task": self.name, "question": question, "start": start, "goal": goal}, draw, difficulty
        )

    def legal(self, problem: Problem, state: State) -> dict[str, State]:
        """A disk may move to a peg if no smaller disk is on its own peg or on that one."""
        return {
            f"d{disk + 1} {PEGS[peg]}": (*state[:disk], peg, *state[disk + 1 :])
            for disk, own in enumerate(state)
            for peg in range(3)
            if peg != own and own not in state[:disk] and peg not in state[:disk]
        }

    def is_goal(self, problem: Problem, state: State) -> bool:
        """Whether every disk is where it belongs."""
        return list(state) == list(problem["goal"])

    def state_words(self, state: State) -> str:
        """The peg of each disk, smallest disk first."""
        return " ".join(PEGS[peg] for peg in state)

    def words(self) -> list[str]:
        """Pegs, disks and numbers of moves."""
        disks = [f"d{i}" for i in range(1, MAX_DISKS + 1)]
        return [*PEGS, *disks, *self.move_words()]
