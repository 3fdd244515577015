"""Two jugs and a target amount: fill, empty and pour; wasted moves can be made good, at the price of the budget.

question   3 5 : 0 0 to 4 in 8        (capacities of jugs a and b, what they hold, the target, at most eight moves)
solution   fill b : 0 5 </thought> pour b a : 3 2 </thought> empty a : 0 2 </thought> …
"""

from dataclasses import dataclass
from typing import Any

from creditgraph.components.tasks.base import Draw, Problem
from creditgraph.lab.tasks.moves import MoveDifficulty, MoveTask, State

NAMES = "ab"
MAX_CAPACITY = 9


@dataclass(frozen=True, kw_only=True)
class Difficulty(MoveDifficulty):
    """Difficulty of the problems.

    Attributes:
        capacity: smallest and largest jug, at most 9 (the shipped model was trained with 2 to 6).
    """

    distance: tuple[int, int] = (2, 5)
    capacity: tuple[int, int] = (2, 6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.capacity[0] < self.capacity[1] <= MAX_CAPACITY:
            raise ValueError(f"capacity: expected 1 ≤ smallest < largest ≤ {MAX_CAPACITY}, got {list(self.capacity)}.")


class Jugs(MoveTask):
    """Measures an amount with two jugs and a tap."""

    name = "jugs"
    model = "tiny_jugs"
    difficulty = Difficulty
    sure = 0.4
    warm_up = (Difficulty(distance=(1, 5), slack=(0, 3)),)

    def draw(self, draw: Draw, difficulty: Any) -> Problem | None:
        """Random jugs, contents and target; None unless it is as far away as the difficulty says."""
        low, high = difficulty.capacity
        capacity = [low + int(draw() * (high - low + 1)) for _ in NAMES]
        start = [int(draw() * (size + 1)) for size in capacity]
        target = 1 + int(draw() * max(capacity))
        question = f"{capacity[0]} {capacity[1]} : {start[0]} {start[1]} to {target}"
        problem = {"task": self.name, "question": question, "capacity": capacity, "start": start, "target": target}
        return self.with_budget(problem, draw, difficulty)

    def legal(self, problem: Problem, state: State) -> dict[str, State]:
        """A full jug cannot be filled, an empty one neither emptied nor poured, and none poured into a full one."""
        a, b = state
        size_a, size_b = problem["capacity"]
        to_b, to_a = min(a, size_b - b), min(b, size_a - a)
        following = {
            "fill a": (size_a, b),
            "fill b": (a, size_b),
            "empty a": (0, b),
            "empty b": (a, 0),
            "pour a b": (a - to_b, b + to_b),
            "pour b a": (a + to_a, b - to_a),
        }
        return {move: after for move, after in following.items() if after != state}

    def is_goal(self, problem: Problem, state: State) -> bool:
        """Whether a jug holds the target amount."""
        return int(problem["target"]) in state

    def state_words(self, state: State) -> str:
        """What each jug holds."""
        return " ".join(map(str, state))

    def words(self) -> list[str]:
        """Jugs, moves and numbers."""
        return [*NAMES, "fill", "empty", "pour", "0", *self.move_words()]
