"""True values where turns begin: exact if the environment has them in closed form, else by many episodes from there."""

from collections.abc import Collection
from itertools import accumulate, chain

import torch
from torch import Tensor

from creditgraph.components.rollouts.episodes import Table
from creditgraph.components.rollouts.second_turn import encoded
from creditgraph.components.rollouts.segments import increments
from creditgraph.components.rollouts.thoughts import has_oracle, true_first_errors
from creditgraph.components.rollouts.turn_rows import by_episode, episode_returns, recorded_turns, rows_before
from creditgraph.components.text.templates import first_turn
from creditgraph.pipeline.app.credit.truth import State, Truth
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Trajectories, Turns
from creditgraph.pipeline.core.streams import Stream, key_of

SOLVED = 1.0 - 1e-6  # returns from here on count as correct, as in rewards.episode


def first_rows(turns: Turns | None, count: int) -> Tensor:
    """int64: the first row of each episode, or all `count` rows where these are whole responses."""
    return torch.arange(count) if turns is None else (turns.uid == turns.episode).nonzero(as_tuple=True)[0]


def whole(tokens: Jagged, turns: Turns | None) -> Jagged:
    """A column over response tokens with a row per episode, whose turns are consecutive; as it is without turns."""
    if turns is None:
        return tokens
    return Jagged(tokens.values, torch.cat([tokens.offsets[first_rows(turns, 0)], tokens.offsets[-1:]]))


def turn_values(
    table: Table,
    trajectories: Trajectories,
    turns: Turns,
    chosen: Tensor,
    *,
    world: str,
    samples: int,
    stream: Stream,
    known: dict[State, Tensor],
) -> Truth:
    """V^π at the start of each turn, and A of the turn: its reward and V at the next one's start, less V.

    Without exact values `samples` episodes are played from each state, which is all that was said before it: a fresh
    environment answers that again. Those with a fault count for none.

    Args:
        table: plays episodes of the prompts with the policy in the environment.
        trajectories, turns: all episodes.
        chosen: int64 [E], places of those that are judged.
        world: names the environment.
        samples, stream, known: as for `true_values`; `known` may hold states of several environments.
    """
    before = rows_before(trajectories, turns)
    rows = by_episode(trajectories, turns).with_values(torch.arange(len(turns))).select(chosen)
    places = rows.values.tolist()
    responses, prompt = trajectories.response_tokens.to_lists(), trajectories.prompt_uid.tolist()
    exact = exact_values(table)
    keys: list[State] = []
    new: dict[State, int] = {}
    for row in places:
        said = [tuple(responses[i]) for i in before[row]]
        keys.append((world, turns.state[row]) if exact else (world, prompt[row], *said))
        if exact:
            known[keys[-1]] = torch.full((samples,), exact[turns.state[row]], dtype=torch.float64)
        elif keys[-1] not in known:
            new.setdefault(keys[-1], row)
    sampled = _continue(table, trajectories, turns, before, new, samples, stream, known)
    outcome = torch.stack([known[key] for key in keys]) if keys else torch.zeros(0, samples, dtype=torch.float64)
    half = samples // 2
    estimates = [outcome.nanmean(1), outcome[:, :half].nanmean(1), outcome[:, half:].nanmean(1)]
    reward = rows.with_values(turns.reward[rows.values].double())
    values, first, second = (_at_boundaries(reward, estimate.nan_to_num()) for estimate in estimates)
    lost = torch.tensor([bool(turns.fault[row]) for row in places], dtype=torch.bool) | outcome.isnan().all(1)
    correct = reward.sum() >= SOLVED
    return Truth(
        ends=rows.with_values(trajectories.response_tokens.lengths[rows.values]).cumsum(),
        values=values,
        halves=(first, second),
        advantage=increments(values),
        error=torch.where(correct, 0, _first_errors(table, trajectories, turns, before, rows)),
        correct=correct,
        valid=rows.with_values(lost.long()).sum() == 0,
        num_states=len(set(keys)),
        sampled_tokens=sampled,
    )


