"""Exact values V^π of task families whose thoughts are moves, by dynamic programming.

A family of moves loses a problem with every thought but the right ones (`MoveTask.thoughts_from`), and a budget bounds
their number. So with p(thought | so far) from the policy,

    V(so far) = Σ p(thought) · [1 if it reaches the goal, else V(so far + thought)],   V = 0 without moves left,

where the sum is over right thoughts; the rest of the probability loses. A policy that looks only at state and moves
left needs one value per pair of them (`markov_values`); a language model reads its whole response, so `history_values`
goes over all sequences of right thoughts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from creditgraph.components.tasks.base import Problem
from creditgraph.lab.tasks.moves import MoveTask, State
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged

History = tuple[str, ...]  # the thoughts so far
MAX_HISTORIES = 200_000


def markov_values(
    task: MoveTask, problem: Problem, policy: Callable[[State, int], Mapping[str, float]]
) -> dict[tuple[State, int], float]:
    """V of every reachable (state, moves left) for a policy that looks at nothing else.

    Args:
        task: the family.
        problem: one of its problems.
        policy: (state, moves left) → probability of each thought; thoughts that it leaves out have none.
    """
    values: dict[tuple[State, int], float] = {}

    def value(state: State, left: int) -> float:
        if task.is_goal(problem, state):
            return 1.0
        if left == 0:
            return 0.0
        if (state, left) not in values:
            chances = policy(state, left)
            following = task.thoughts_from(problem, state)
            values[state, left] = sum(
                chances.get(thought, 0.0) * value(after, left - 1) for thought, after in following.items()
            )
        return values[state, left]

    value(tuple(problem["start"]), int(problem["moves"]))
    return values


def history_values(task: MoveTask, problem: Problem, policy: Policy, temperature: float = 1.0) -> dict[History, float]:
    """V after every sequence of right thoughts that has not reached the goal; () is the prompt.

    The probability of a thought is that of its tokens as the tokenizer writes them, scored depth by depth.

    Args:
        task: the family.
        problem: one of its problems.
        policy: a language model, sampled without top_p.
        temperature: at which it samples.

    Raises:
        ValueError: more than `MAX_HISTORIES` sequences.
    """
    following = _right_histories(task, problem)
    chance = _chances(task, problem, policy, following, temperature)
    values: dict[History, float] = {}
    for history in sorted(following, key=len, reverse=True):
        total = 0.0
        for thought, after in following[history].items():
            longer = (*history, thought)
            gain = 1.0 if task.is_goal(problem, after) else values.get(longer, 0.0)
            total += chance[longer] * gain
        values[history] = total
    return values


def _right_histories(task: MoveTask, problem: Problem) -> dict[History, dict[str, State]]:
    """Every sequence of right thoughts with moves left, and the right thoughts after it."""
    found: dict[History, dict[str, State]] = {}
    depth: list[tuple[History, State]] = [((), tuple(problem["start"]))]
    for _ in range(int(problem["moves"])):
        deeper = []
        for history, state in depth:
            found[history] = task.thoughts_from(problem, state)
            deeper += [
                ((*history, thought), after)
                for thought, after in found[history].items()
                if not task.is_goal(problem, after)
            ]
        if len(found) + len(deeper) > MAX_HISTORIES:
            raise ValueError(
                f"{task.name}: more than {MAX_HISTORIES} sequences of thoughts; expected a problem with fewer moves. "
                "Lower distance or slack."
            )
        depth = deeper
    return found


def _chances(
    task: MoveTask,
    problem: Problem,
    policy: Policy,
    following: Mapping[History, Mapping[str, Any]],
    temperature: float,
) -> dict[History, float]:
    """The probability of the last thought of each sequence, given the prompt and the thoughts before it."""
    prompt = task.solve_prompt(problem["question"])
    longer = [(*history, thought) for history, thoughts in following.items() for thought in thoughts]
    contexts = [_encoded(policy, [prompt, *thoughts[:-1]]) for thoughts in longer]
    # A thought is scored behind its context's own tokens, with the space that joins them.
    tokens = [_encoded(policy, [prompt, *thoughts])[len(c) :] for thoughts, c in zip(longer, contexts, strict=True)]
    scores = policy.score(
        Jagged.from_rows(contexts, torch.int32), Jagged.from_rows(tokens, torch.int32), temperature
    ).logprobs
    totals = [sum(row) for row in scores.to_lists()]
    return dict(zip(longer, torch.tensor(totals, dtype=torch.float64).exp().tolist(), strict=True))


def _encoded(policy: Policy, parts: Sequence[str]) -> list[int]:
    return list(policy.tokenizer.encode(" ".join(parts), add_special_tokens=False))
