"""Path-star: from the centre of a star graph along one of its arms to a goal; the other arms are dead ends.

question   3-7 5-2 3-5 7-1 : n3 to n1 in 4        (edges outwards in any order; at most four moves)
solution   3-7 </thought> 7-1 \\boxed{ done } </thought>

A thought is an edge, from where the walk is to the next node; one word each, so that a small model finds it in one
step of attention. The decision is the first one: which arm ends at the goal shows only in a walk backwards
from it, as many edges as the arm is long (2403.06963, where models that predict the next token learn the arms and not
the choice). Unlike there a walk may go back, at the price of the budget of moves, and the small model has been taught
to choose rightly at a rate.
"""

from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem
from creditgraph.lab.tasks.moves import DONE, MoveDifficulty, MoveTask, State

MAX_NODES = 13


@dataclass(frozen=True, kw_only=True)
class Difficulty(MoveDifficulty):
    """Difficulty of the problems; the distance is the length of every arm.

    Attributes:
        degree: fewest and most arms, at least 2; a graph has at most 13 nodes.
    """

    distance: tuple[int, int] = (2, 3)
    slack: tuple[int, int] = (0, 2)
    degree: tuple[int, int] = (2, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.degree[0] <= self.degree[1]:
            raise ValueError(f"degree: expected 2 ≤ fewest ≤ most, got {list(self.degree)}.")
        nodes = 1 + self.degree[1] * self.distance[1]
        if nodes > MAX_NODES:
            raise ValueError(f"degree and distance: expected at most {MAX_NODES} nodes, got {nodes}.")


class PathStar(MoveTask):
    """Walks from the centre of a star to the end of one arm."""

    name = "path_star"
    model = "tiny_path_star"
    difficulty = Difficulty
    sure = 0.7
    slip = 0.0  # a thought says nothing but the move
    warm_up = (Difficulty(distance=(1, 2)), Difficulty(), Difficulty())

    def draw(self, draw: Draw, difficulty: Any) -> Problem | None:
        """A star with numbers in any order on its nodes and its edges in any order."""
        degree, length = (
            low + int(draw() * (high - low + 1)) for low, high in (difficulty.degree, difficulty.distance)
        )
        centre, *others = sorted(range(1, MAX_NODES + 1), key=lambda _: draw())
        arms = [[centre, *others[arm * length : (arm + 1) * length]] for arm in range(degree)]
        edges = sorted((edge for arm in arms for edge in pairwise(arm)), key=lambda _: draw())
        goal = arms[0][-1]
        graph = " ".join(f"{inner}-{outer}" for inner, outer in edges)
        problem = {"start": [centre], "goal": [goal], "edges": [node for edge in edges for node in edge]}
        question = {"task": self.name, "question": f"{graph} : n{centre} to n{goal}"}
        return self.with_budget(question | problem, draw, difficulty)

    def legal(self, problem: Problem, state: State) -> dict[str, State]:
        """Along an edge, outwards or back."""
        edges = list(zip(problem["edges"][::2], problem["edges"][1::2], strict=True))
        following = [outer for inner, outer in edges if inner == state[0]]
        following += [inner for inner, outer in edges if outer == state[0]]
        return {f"{state[0]}-{node}": (node,) for node in following}

    def is_goal(self, problem: Problem, state: State) -> bool:
        """Whether the walk has arrived."""
        return list(state) == list(problem["goal"])

    def state_words(self, state: State) -> str:
        """The node."""
        return f"n{state[0]}"

    def thought(self, problem: Problem, move: str, after: State) -> str:
        """The edge alone: it says the state after it."""
        box = f" \\boxed{{ {DONE} }}" if self.is_goal(problem, after) else ""
        return f"{move}{box} {THOUGHT_END}"

    def words(self) -> list[str]:
        """Edges, nodes and numbers of moves."""
        nodes = range(1, MAX_NODES + 1)
        edges = [f"{inner}-{outer}" for inner, outer in permutations(nodes, 2)]
        return [*edges, *(f"n{node}" for node in nodes), *self.move_words()]
