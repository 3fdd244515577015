"""Responses of another trainer as the payloads of a graph, and the credit of a graph as the trainer's tensors."""

from collections.abc import Hashable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories, Turns

UNKNOWN_FINISH = "unknown"


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts:
    """A batch of responses as another trainer holds it: one row per response, or per step, padded on the right.

    Attributes:
        mask: bool or number [N, T], not 0 where the policy sampled the token and is trained on it; 0 on padding and on
            what a tool or an environment wrote.
        rewards: float [N], or [N, T] with each reward at a token. A row without a finite reward gets zero credit.
        group: N ids; responses to the same prompt share one.
        episode: N ids, where a row is a step: the rows of an episode share one, next to each other and in order. By
            default every row is an episode. Steps with `prompts` have states: what the policy has not read before.
        tokens: int [N, T], ids of the response; None where the trainer's hook does not pass them.
        prompts: N prompts as token ids, without padding; None where they are not passed.
        turn_rewards: of each row, the reward of each of its turns; by default `rewards` [N, T] says where they are,
            and `rewards` [N] belong to the last turn of their row.
        states: of each row, a key of the environment's state before each turn, "" where unknown; by default the tokens
            that were read since the turn before, where `tokens` are known.
        values: float [N, T], a critic's value before each token.
        logprobs, entropies: float [N, T], of the sampling distribution [nats].
        texts, answers: N prompts as texts, and their reference answers.
        responses: N texts.
        temperature: of sampling.
    """

    mask: Tensor
    rewards: Tensor
    group: Sequence[Hashable] | Tensor | np.ndarray[Any, Any]
    episode: Sequence[Hashable] | Tensor | np.ndarray[Any, Any] | None = None
    tokens: Tensor | None = None
    prompts: Sequence[Sequence[int]] | None = None
    turn_rewards: Sequence[Sequence[float]] | None = None
    states: Sequence[Sequence[str]] | None = None
    values: Tensor | None = None
    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    texts: Sequence[str] | None = None
    answers: Sequence[str] | None = None
    responses: Sequence[str] | None = None
    temperature: float = 1.0
    trained: Tensor = field(init=False)
    """bool [N, T], `mask` on the CPU"""
    first: Tensor = field(init=False)
    """int64 [N], the first row of each row's episode"""

    def __post_init__(self) -> None:
        if self.mask.dim() != 2:
            raise DataError(f"rollouts: expected a mask of shape [N, T], got {tuple(self.mask.shape)}.")
        object.__setattr__(self, "trained", self.mask.detach().cpu() != 0)
        rows, width = self.mask.shape
        for name in ("tokens", "values", "logprobs", "entropies"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (rows, width):
                raise DataError(f"rollouts: {name} has shape {tuple(value.shape)}, but the mask {(rows, width)}.")
        if tuple(self.rewards.shape) not in ((rows,), (rows, width)):
            raise DataError(
                f"rollouts: rewards of shape {tuple(self.rewards.shape)}; expected {(rows,)} or {(rows, width)}."
            )
        for name in ("group", "episode", "prompts", "turn_rewards", "states", "texts", "answers", "responses"):
            value = getattr(self, name)
            if value is not None and len(value) != rows:
                raise DataError(f"rollouts: {len(value)} entries in {name}, but {rows} rows in the mask.")
        object.__setattr__(self, "first", torch.arange(rows) if self.episode is None else self._first_rows())

    def _first_rows(self) -> Tensor:
        """Raises DataError where rows of an episode are apart, or of several groups."""
        episode, group = places_of_groups(self.episode), places_of_groups(self.group)
        apart = (torch.diff(episode) < 0).nonzero()
        if len(apart):
            raise DataError(
                f"rollouts: row {int(apart[0]) + 1} is apart from the other rows of its episode. Sort the batch by "
                "episode, and its steps in order."
            )
        first = torch.searchsorted(episode, episode)
        other = (group != group[first]).nonzero()
        if len(other):
            raise DataError(f"rollouts: row {int(other[0])} has another group than the first row of its episode.")
        return first

    def __len__(self) -> int:
        return len(self.mask)


@dataclass(frozen=True, eq=False, kw_only=True)
class Spans:
    """M pieces of rows: each begins in `row`, int64 [M]; `at` has its places in the rows end to end, rising."""

    row: Tensor
    at: Jagged

    def gather(self, padded: Tensor) -> Jagged:
        """The values of padded [N, T] in each piece."""
        return self.at.with_values(padded.detach().cpu().reshape(-1)[self.at.values])

    def scatter(self, values: Jagged, like: Tensor) -> Tensor:
        """The values in a tensor of the shape of `like` [N, T], 0 outside of the pieces."""
        out = torch.zeros(like.shape, dtype=values.values.dtype)
        out.view(-1)[self.at.values] = values.values
        return out


def whole_rows(trained: Tensor, gaps: bool, first: Tensor | None = None) -> Spans:
    """Of each row of bools [N, T] the tokens that are trained on; with `gaps` also those between them.

    With `first` (`Rollouts.first`) those of each episode.
    """
    if gaps:
        trained = (trained.cumsum(1) > 0) & (trained.flip(1).cumsum(1).flip(1) > 0)
    first = torch.arange(len(trained)) if first is None else first
    row = torch.unique(first)
    lengths = torch.zeros_like(first).index_add(0, first, trained.sum(1))
    return Spans(row=row, at=Jagged.from_lengths(trained.flatten().nonzero()[:, 0], lengths[row]))


def turns_of(trained: Tensor) -> Spans:
    """Runs of tokens of bools [N, T] that are trained on without a gap: the turns of the policy, row by row."""
    edges = torch.diff(torch.nn.functional.pad(trained.int(), (1, 1)), dim=1)
    row, begin = (edges == 1).nonzero(as_tuple=True)
    end = (edges == -1).nonzero(as_tuple=True)[1]
    return Spans(row=row, at=Jagged.from_lengths(trained.flatten().nonzero()[:, 0], end - begin))


def starts(spans: Spans, width: int) -> Tensor:
    """int64 [M]: the first place of each piece within its row of `width` tokens, 0 for one without tokens."""
    full = spans.at.lengths > 0
    first = torch.zeros_like(spans.row)
    first[full] = spans.at.values[spans.at.offsets[:-1][full]] % width
    return first


def places_of_groups(group: Any) -> Tensor:
    """int64 [N]: a number for each id, in the order in which they come."""
    ids: dict[Hashable, int] = {}
    entries = group.tolist() if isinstance(group, Tensor | np.ndarray) else group
    return torch.tensor([ids.setdefault(entry, len(ids)) for entry in entries], dtype=torch.int64)


def uids(place: Tensor, iteration: int) -> Tensor:
    """int64 [N]: of places in a batch; unique over batches, as verifiers remember what they have verified."""
    return place + (iteration << 32)


def place_of(uid: Tensor) -> Tensor:
    """int64 [N]: the places of `uids`."""
    return uid & 0xFFFFFFFF


def outcomes(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """The sum of the rewards of each row's episode, float32 [N], and whether it is finite, bool [N]."""
    rewards = rollouts.rewards.detach().cpu().double()
    if rollouts.turn_rewards is not None:
        of_row = torch.tensor([float(sum(row)) for row in rollouts.turn_rewards], dtype=torch.float64)
    else:
        of_row = rewards if rewards.dim() == 1 else rewards.sum(1)
    total = torch.zeros_like(of_row).index_add(0, rollouts.first, of_row)[rollouts.first]
    valid = torch.isfinite(total)
    return total.where(valid, 0.0).float(), valid


def trajectories_of(rollouts: Rollouts, spans: Spans, group: Tensor, uid: Tensor) -> Trajectories:
    """The spans as trajectories; what is not known is 0 in token ids and NaN in numbers. `group` [N] are uids."""
    shape = rollouts.mask.shape
    tokens = torch.zeros(shape, dtype=torch.int32) if rollouts.tokens is None else rollouts.tokens.to(torch.int32)
    unknown = torch.full(shape, torch.nan)
    row = spans.row
    prompts = Jagged.from_rows([[]] * len(rollouts) if rollouts.prompts is None else rollouts.prompts, torch.int32)
    begins = starts(spans, shape[1]).tolist()
    before = Jagged.from_rows([tokens[r, :b] for r, b in zip(row.tolist(), begins, strict=True)])
    responses = [""] * len(rollouts) if rollouts.responses is None else list(rollouts.responses)
    return Trajectories(
        uid=uid,
        prompt_uid=group[row],
        group=group[row],
        parent=torch.full_like(row, -1),
        prompt_tokens=prompts.select(row).join(before.to(torch.int32)),
        response_tokens=spans.gather(tokens),
        inherited=torch.zeros_like(row),
        engine_logprobs=spans.gather(unknown if rollouts.logprobs is None else rollouts.logprobs.float()),
        entropies=spans.gather(unknown if rollouts.entropies is None else rollouts.entropies.float()),
        thought_ends=Jagged.from_lengths(torch.zeros(0, dtype=torch.int32), torch.zeros_like(row)),
        policy_version=torch.zeros_like(row),
        finish_reason=[UNKNOWN_FINISH] * len(row),
        text=[responses[i] for i in row.tolist()],
        temperature=rollouts.temperature,
    )


def rewards_of(rollouts: Rollouts, row: Tensor, uid: Tensor, right_above: float = 0.0) -> Rewards:
    """The outcome of the row of each trajectory, right where it is above a number."""
    value, valid = outcomes(rollouts)
    detail = ["" if ok else "the trainer's reward is not a finite number" for ok in valid[row].tolist()]
    return Rewards(uid=uid, value=value[row], correct=value[row] > right_above, valid=valid[row], detail=detail)


def reference_answers(given: Iterable[Any]) -> list[str] | None:
    """Reference answers of rows as texts; None where one lacks."""
    texts = ["" if answer is None else str(answer) for answer in given]
    return texts if all(texts) else None


def verdicts(uid: Tensor, given: Sequence[float | None], right_above: float, lacking: str) -> Rewards:
    """Rewards of responses that a graph sampled, right above a number; `lacking` says why one is not finite."""
    value = torch.tensor([torch.nan if reward is None else float(reward) for reward in given], dtype=torch.float32)
    valid = value.isfinite()
    detail = ["" if ok else lacking for ok in valid.tolist()]
    value = value.where(valid, 0.0)
    return Rewards(uid=uid, value=value, correct=valid & (value > right_above), valid=valid, detail=detail)


def turn_rows(rollouts: Rollouts, spans: Spans, uid: Tensor) -> Turns:
    """The spans of `turns_of` as turns of episodes."""
    episode = rollouts.first[spans.row]
    counts = torch.bincount(episode, minlength=len(rollouts))
    first = (counts.cumsum(0) - counts)[episode]
    turn = torch.arange(len(episode)) - first
    last = turn == counts[episode] - 1
    return Turns(
        uid=uid,
        episode=uid[first],
        turn=turn,
        state=_states(rollouts, spans),
        reward=_turn_rewards(rollouts, spans, turn == 0, last),
        done=last,
        fault=[""] * len(episode),
    )


def _turn_rewards(rollouts: Rollouts, spans: Spans, first: Tensor, last: Tensor) -> Tensor:
    """float32 [M]: of a reward at a token, the turn is the last one that began at or before it."""
    if rollouts.turn_rewards is not None:
        _same_turns("turn_rewards", rollouts.turn_rewards, spans)
        flat = [float(reward) for rewards in rollouts.turn_rewards for reward in rewards]
        return torch.nan_to_num(torch.tensor(flat, dtype=torch.float32), 0.0, 0.0, 0.0)
    rows, width = rollouts.mask.shape
    rewards = rollouts.rewards.detach().cpu().double()
    if rewards.dim() == 1:
        rewards = torch.nn.functional.pad(rewards[:, None], (width - 1, 0))
    sums = torch.nn.functional.pad(torch.nan_to_num(rewards, 0.0, 0.0, 0.0).flatten().cumsum(0), (1, 0))
    # A turn's rewards end where the next turn of its episode begins; those before the first turn are its own.
    episode = rollouts.first[spans.row]
    begin = (episode * width).where(first, spans.at.values[spans.at.offsets[:-1]])
    beyond = (episode + torch.bincount(rollouts.first, minlength=rows)[episode]) * width
    end = beyond.where(last, torch.cat([begin[1:], begin[:1]]))
    return (sums[end] - sums[begin]).float()


def _states(rollouts: Rollouts, spans: Spans) -> list[str]:
    """What the policy read since its last turn; "start" where it has read its group's prompt alone, "" if not known."""
    if rollouts.states is not None:
        _same_turns("states", rollouts.states, spans)
        return [state for states in rollouts.states for state in states]
    first_prompt: dict[int, list[int]] = {}
    group = places_of_groups(rollouts.group).tolist()
    rows, begins = spans.row.tolist(), starts(spans, rollouts.mask.shape[1]).tolist()
    tokens = None if rollouts.tokens is None else rollouts.tokens.tolist()
    states: list[str] = []
    ends: dict[int, int] = {}  # after the last turn of each row
    for row, begin, length in zip(rows, begins, spans.at.lengths.tolist(), strict=True):
        is_first, follows = row not in ends, int(rollouts.first[row]) != row
        if is_first and not follows:
            read = [] if tokens is None else tokens[row][:begin]
            # Members of a group can begin differently: the players of a game, say.
            prompt = [] if rollouts.prompts is None else list(rollouts.prompts[row])
            own = [] if first_prompt.setdefault(group[row], prompt) == prompt else prompt
            states.append(" ".join(map(str, [*own, *read])) or "start")
        elif tokens is None or (is_first and rollouts.prompts is None):
            states.append("")
        else:
            new = _read_since(rollouts.prompts, tokens, row, ends.get(row - 1, 0)) if is_first else []
            states.append(" ".join(map(str, [*new, *tokens[row][ends.get(row, 0) : begin]])))
        ends[row] = begin + length
    return states


def _read_since(prompts: Any, tokens: list[list[int]], row: int, end: int) -> list[int]:
    """The prompt of a step, without the prompt and the sampled tokens of the step before if it begins with them."""
    prompt, before = list(prompts[row]), [*prompts[row - 1], *tokens[row - 1][:end]]
    return prompt[len(before) :] if prompt[: len(before)] == before else prompt


def _same_turns(name: str, given: Sequence[Sequence[Any]], spans: Spans) -> None:
    counts = torch.bincount(spans.row, minlength=len(given)).tolist()
    for row, (entries, count) in enumerate(zip(given, counts, strict=True)):
        if len(entries) != count:
            raise DataError(
                f"rollouts: {name} has {len(entries)} entries in row {row}, but its mask has {count} turns "
                "(runs of tokens that the policy sampled). Give one entry per turn."
            )


def prompts_of(rollouts: Rollouts, group: Tensor) -> Prompts:
    """One prompt per group, whose uid is the group's, with the text and answer of its first row."""
    uid, first = np.unique(group.numpy(), return_index=True)
    tokens = [[] if rollouts.prompts is None else list(rollouts.prompts[i]) for i in first]
    texts, answers = rollouts.texts, rollouts.answers
    return Prompts(
        uid=torch.from_numpy(uid),
        tokens=Jagged.from_rows(tokens, torch.int32),
        text=[""] * len(first) if texts is None else [texts[i] for i in first],
        answer=[""] * len(first) if answers is None else [answers[i] for i in first],
        metadata=[{} for _ in first],
    )


def differs_within(advantages: Tensor, trained: Tensor) -> bool:
    """Whether tokens of one row have several advantages; both [N, T], `trained` bool."""
    highest, lowest = advantages.where(trained, -torch.inf).amax(1), advantages.where(trained, torch.inf).amin(1)
    return bool((highest > lowest).any())


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """[N, T] of parts [n, t], padded on the right."""
    return Jagged.from_rows([row for part in parts for row in part]).to_padded()


def log_means(log: MutableSequence[float], advantages: Tensor, trained: Tensor) -> None:
    """Puts the mean advantage of each response's tokens in the place of the last rows of a trainer's table."""
    means = (advantages.sum(1) / trained.sum(1).clamp(min=1)).tolist()
    for _ in range(min(len(log), len(means))):
        log.pop()
    log.extend(means)
