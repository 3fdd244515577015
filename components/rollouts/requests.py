"""From prompts and prefixes to trajectories: the part that every sampling component shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from components.text.stops import decode_rows
from pipeline.core.component import Count
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Completions, Policy, Prompts, Requests, Sampling, ThoughtLimits, Trajectories
from pipeline.core.streams import Stream

LENGTH_METRICS = (
    Metric("sampled_tokens", "tokens", "tokens sampled by this node; inherited ones do not count"),
    Metric("response_length", "tokens", "mean length of a response, inherited tokens included"),
    Metric("cut_share", "share", "responses that ran out of tokens or thoughts"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of every component that samples."""

    mode: Literal["plain", "thought"] = "plain"
    """plain: one response up to EOS or a stop string; thought: thought by thought, under the limits of `thoughts`"""
    temperature: float = 1.0
    """of the draw; log-probs and entropies are those at this temperature, and the learner recomputes them there"""
    top_p: float = 1.0
    """keeps the smallest set of tokens with this probability; 1 switches it off"""
    top_k: int = 0
    """keeps the k most probable tokens; 0 switches it off"""
    max_tokens: int = 512
    """response budget in tokens, an inherited prefix included"""
    stop: tuple[str, ...] = ()
    """strings that end a plain response; they stay in it"""
    thoughts: ThoughtLimits = field(default_factory=ThoughtLimits)
    """stop string, final string and limits of thought mode; `max_thoughts` counts inherited thoughts too"""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; wanted 0 (greedy) or more.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; wanted a number above 0 and at most 1 (1 switches it off).")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; wanted at least 1.")

    def sampling(self) -> Sampling:
        """What the engine is asked for."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop) if self.mode == "plain" else (),
            thoughts=self.thoughts if self.mode == "thought" else None,
        )


def keyed_seeds(stream: Stream, uid: Tensor, first: int, count: int) -> Tensor:
    """int64 [N, count] request seeds for draws first … first + count − 1 of each uid [N].

    Keyed by (uid, draw), so a prompt gets the same samples whatever else is in the batch and however draws are cut into
    waves.
    """
    if not count:
        return torch.zeros(len(uid), 0, dtype=torch.int64)
    return torch.stack([stream.seeds(uid, draw) for draw in range(first, first + count)], dim=1)


def sample_fresh(
    policy: Policy, prompts: Prompts, rows: Tensor, seed: Tensor, sampling: Sampling, uid: Tensor
) -> Trajectories:
    """Samples one response per entry of `rows` [N] (rows of `prompts`); the group of each is its prompt.

    Args:
        policy: what samples.
        prompts: the problems.
        rows: int64 [N], the prompt row of each sample.
        seed: int64 [N], request seeds.
        sampling: how tokens are drawn.
        uid: int64 [N], ids of the new trajectories.
    """
    tokens = prompts.tokens.select(rows)
    done = _generate(policy, Requests(tokens=tokens, seed=seed, sampling=sampling))
    prompt_uid = prompts.uid[rows]
    return Trajectories(
        uid=uid,
        prompt_uid=prompt_uid,
        group=prompt_uid.clone(),
        parent=torch.full_like(uid, -1),
        prompt_tokens=tokens,
        response_tokens=done.tokens,
        inherited=torch.zeros_like(uid),
        engine_logprobs=done.logprobs,
        entropies=done.entropies,
        thought_ends=done.thought_ends,
        policy_version=torch.full_like(uid, policy.version),
        finish_reason=done.finish_reason,
        text=done.text,
        temperature=sampling.temperature or 1.0,
    )


def sample_from_prefix(
    policy: Policy, parents: Trajectories, prefix_length: Tensor, seed: Tensor, sampling: Sampling, uid: Tensor
) -> Trajectories:
    """Continues each parent (one row per new trajectory) from its first `prefix_length` [N] response tokens.

    The prefix is the parent's exact token ids, with its log-probs, entropies and thought ends. The budget is what the
    limits of `sampling` leave after the prefix; a row with nothing left keeps the bare prefix ("length" or "thoughts").
    The group of each is its parent's uid.
    """
    start = torch.zeros_like(prefix_length)
    prefix = parents.response_tokens.slice_rows(start, prefix_length)
    num_thoughts = _ends_within(parents.thought_ends, prefix_length)
    tokens_left = sampling.max_tokens - prefix_length
    thoughts_left = None if sampling.thoughts is None else sampling.thoughts.max_thoughts - num_thoughts
    done = _generate(
        policy,
        Requests(
            tokens=parents.prompt_tokens.join(prefix),
            seed=seed,
            sampling=sampling,
            max_tokens=tokens_left,
            max_thoughts=thoughts_left,
        ),
    )
    tokens = prefix.join(done.tokens)
    ends = parents.thought_ends.slice_rows(start, num_thoughts).join(
        done.thought_ends.with_values(done.thought_ends.values + prefix_length[done.thought_ends.row_ids])
    )
    return Trajectories(
        uid=uid,
        prompt_uid=parents.prompt_uid,
        group=parents.uid.clone(),
        parent=parents.uid.clone(),
        prompt_tokens=parents.prompt_tokens,
        response_tokens=tokens,
        inherited=prefix_length.clone(),
        engine_logprobs=parents.engine_logprobs.slice_rows(start, prefix_length).join(done.logprobs),
        entropies=parents.entropies.slice_rows(start, prefix_length).join(done.entropies),
        thought_ends=ends,
        policy_version=torch.full_like(uid, policy.version),
        finish_reason=done.finish_reason,
        # Decoded as a whole: two decoded halves need not join to the decoding of their tokens.
        text=decode_rows(policy.tokenizer, tokens.to_lists()),
        temperature=sampling.temperature or 1.0,
    )


def length_metrics(trajectories: Trajectories) -> dict[str, float]:
    """Sampled tokens (inherited ones excluded), mean response length, and the share that ran out of budget."""
    lengths, count = trajectories.response_tokens.lengths, max(len(trajectories), 1)
    cut = sum(reason in ("length", "thoughts") for reason in trajectories.finish_reason)
    return {
        "sampled_tokens": Count((lengths - trajectories.inherited).sum()),
        "response_length": float(lengths.sum()) / count,
        "cut_share": cut / count,
    }


def _generate(policy: Policy, requests: Requests) -> Completions:
    """`policy.generate` for the rows that have budget; the others get an empty completion."""
    count = len(requests.seed)
    open_rows = torch.ones(count, dtype=torch.bool)
    if requests.max_tokens is not None:
        open_rows &= requests.max_tokens > 0
    if requests.max_thoughts is not None:
        open_rows &= requests.max_thoughts > 0
    if bool(open_rows.all()) and count:
        return policy.generate(requests)
    kept = open_rows.nonzero(as_tuple=True)[0]
    reasons = [
        "thoughts" if requests.max_tokens is None or int(requests.max_tokens[i]) > 0 else "length" for i in range(count)
    ]
    texts = [""] * count
    empty = Jagged.from_lengths(torch.zeros(0), torch.zeros(count, dtype=torch.int64))
    if not len(kept):
        return Completions(
            tokens=empty.to(torch.int32),
            logprobs=empty,
            entropies=empty,
            thought_ends=empty.to(torch.int32),
            finish_reason=reasons,
            text=texts,
        )
    part = policy.generate(
        Requests(
            tokens=requests.tokens.select(kept),
            seed=requests.seed[kept],
            sampling=requests.sampling,
            max_tokens=None if requests.max_tokens is None else requests.max_tokens[kept],
            max_thoughts=None if requests.max_thoughts is None else requests.max_thoughts[kept],
        )
    )
    for place, row in enumerate(kept.tolist()):
        reasons[row], texts[row] = part.finish_reason[place], part.text[place]
    return Completions(
        tokens=scatter_rows(part.tokens, kept, count),
        logprobs=scatter_rows(part.logprobs, kept, count),
        entropies=scatter_rows(part.entropies, kept, count),
        thought_ends=scatter_rows(part.thought_ends, kept, count),
        finish_reason=reasons,
        text=texts,
    )


def scatter_rows(part: Jagged, rows: Tensor, count: int) -> Jagged:
    """Puts the rows of `part` at the (increasing) places `rows` of `count` rows; the others are empty."""
    lengths = torch.zeros(count, dtype=torch.int64)
    lengths[rows] = part.lengths
    return Jagged.from_lengths(part.values, lengths)


def _ends_within(ends: Jagged, limit: Tensor) -> Tensor:
    """int64 [N]: number of entries of each row that are at most `limit` [N]."""
    return ends.with_values((ends.values <= limit[ends.row_ids]).to(torch.int64)).sum()
