"""Episodes whose turns are rows: per-episode views, returns, and rows that share a state."""

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import NamedTuple

import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import AlignmentError
from creditgraph.pipeline.core.jagged import Jagged, takes_lists
from creditgraph.pipeline.core.payloads import Rewards, Trajectories, Turns, check_aligned


class RecordedTurn(NamedTuple):
    """A turn that was played before: prompt and response as tokens, the response's text, and the state before it."""

    prompt: list[int]
    response: list[int]
    text: str
    state: str


def recorded_turns(trajectories: Trajectories, turns: Turns, rows: Iterable[int]) -> list[RecordedTurn]:
    """The turns in these rows, to be repeated."""
    prompts, responses = trajectories.prompt_tokens, trajectories.response_tokens
    return [
        RecordedTurn(prompts.row(i).tolist(), responses.row(i).tolist(), trajectories.text[i], turns.state[i])
        for i in rows
    ]


def by_episode(trajectories: Trajectories, turns: Turns) -> Jagged:
    """The rewards of the turns as a Jagged float64 with one row per episode, in the order of the batch's rows.

    Its `row_ids` is the episode of each turn, its `offsets[:-1]` the first turn of each episode. Raises AlignmentError
    where the turns are those of other trajectories, or an episode's turns are not consecutive rows in their order.
    """
    check_aligned(trajectories, turns)
    starts = torch.ones(len(turns), dtype=torch.bool)
    starts[1:] = turns.episode[1:] != turns.episode[:-1]
    broken = torch.zeros_like(starts)
    broken[1:] = ~starts[1:] & (turns.turn[1:] != turns.turn[:-1] + 1)
    if int(starts.sum()) != len(torch.unique(turns.episode)) or bool(broken.any()):
        raise AlignmentError(
            f"{turns.origin or 'turns'}: expected the turns of an episode in consecutive rows, in their order; got "
            f"{int(starts.sum())} runs of rows for {len(torch.unique(turns.episode))} episodes and {int(broken.sum())} "
            "turns out of order. Keep all rows of an episode together."
        )
    first = starts.nonzero(as_tuple=True)[0]
    return Jagged.from_lengths(turns.reward.double(), torch.diff(first, append=torch.tensor([len(turns)])))


def rows_before(trajectories: Trajectories, turns: Turns) -> list[list[int]]:
    """For each turn the rows of all turns before it, in order: of its episode, and of the one that this continues.

    The first row of an episode that continues another one has the row of the turn before it as `parent`.

    Raises:
        AlignmentError: rows of turns before are missing.
    """
    place = {uid: row for row, uid in enumerate(trajectories.uid.tolist())}
    begins = (turns.uid == turns.episode).tolist()
    above = [place.get(p, -1) if begins[i] else i - 1 for i, p in enumerate(trajectories.parent.tolist())]
    paths: list[list[int]] = []
    for row, number in enumerate(turns.turn.tolist()):
        path: list[int] = []
        while (row := above[row]) >= 0:
            path.append(row)
        if len(path) != number:
            raise AlignmentError(
                f"{turns.origin or 'turns'}: expected all turns of each episode, from its first on; got {len(path)} of "
                f"{number} before turn {number + 1} of trajectory {int(turns.uid[len(paths)])}. Merge the rows of the "
                "episodes that it continues."
            )
        paths.append(path[::-1])
    return paths


def episode_rows(turns: Turns) -> tuple[Tensor, Tensor]:
    """The first row of each episode, int64 [E], and the episode of each row, int64 [N]; rows may be in any order."""
    ids, place = torch.unique(turns.episode, return_inverse=True)
    first = torch.full((len(ids),), len(turns)).scatter_reduce_(0, place, torch.arange(len(turns)), "amin")
    return first, place


def episode_returns(turns: Turns) -> tuple[Tensor, Tensor]:
    """Sum of rewards of each row's episode, float64 [N], and which rows are the first of theirs, bool [N]."""
    first, place = episode_rows(turns)
    value = torch.zeros(len(first), dtype=torch.float64).index_add_(0, place, turns.reward.double())
    return value[place], first[place] == torch.arange(len(turns))


def episode_ends(turns: Turns) -> tuple[Tensor, Tensor]:
    """As `episode_returns`, with the reward of the episode's last turn alone."""
    first, place = episode_rows(turns)
    last = torch.full((len(first),), -1, dtype=torch.int64).scatter_reduce(0, place, turns.turn.long(), "amax")
    ends = turns.turn == last[place]
    value = torch.zeros(len(first), dtype=torch.float64).index_add_(0, place[ends], turns.reward[ends].double())
    return value[place], first[place] == torch.arange(len(turns))


