"""Small batches that audited functions are called with, and how they are shown as counter-examples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Responses to prompts; rows in any order, tokens at the left, padding at the right.

    Attributes:
        rewards: float64 [N], outcome of each response.
        groups: int64 [N], the prompt of each.
        lengths: int64 [N], response tokens, observations of an environment included.
        valid: bool [N], False for a response that was rejected or could not be verified.
        truncated: bool [N], True for one that ran out of tokens.
        turns: int64 [N, T], the turn of each response token, −1 for observations between turns and for padding.
        turn_rewards: float64 [N, K], rewards of turns beside the outcome; 0 where a row has fewer turns.
        values: float64 [N, T], a critic's value before each token: what is still expected; 0 in padding.
    """

    rewards: Floats
    groups: Ints
    lengths: Ints
    valid: Bools
    truncated: Bools
    turns: Ints
    turn_rewards: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def width(self) -> int:
        """T, tokens of a padded row."""
        return int(self.turns.shape[1])

    @property
    def mask(self) -> Bools:
        """bool [N, T]: tokens that the policy chose; not observations, not padding."""
        chosen: Bools = self.turns >= 0
        return chosen

    @property
    def last(self) -> Ints:
        """int64 [N]: place of each row's last response token."""
        return np.maximum(self.lengths - 1, 0)

    @property
    def token_rewards(self) -> Floats:
        """float64 [N, T]: the outcome at each row's last response token, 0 elsewhere."""
        out = np.zeros((len(self), self.width))
        out[np.arange(len(self)), self.last] = self.rewards
        return out

    @property
    def dones(self) -> Bools:
        """bool [N, T]: True at each row's last response token."""
        ends: Bools = np.arange(self.width)[None, :] == self.last[:, None]
        return ends

    @property
    def next_values(self) -> Floats:
        """float64 [N, T]: the value after each token, 0 after the last one."""
        after: Floats = np.concatenate([self.values[:, 1:], np.zeros((len(self), 1))], axis=1) * ~self.dones
        return after

    @property
    def last_values(self) -> Floats:
        """float64 [N]: the value after each row's last token, which is 0 as the response has ended."""
        return np.zeros(len(self))

    @property
    def baselines(self) -> Floats:
        """float64 [N]: the value of each row's prompt."""
        return self.values[:, 0]

    @property
    def old_logprobs(self) -> Floats:
        """float64 [N, T]: log-probs of the tokens, all alike."""
        return np.full(self.turns.shape, -0.7)

    @property
    def sum_pi_squared(self) -> Floats:
        """float64 [N, T]: Σ π² over the vocabulary before each token, all alike."""
        return np.full(self.turns.shape, 0.4)

    @property
    def group_sizes(self) -> Ints:
        """int64 [groups]: rows of each group."""
        return np.unique(self.groups, return_counts=True)[1]

    def with_(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def rows(self, index: Any) -> Self:
        """Some rows, in the order of an index or a mask."""
        index = np.asarray(index)
        index = index.nonzero()[0] if index.dtype == bool else index
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    def padded(self, width: int) -> Self:
        """The same rows with padding up to `width` tokens."""
        more = np.full((len(self), width - self.width), -1, dtype=np.int64)
        turns = np.concatenate([self.turns, more], axis=1)
        return self.with_(turns=turns, values=np.concatenate([self.values, np.zeros(more.shape)], axis=1))

    def shifted(self, amount: Any) -> Self:
        """The same rows with `amount`, a number or [N], added to their outcomes, which their critic knows of."""
        more = np.broadcast_to(np.asarray(amount, dtype=np.float64), (len(self),))
        inside = np.arange(self.width)[None, :] < self.lengths[:, None]
        return self.with_(rewards=self.rewards + more, values=self.values + np.where(inside, more[:, None], 0.0))

    def scaled(self, factor: float) -> Self:
        """The same rows with all rewards and values `factor` times as large."""
        names = ("rewards", "turn_rewards", "values")
        return self.with_(**{name: factor * getattr(self, name) for name in names})

    def shown(self) -> list[dict[str, Any]]:
        """The rows as a person reads them: what is usual is left out."""
        out = []
        for i in range(len(self)):
            row: dict[str, Any] = {"group": int(self.groups[i]), "reward": float(self.rewards[i])}
            row["tokens"] = int(self.lengths[i])
            if not self.valid[i]:
                row["valid"] = False
            if self.truncated[i]:
                row["truncated"] = True
            turns = self.turns[i, : self.lengths[i]]
            if turns.size and (turns.max() > 0 or turns.min() < 0):
                row["turns"] = turns.tolist()
                row["turn_rewards"] = self.turn_rewards[i, : turns.max() + 1].tolist()
            out.append(row)
        return out


def stacked(batches: list[Batch]) -> Batch:
    """All rows; narrower batches are padded."""
    width = max(b.width for b in batches)
    turns = max(b.turn_rewards.shape[1] for b in batches)

    def widened(b: Batch) -> Batch:
        more = np.zeros((len(b), turns - b.turn_rewards.shape[1]))
        return b.padded(width).with_(turn_rewards=np.concatenate([b.turn_rewards, more], axis=1))

    parts = [widened(b) for b in batches]
    return Batch(**{f.name: np.concatenate([getattr(b, f.name) for b in parts]) for f in dataclasses.fields(Batch)})


def make(
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    valid: list[bool] | None = None,
    truncated: list[bool] | None = None,
    turns: list[list[int]] | None = None,
    turn_rewards: list[list[float]] | None = None,
    values: list[list[float]] | None = None,
) -> Batch:
    """A batch from lists; each row has 3 tokens, one turn and a critic of no meaning unless said otherwise.

    >>> make([1.0, 0.0], [0, 0], lengths=[1, 2]).mask.tolist()
    [[True, False], [True, True]]
    """
    count = len(rewards)
    if turns is None:
        sizes = [3] * count if lengths is None else lengths
        turns = [[0] * size for size in sizes]
    sizes = [len(t) for t in turns]
    grid = np.full((count, max([1, *sizes])), -1, dtype=np.int64)
    for i, row in enumerate(turns):
        grid[i, : len(row)] = row
    kinds = int(grid.max(initial=0)) + 1
    given = np.zeros((count, kinds))
    for i, row_rewards in enumerate(turn_rewards or []):
        given[i, : len(row_rewards)] = row_rewards
    critic = np.zeros(grid.shape)
    for i, size in enumerate(sizes):
        critic[i, :size] = [((3 * i + 5 * t) % 7) / 10 for t in range(size)] if values is None else values[i]
    return Batch(
        rewards=np.array(rewards, dtype=np.float64),
        groups=np.array(groups, dtype=np.int64),
        lengths=np.array(sizes, dtype=np.int64),
        valid=np.ones(count, dtype=bool) if valid is None else np.array(valid, dtype=bool),
        truncated=np.zeros(count, dtype=bool) if truncated is None else np.array(truncated, dtype=bool),
        turns=grid,
        turn_rewards=given,
        values=critic,
    )
