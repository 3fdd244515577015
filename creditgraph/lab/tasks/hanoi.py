"""Tower of Hanoi between any two positions: every move can be undone, at the price of the budget of moves.

question   x1 x2 y3 to z1 y2 y3 in 6        (pegs of disks 1, 2 and 3, the smallest first; at most six moves)
solution   z1 : z1 x2 y3 </thought> y2 : z1 y2 y3 \\boxed{ done } </thought>
"""

from dataclasses import dataclass
from typing import Any

from creditgraph.components.tasks.base import Draw, Problem
from creditgraph.lab.tasks.moves import MoveDifficulty, MoveTask, State

PEGS = "xyz"
MAX_DISKS = 4


@dataclass(frozen=True, kw_only=True)
class Difficulty(MoveDifficulty):
    """Difficulty of the problems.

    Attributes:
        disks: number of disks, 1 to 4 (the shipped model was trained with 3).
    """

    distance: tuple[int, int] = (1, 7)
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
    sure = 0.7
    warm_up = (Difficulty(distance=(1, 3), slack=(0, 3)), Difficulty(slack=(0, 3)), Difficulty(slack=(0, 3)))

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
            f"{PEGS[peg]}{disk + 1}": (*state[:disk], peg, *state[disk + 1 :])
            for disk, own in enumerate(state)
            for peg in range(3)
            if peg != own and own not in state[:disk] and peg not in state[:disk]
        }

    def is_goal(self, problem: Problem, state: State) -> bool:
        """Whether every disk is where it belongs."""
        return list(state) == list(problem["goal"])

    def state_words(self, state: State) -> str:
        """The peg of each disk, smallest disk first; one word each, so that a move is a word of the next state."""
        return " ".join(f"{PEGS[peg]}{disk}" for disk, peg in enumerate(state, 1))

    def words(self) -> list[str]:
        """Pegs of disks, and numbers of moves."""
        return [*(f"{peg}{disk}" for disk in range(1, MAX_DISKS + 1) for peg in PEGS), *self.move_words()]
