"""Episodes of a page: which turn of which episode each rollout is."""

from typing import Any, Protocol

Found = dict[int, tuple[dict[str, Any], int]]
"""uid → (columns of its batch, row)"""


class _Page(Protocol):
    """What is read of `Rollouts`."""

    rows: dict[str, list[Any]]
    texts: Any


def add_turn(page: _Page, turns: Found, uid: int, known: dict[int, int]) -> None:
    """Appends the columns of `Turns` for a rollout; −1 as its episode if it is no turn.

    Args:
        page: receives them.
        turns: what is recorded of an iteration.
        uid: of the rollout.
        known: uid → number in the page, of the rollouts so far.
    """
    table, i = turns.get(uid, (None, 0))
    rows = page.rows
    rows["episode"].append(known.get(table["episode"][i], -1) if table else -1)
    rows["turn"].append(table["turn"][i] if table else -1)
    rows["turn_reward"].append(table["reward"][i] if table else 0.0)
    rows["turn_done"].append(int(table["done"][i]) if table else 0)
    rows["turn_state"].append(page.texts.add(table["state"][i] if table else ""))
    rows["turn_fault"].append(page.texts.add(table["fault"][i] if table else ""))
