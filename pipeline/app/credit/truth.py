"""True values at thought boundaries by many continuations, and the true advantage of each thought."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import sample_from_prefix
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.rollouts.segments import close_segments, increments, segment_of_token, with_final
from creditgraph.components.rollouts.thoughts import has_oracle, true_first_errors
from creditgraph.components.text.stops import ends_of_stop, token_texts
from creditgraph.pipeline.core.handles import Policy, Sampling, Verifier
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories
from creditgraph.pipeline.core.streams import Stream, key_of
from creditgraph.pipeline.run.recording import read_payload, recorded_iterations

STOP = "</thought>"
SAMPLED_SEGMENTS, SAMPLED_VALUES = "values.segments", "values.values"  # records of `creditgraph values`

State = tuple[Any, ...]  # what a policy continues: tokens of prompt and of the response so far


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth:
    """True values of some trajectories, or episodes, under the policy that sampled them.

    An episode is a row whose thoughts are its turns; its values include the rewards that its own turns received before.

    Attributes:
        ends: Jagged int32, exclusive end of each thought; the last one is the response length.
        values: Jagged float64, V^π at the start and after each thought; the outcome at the end.
        halves: two such estimates from disjoint continuations.
        advantage: Jagged float64 per thought, V after it minus V before it.
        error: int64 [N], 1-based first wrong thought of an incorrect trajectory, 0 where there is none or the task
            cannot tell.
        correct, valid: bool [N].
        num_states: distinct prefixes.
        sampled_tokens: tokens of the sampled continuations; 0 where they were sampled before.
        precision: a note on how precise the values are; "" where `halves` say it.
    """

    ends: Jagged
    values: Jagged
    halves: tuple[Jagged, Jagged]
    advantage: Jagged
    error: Tensor
    correct: Tensor
    valid: Tensor
    num_states: int
    sampled_tokens: int
    precision: str = ""

    def per_token(self, tokens: Jagged) -> Jagged:
        """The true advantage of the thought of every response token: credit without estimation error."""
        return tokens.with_values(self.advantage.values[segment_of_token(self.ends, tokens)])


def thought_ends(trajectories: Trajectories, policy: Policy | None) -> Jagged:
    """Exclusive thought ends, int32, that cover each response; plain responses are cut after each stop string.

    Without a policy, whose tokenizer reads them, plain responses are one thought.
    """
    ends = trajectories.thought_ends
    plain = ends.lengths == 0
    if bool(plain.any()) and policy is not None:
        rows = ends.to_lists()
        texts = token_texts(policy.tokenizer, trajectories.response_tokens.select(plain))
        for row, pieces in zip(plain.nonzero(as_tuple=True)[0].tolist(), texts, strict=True):
            rows[row] = ends_of_stop(pieces, STOP)
        ends = Jagged.from_rows(rows, torch.int32)
    return close_segments(ends, trajectories.response_tokens.lengths)


def sampled_values(run: Path, iteration: int) -> tuple[Segments, SegmentValues] | None:
    """What `creditgraph values` recorded for rows of an iteration; None without."""
    folder = run / "record"
    if iteration not in recorded_iterations(run, SAMPLED_VALUES):
        return None
    segments, values = (
        read_payload(folder / name / f"{iteration:06d}.parquet") for name in (SAMPLED_SEGMENTS, SAMPLED_VALUES)
    )
    return segments, values


def truth_of_values(segments: Segments, values: SegmentValues, verdicts: Rewards) -> Truth:
    """The truth for rows whose segments' values were sampled before; thoughts are these segments."""
    at = values.values.with_values(values.values.values.double())
    precision = ""
    if values.errors is not None:
        inner = values.errors.values[values.errors.values > 0]
        precision = f"; standard error of a value {float(inner.mean()) if len(inner) else 0.0:.2f} on average"
    return Truth(
        ends=segments.ends,
        values=at,
        halves=(at, at),
        advantage=increments(at),
        error=torch.zeros(len(segments), dtype=torch.int64),
        correct=verdicts.correct,
        valid=verdicts.valid,
        num_states=len(at.values) - len(segments),
        sampled_tokens=0,
        precision=precision,
    )