def mean_of_others(
    total: Tensor, count: Tensor, group: Tensor, valid: Tensor, episode: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ total / Σ count over the other valid rows of each row's group, float64 [N], and that Σ count; 0 without any.

    Args:
        total, count, group, valid: [N].
        episode: [N], rows of which are left out together; each row is its own when None.
    """
    place = torch.unique(group, return_inverse=True)[1]
    owner = torch.arange(len(place)) if episode is None else episode
    own = torch.unique(torch.stack([place, owner], 1), dim=0, return_inverse=True)[1]

    def others(value: Tensor) -> Tensor:
        value = torch.where(valid, value.double(), 0.0)
        sums = [value.new_zeros(len(value)).index_add_(0, ids, value)[ids] for ids in (place, own)]
        return sums[0] - sums[1]

    above, below = others(total), others(count)
    return torch.where(below > 0, above / below.clamp(min=1), 0.0), below


def last_turns(episodes: Jagged) -> Tensor:
    """bool [N]: whether a turn is the last one of its episode; `episodes` has one row per episode."""
    last = torch.zeros(len(episodes.values), dtype=torch.bool)
    last[episodes.offsets[1:] - 1] = True
    return last


def returns_to_go(rewards: Jagged, gamma: float = 1.0) -> Jagged:
    """R_t = Σ_{k ≥ t} γ^(k−t) r_k for each turn of each episode; float64, `rewards` has one row per episode."""
    padded = rewards.to(torch.float64).to_padded(0.0)
    # From the last turn backwards, for all episodes at once; padding after the end is 0.
    for t in range(padded.shape[1] - 2, -1, -1):
        padded[:, t] += gamma * padded[:, t + 1]
    return rewards.with_values(padded[rewards.row_ids, rewards.positions])


def next_values(value: Tensor, episodes: Jagged) -> Tensor:
    """Of each turn [N] the value [N] of the next turn of its episode, 0 after the last; one row per episode."""
    return torch.cat([value[1:], value[:1]]).where(~last_turns(episodes), 0.0)


@takes_lists
def turn_gae(reward: Jagged, value: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ v(s_{t+1}) − v(s_t), v = 0 after the last turn; float64 [N].

    With γ = 1, exact values and states that determine what follows, E[Σ A ∇log π] = ∇J for every λ. λ = 1 gives
    Σ_{k ≥ t} r_k − v(s_t), unbiased for any v that does not depend on the episode's actions from t on.

    Args:
        reward: one row per episode.
        value: [N], at the start of each turn.
        gamma, lam: discount and trace per turn.
    """
    delta = reward.values + gamma * next_values(value, reward) - value
    return returns_to_go(reward.with_values(delta), gamma * lam).values


def state_groups(group: Tensor, state: list[str], similarity: float = 1.0) -> Tensor:
    """int64 [N]: an id for each pair of `group` [N] and state key; a row whose state is unknown ("") has its own.

    Below a `similarity` of 1, a state counts as the first one of its group, in the order of the rows, whose
    `difflib.SequenceMatcher.ratio` with it is that large or larger.
    """
    if similarity < 1.0:
        state = _representatives(group, state, similarity)
    ids: dict[tuple[int, str], int] = {}
    found = [ids.setdefault((g, s), len(ids)) if s else -1 for g, s in zip(group.tolist(), state, strict=True)]
    place = torch.tensor(found, dtype=torch.int64)
    return torch.where(place < 0, len(ids) + torch.arange(len(place)), place)


def _representatives(group: Tensor, state: list[str], similarity: float) -> list[str]:
    """The state that each one counts as."""
    firsts: dict[int, list[str]] = {}
    counts_as: dict[tuple[int, str], str] = {}
    for g, s in zip(group.tolist(), state, strict=True):
        if s and (g, s) not in counts_as:
            known = firsts.setdefault(g, [])
            near = next((other for other in known if SequenceMatcher(None, other, s).ratio() >= similarity), None)
            if near is None:
                known.append(s)
            counts_as[g, s] = near or s
    return [counts_as[g, s] if s else "" for g, s in zip(group.tolist(), state, strict=True)]


def check_episode_rewards(rewards: Rewards, turns: Turns) -> None:
    """Raises AlignmentError unless all turns of each episode have the same reward and validity."""
    rows, place = episode_rows(turns)
    first, value, valid = rows[place], rewards.value, rewards.valid
    differs = (valid != valid[first]) | (valid & (value != value[first]))
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise AlignmentError(
            f"{rewards.origin or 'rewards'}: expected one reward per episode, the same on all of its turns; got "
            f"{float(value[first[row]]):g} on its first turn and {float(value[row]):g} on turn "
            f"{int(turns.turn[row]) + 1}. Wire rewards.episode."
        )