def exact_values(table: Table) -> dict[str, float] | None:
    """V^π of each state by its key; None where the environment does not know it, or a turn is more than one token of
    the whole distribution, drawn after the observation alone."""
    sampling = table.sampling
    if table.settings.history != "none" or (sampling.max_tokens, sampling.top_p, sampling.top_k) != (1, 1.0, 0):
        return None
    tokenizer = table.policy.tokenizer
    texts = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(tokenizer))]
    template = table.prompts.metadata[0].get("template", "plain")

    def chance(observation: str, words: Collection[str]) -> float:
        ids = [[i] for i, text in enumerate(texts) if set(text.split()) & set(words)]
        prompt = encoded(tokenizer, [first_turn(template, observation, tokenizer)])
        context = prompt.select(torch.zeros(len(ids), dtype=torch.int64))
        scores = table.policy.score(context, Jagged.from_rows(ids, torch.int32), sampling.temperature)
        return float(scores.logprobs.values.double().exp().sum())

    return table.environments.exact_values(chance)


def _continue(
    table: Table,
    trajectories: Trajectories,
    turns: Turns,
    before: list[list[int]],
    states: dict[State, int],
    samples: int,
    stream: Stream,
    known: dict[State, Tensor],
) -> int:
    """Plays `samples` episodes from each state, given by a row; adds their returns from there to `known`, NaN for
    faults; returns the tokens sampled."""
    if not states:
        return 0
    # As in `true_values`, the low 22 bits are left free for the number of the draw.
    keys = torch.tensor([key_of(repr(key)) >> 24 << 22 for key in states])
    seeds = (keys[:, None] + torch.arange(samples)).reshape(-1)
    recorded = [recorded_turns(trajectories, turns, [*before[row], row]) for row in states.values()]
    rows = table.prompts.index_of(trajectories.prompt_uid[list(states.values())]).repeat_interleave(samples)
    played = table.play(rows, stream.seeds(seeds), [turn for turn in recorded for _ in range(samples)])
    value, first = episode_returns(played.turns)
    first &= torch.tensor([not fault for fault in played.turns.fault], dtype=torch.bool)
    outcome = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    outcome[played.entry[first]] = value[first]
    known.update(zip(states, outcome.view(len(states), samples), strict=True))
    return len(played.trajectories.response_tokens.values)


def _at_boundaries(reward: Jagged, value: Tensor) -> Jagged:
    """Rewards so far and V before each turn of an episode, and its return; one entry more per row than `reward`."""
    received = reward.cumsum().values
    total = reward.sum()
    before = reward.with_values(received - reward.values + value).rows()
    return Jagged.from_rows([torch.cat([row, total[i : i + 1]]) for i, row in enumerate(before)], torch.float64)


def _first_errors(
    table: Table, trajectories: Trajectories, turns: Turns, before: list[list[int]], rows: Jagged
) -> Tensor:
    """int64 [E]: the first wrong own turn, from 1; 0 where it is before them, or where nobody can tell.

    A task can tell if its prompt and the turns, with nothing between them, are what the policy was shown.
    """
    prompts, shown, responses = table.prompts, trajectories.prompt_tokens.to_lists(), trajectories.response_tokens
    begin = prompts.tokens.to_lists()
    last = rows.values[rows.offsets[1:] - 1].tolist()
    paths = [[responses.row(i).tolist() for i in [*before[row], row]] for row in last]
    start = [begin[i] for i in prompts.index_of(trajectories.prompt_uid[last]).tolist()]
    plain = all([*s, *chain(*p[:-1])] == shown[row] for p, s, row in zip(paths, start, last, strict=True))
    if not (plain and has_oracle(prompts)):
        return torch.zeros(len(rows), dtype=torch.int64)
    ends = [list(accumulate(map(len, path))) for path in paths]
    joined = trajectories.select(torch.tensor(last, dtype=torch.int64)).replace(
        response_tokens=Jagged.from_rows([list(chain(*path)) for path in paths], torch.int32),
        thought_ends=Jagged.from_rows(ends, torch.int32),
    )
    shared = turns.turn[rows.values[rows.offsets[:-1]]]
    return (true_first_errors(prompts, joined, table.policy.tokenizer) - shared).clamp(min=0)