def true_values(
    policy: Policy,
    verifier: Verifier,
    prompts: Prompts,
    trajectories: Trajectories,
    sampling: Sampling,
    samples: int,
    stream: Stream,
    known: dict[State, Tensor] | None = None,
) -> Truth:
    """Estimates V^π before every thought from `samples` continuations each; equal prefixes are continued once.

    Args:
        policy: π.
        verifier: verifies the continuations.
        prompts: the problems of the trajectories.
        trajectories: any rows, inherited prefixes included.
        sampling: how π samples.
        samples: continuations per distinct prefix; even, because the estimate is also returned in two halves.
        stream: keys the continuations, together with the tokens of the state.
        known: outcomes [samples] of states continued before with the same policy and stream; new ones are added.
    """
    if samples < 2 or samples % 2:
        raise ValueError(f"true_values: expected an even number of samples of at least 2, got {samples}.")
    ends = thought_ends(trajectories, policy)
    rewards = finite_rewards(verifier.verify(prompts, trajectories))
    known = {} if known is None else known
    states, state_of = _states(trajectories, ends)
    new = [(key, place) for key, place in states.items() if key not in known]
    sampled = _continue(policy, verifier, prompts, trajectories, new, sampling, samples, stream, known)
    outcome = torch.stack([known[key] for key in states]) if states else torch.zeros(0, samples, dtype=torch.float64)
    half = samples // 2
    # Two estimates from disjoint continuations: their correlation tells how noisy the whole one is.
    estimates = [outcome.mean(1), outcome[:, :half].mean(1), outcome[:, half:].mean(1)]
    values, first, second = (_at_boundaries(e[state_of], ends, rewards.value) for e in estimates)
    error = torch.zeros(len(trajectories), dtype=torch.int64)
    if has_oracle(prompts):
        error = torch.where(rewards.correct, 0, true_first_errors(prompts, trajectories, policy.tokenizer))
    return Truth(
        ends=ends,
        values=values,
        halves=(first, second),
        advantage=increments(values),
        error=error,
        correct=rewards.correct,
        valid=rewards.valid,
        num_states=len(states),
        sampled_tokens=sampled,
    )


def _states(trajectories: Trajectories, ends: Jagged) -> tuple[dict[State, tuple[int, int]], Tensor]:
    """Distinct states before thoughts, each with a (row, prefix length), and the state before each thought, int64."""
    states: dict[State, tuple[int, int]] = {}
    number: dict[State, int] = {}
    state_of: list[int] = []
    prompt = trajectories.prompt_tokens.to_lists()
    response = trajectories.response_tokens.to_lists()
    for row, cuts in enumerate(ends.to_lists()):
        for start in [0, *cuts[:-1]] if cuts else []:
            key = (tuple(prompt[row]), tuple(response[row][:start]))
            states.setdefault(key, (row, start))
            state_of.append(number.setdefault(key, len(number)))
    return states, torch.tensor(state_of, dtype=torch.int64)


def _continue(
    policy: Policy,
    verifier: Verifier,
    prompts: Prompts,
    trajectories: Trajectories,
    states: list[tuple[State, tuple[int, int]]],
    sampling: Sampling,
    samples: int,
    stream: Stream,
    known: dict[State, Tensor],
) -> int:
    """Continues each state `samples` times in one batch, adds the outcomes to `known`; returns the tokens sampled."""
    if not states:
        return 0
    row = torch.tensor([place[0] for _, place in states]).repeat_interleave(samples)
    length = torch.tensor([place[1] for _, place in states]).repeat_interleave(samples)
    # Keys are hashes of the whole state; their low 22 bits are left free for the number of the draw.
    keys = [key_of(*prompt, "response", *response) >> 24 << 22 for (prompt, response), _ in states]
    seeds = stream.seeds(torch.tensor(keys).repeat_interleave(samples) + torch.arange(samples).repeat(len(states)))
    uid = torch.arange(len(row), dtype=torch.int64)
    continued = sample_from_prefix(policy, trajectories.select(row), length, seeds, sampling, uid)
    outcome = finite_rewards(verifier.verify(prompts, continued)).value.double().view(len(states), samples)
    known.update({key: outcome[i] for i, (key, _) in enumerate(states)})
    return int((continued.response_tokens.lengths - continued.inherited).sum())


def _at_boundaries(before: Tensor, ends: Jagged, outcome: Tensor) -> Jagged:
    """Jagged float64 with one entry more per row than `ends`: the value before each thought, then the outcome [N]."""
    counts = ends.lengths
    empty = Jagged.from_lengths(torch.zeros(len(ends.values) + len(ends), dtype=torch.float64), counts + 1)
    values = empty.values
    values[empty.positions < counts[empty.row_ids]] = before
    return with_final(empty.with_values(values), outcome.double())
