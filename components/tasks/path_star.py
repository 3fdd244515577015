"""The family "path_star": find the arm of a star that leads to the goal; every other arm is a dead end.

Graphs are those of reasoning-gym's path_star (after 2403.06963): arms of equal length meet in the start, and the edges
are listed in a random order. A thought is a move along an edge, or back to the start:

    question   7 3 | 3 8 | 9 4 | 7 9 | start 7 goal 4 moves 5    (edges as pairs of nodes; at most five thoughts)
    solution   7 9 </thought> 9 4 \\boxed{ 4 } </thought>

A wrong arm costs moves and can be left: `7 3 </thought> 3 8 </thought> back </thought> 7 9 </thought> …`. The thought
that boxes its node ends the response, which is right if that node is the goal and all moves were possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from components.tasks.base import THOUGHT_END, Draw, Problem, step_labels, words_of
from components.tasks.library import LibraryTask

NODES = 40
KNOWS = 0.1  # how often the teacher enters the right arm knowingly; else any arm it has not tried
GIVES_UP = 0.75  # how often it claims a dead end to be the goal


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Difficulty of the problems.

    Attributes:
        arms: fewest and most arms, 2 to 5.
        length: fewest and most edges of an arm, 2 to 4.
        tries: arms that the moves suffice for, from 1, which makes a wrong arm final.
    """

    arms: tuple[int, int] = (3, 5)
    length: tuple[int, int] = (2, 3)
    tries: int = 3

    def __post_init__(self) -> None:
        for name, (low, high), least, most in (("arms", self.arms, 2, 5), ("length", self.length, 2, 4)):
            if not least <= low <= high <= most:
                raise ValueError(f"{name}: expected {least} ≤ fewest ≤ most ≤ {most}, got [{low}, {high}].")
        if not 1 <= self.tries <= 5:
            raise ValueError(f"expected 1 ≤ tries ≤ 5, got {self.tries}.")


class PathStar(LibraryTask):
    """A search with dead ends.

    A thought is wrong when it is no possible move or does not bring the policy nearer to the goal: entering a wrong arm
    and going on in it are wrong, going back from there is right. A response with wrong thoughts may still be accepted.
    """

    name = "path_star"
    model = "tiny_path_star"
    answer_kind = "steps"
    recoverable = True
    difficulty = Difficulty

    def from_row(self, row: dict[str, Any], difficulty: Difficulty) -> Problem | None:
        """The problem of a row."""
        edges = list(zip(row["edges"][::2], row["edges"][1::2], strict=True))
        length = len(edges) // row["arms"]
        if not difficulty.arms[0] <= row["arms"] <= difficulty.arms[1]:
            return None
        if not difficulty.length[0] <= length <= difficulty.length[1]:
            return None
        return _problem(edges, row["start"], row["goal"], (difficulty.tries - 1) * (length + 1) + length)

    def draw(self, draw: Draw, difficulty: Difficulty) -> Problem | None:
        """A row with other node labels and its edges in another order."""
        rows = self.problems(difficulty)
        row = rows[int(draw() * len(rows))]
        labels = sorted(range(NODES), key=lambda _: draw())
        edges = sorted(((labels[a], labels[b]) for a, b in row["edges"]), key=lambda _: draw())
        return _problem(edges, labels[row["start"]], labels[row["goal"]], row["moves"])

    def solution(self, problem: Problem) -> list[str]:
        """The moves along the right arm."""
        before = {b: a for a, b in problem["edges"]}
        path = [problem["goal"]]
        while path[-1] != problem["start"]:
            path.append(before[path[-1]])
        return _thoughts([f"{a} {b}" for a, b in pairwise(path[::-1])], problem["goal"])

    def answer(self, problem: Problem) -> str:
        """The goal."""
        return str(problem["goal"])

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """The first thought that is no possible move or does not lead nearer to the goal."""
        return _walk(problem, thoughts)[0]

    def accepts(self, problem: Problem, thoughts: Sequence[str], boxed: str | None) -> bool:
        """Whether possible moves, not too many, end with the goal in the box."""
        return _walk(problem, thoughts)[1]

    def words(self) -> list[str]:
        """Nodes, marks and the move back."""
        return [*map(str, range(NODES)), "|", "start", "goal", "moves", "back", *step_labels(24)]

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Tries arms, mostly blindly, and often claims the end of a wrong one to be the goal."""
        start, goal = problem["start"], problem["goal"]
        after = {a: b for a, b in problem["edges"] if a != start}
        arms = [b for a, b in problem["edges"] if a == start]
        right = self.solution(problem)[0].split()[1]
        said: list[str] = []
        while True:
            knows = int(right) in arms and draw() < KNOWS
            node = int(right) if knows else arms[int(draw() * len(arms))]
            arms.remove(node)
            said.append(f"{start} {node}")
            while node in after:
                said.append(f"{node} {after[node]}")
                node = after[node]
            if node == goal or len(said) + 1 >= problem["moves"] or draw() < GIVES_UP:
                return _thoughts(said, node)
            said.append("back")


def _problem(edges: Sequence[tuple[int, int]], start: int, goal: int, moves: int) -> Problem:
    pairs = " ".join(f"{a} {b} |" for a, b in edges)
    return {
        "task": "path_star",
        "question": f"{pairs} start {start} goal {goal} moves {moves}",
        "edges": [list(edge) for edge in edges],
        "start": start,
        "goal": goal,
        "moves": moves,
    }


def _walk(problem: Problem, thoughts: Sequence[str]) -> tuple[int, bool]:
    """The first thought that is wrong, 0 without one, and whether the whole response is accepted."""
    # As words: what a policy writes need be no number.
    edges = {(str(a), str(b)) for a, b in problem["edges"]}
    start, goal = str(problem["start"]), str(problem["goal"])
    ahead = {goal}  # nodes from which the goal can still be reached
    for _ in edges:
        ahead |= {a for a, b in edges if b in ahead and a != start}
    node, error = start, 0
    for i, thought in enumerate(thoughts, 1):
        said = words_of(thought)
        boxed = f"\\boxed{{ {goal} }}".split()
        pair = tuple(said[:2])
        if said == ["back", THOUGHT_END] and node != start:
            right, node = node not in ahead, start
        elif pair in edges and pair[0] == node and said[2:] == [THOUGHT_END]:
            node = pair[1]
            right = node in ahead and node != goal
        elif pair in edges and pair == (node, goal) and said[2:] == [*boxed, THOUGHT_END]:
            last = i == len(thoughts)
            return error or (0 if last else i + 1), last and i <= problem["moves"]
        else:
            return error or i, False
        error = error or (0 if right and i < problem["moves"] else i)
    return error or len(thoughts) + 1, False


def _thoughts(said: Sequence[str], box: int) -> list[str]:
    return [f"{move} {THOUGHT_END}" for move in (*said[:-1], f"{said[-1]} \\boxed{{ {box} }}")]
