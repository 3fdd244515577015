"""Tasks whose thoughts are moves: a simulator, distances to the goal, and the first error where moves can be undone.

A thought is one move with the state after it, ``d1 c : c a b </thought>``; the move that reaches the goal boxes *done*
and ends the response. A move that does not apply, another state than the simulator's, a missing or early box, and
words in between make a thought wrong and the response lost. A useless move does not: it can be undone as long as the
budget of moves lasts. So the first error of a response is the first thought

- that is no legal move, or misreports the state after it, or
- after which not even an optimal continuation reaches the goal within the moves that remain

(our reading of "first wrong step" where steps can be undone: the last moment at which the problem was still solvable).
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from creditgraph.components.tasks.base import THOUGHT_END, Draw, Problem, Task, step_labels, words_of

MAX_MOVES = 12  # of the small models: their words number steps and moves up to here
DONE = "done"
STATE_ENTRIES = ("start", "goal", "capacity", "target", "edges")  # what distances depend on, of all families
State = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class MoveDifficulty:
    """How far the goal is, and how many moves may be wasted.

    Attributes:
        distance: fewest and most moves of the shortest solution.
        slack: fewest and most moves beyond it; 0 leaves no useless move unpunished.
    """

    distance: tuple[int, int] = (3, 5)
    slack: tuple[int, int] = (1, 3)

    def __post_init__(self) -> None:
        if not 1 <= self.distance[0] <= self.distance[1]:
            raise ValueError(f"distance: expected 1 ≤ fewest ≤ most, got {list(self.distance)}.")
        if not 0 <= self.slack[0] <= self.slack[1]:
            raise ValueError(f"slack: expected 0 ≤ fewest ≤ most, got {list(self.slack)}.")
        if self.distance[1] + self.slack[1] > MAX_MOVES:
            raise ValueError(
                f"distance and slack: expected at most {MAX_MOVES} moves in all, got "
                f"{self.distance[1] + self.slack[1]}."
            )


class MoveTask(Task):
    """Base of tasks with moves. A problem has "start" (a state), "moves" (the budget) and the family's own entries.

    Class attributes:
        sure: chance that the teacher makes an optimal move (`Task.sure`); else it makes any legal one, useful or not.
        slip: chance that the teacher reports the state after any legal move, which may be another one.
    """

    answer_kind = "steps"
    recoverable = True
    sure: float
    slip: ClassVar[float] = 0.03

    @abstractmethod
    def legal(self, problem: Problem, state: State) -> dict[str, State]:
        """Every legal move, as words, and the state after it."""

    @abstractmethod
    def is_goal(self, problem: Problem, state: State) -> bool:
        """Whether the state solves the problem."""

    @abstractmethod
    def state_words(self, state: State) -> str:
        """The state as words."""

    def with_budget(self, problem: Problem, draw: Draw, difficulty: MoveDifficulty) -> Problem | None:
        """Adds "moves" to a problem and to its question; None if its distance is none of the difficulty's."""
        distance = distances(self, problem).get(tuple(problem["start"]), 0)
        if not difficulty.distance[0] <= distance <= difficulty.distance[1]:
            return None
        low, high = difficulty.slack
        moves = distance + low + int(draw() * (high - low + 1))
        return problem | {"question": f"{problem['question']} in {moves}", "moves": moves}

    def thought(self, problem: Problem, move: str, after: State) -> str:
        """A move as text, with the state after it; it boxes `DONE` at the goal."""
        box = f" \\boxed{{ {DONE} }}" if self.is_goal(problem, after) else ""
        return f"{move} : {self.state_words(after)}{box} {THOUGHT_END}"

    def thoughts_from(self, problem: Problem, state: State) -> dict[str, State]:
        """Every right thought from a state, and the state after it; all other thoughts lose the problem."""
        return {self.thought(problem, move, after): after for move, after in self.legal(problem, state).items()}

    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """As the module says; 0 for a response that reaches the goal within its moves."""
        state = tuple(problem["start"])
        far = distances(self, problem)
        for i, text in enumerate(thoughts, 1):
            following = {tuple(words_of(t)): after for t, after in self.thoughts_from(problem, state).items()}
            after = following.get(tuple(words_of(text)))
            if after is None or far.get(after, MAX_MOVES) > problem["moves"] - i:
                return i
            if self.is_goal(problem, after):
                return 0 if i == len(thoughts) else i + 1
            state = after
        return len(thoughts) + 1

    def accepts(self, problem: Problem, thoughts: Sequence[str], boxed: str | None) -> bool:
        """Whether the moves are legal, truthfully reported, and reach the goal within the budget."""
        return self.first_error(problem, thoughts) == 0

    def answer(self, problem: Problem) -> str:
        """The word that ends a solution; it says nothing about whether the response is right."""
        return DONE

    def solution(self, problem: Problem) -> list[str]:
        """A shortest solution; of several moves the first in the order of `legal`."""
        return self._walk(problem, lambda good, following: (good[0], following[good[0]]))

    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """Optimal moves with chance `sure`, else any legal one; with chance `slip` the state after any legal one."""

        def choose(good: list[str], following: dict[str, State]) -> tuple[str, State]:
            moves = good if draw() < self.sure else list(following)
            move = moves[int(draw() * len(moves))]
            slipped = draw() < self.slip
            return move, list(following.values())[int(draw() * len(following))] if slipped else following[move]

        return self._walk(problem, choose)

    def _walk(self, problem: Problem, choose: Callable[[list[str], dict[str, State]], tuple[str, State]]) -> list[str]:
        """Goes on from the state that is reported; `choose` gets the best moves and all with the state after each."""
        state = tuple(problem["start"])
        thoughts: list[str] = []
        far = distances(self, problem)
        while len(thoughts) < problem["moves"] and not self.is_goal(problem, state):
            following = self.legal(problem, state)
            nearest = min(far.get(after, MAX_MOVES) for after in following.values())
            good = [move for move, after in following.items() if far.get(after, MAX_MOVES) == nearest]
            move, state = choose(good, following)
            thoughts.append(self.thought(problem, move, state))
        return thoughts

    def remark(self, problem: Problem, thoughts: Sequence[str]) -> str:
        """How many moves from the goal the thoughts lead; nothing once one of them is not legal or not truthful."""
        state = tuple(problem["start"])
        for text in thoughts:
            following = {tuple(words_of(t)): after for t, after in self.thoughts_from(problem, state).items()}
            if tuple(words_of(text)) not in following:
                return ""
            state = following[tuple(words_of(text))]
        return str(distances(self, problem).get(state, ""))

    def move_words(self) -> list[str]:
        """The words that every task with moves needs."""
        return [":", "to", "in", DONE, *step_labels(MAX_MOVES)]


def distances(task: MoveTask, problem: Problem) -> Mapping[State, int]:
    """State → fewest moves from it to the goal, for every state reachable from the start that can reach the goal."""
    entries = {name: value for name, value in problem.items() if name in STATE_ENTRIES}
    return _distances(task, tuple((name, _frozen(value)) for name, value in sorted(entries.items())))


def _frozen(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=4096)
def _distances(task: MoveTask, entries: tuple[tuple[str, Any], ...]) -> dict[State, int]:
    problem = dict(entries)
    before: dict[State, list[State]] = {tuple(problem["start"]): []}
    queue = list(before)
    for state in queue:
        for after in task.legal(problem, state).values():
            if after not in before:
                before[after] = []
                queue.append(after)
            before[after].append(state)
    reached = [state for state in before if task.is_goal(problem, state)]
    far = dict.fromkeys(reached, 0)
    for state in reached:
        for earlier in before[state]:
            if earlier not in far:
                far[earlier] = far[state] + 1
                reached.append(earlier)
    return far
