"""Sampling trajectories: from prompts, and from prefixes of earlier trajectories."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from creditgraph.components.text.stops import decode_rows, ends_of_thoughts, token_texts
from creditgraph.components.text.templates import Mode
from creditgraph.pipeline.core.component import Context, Count
from creditgraph.pipeline.core.handles import Completions, Policy, Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.streams import Stream

MAX_GROUP = 65_536  # responses per prompt; all stay in memory until the learner has read them
LENGTH_METRICS = (
    Metric("sampled_tokens", "tokens", "tokens sampled by this node; inherited ones do not count"),
    Metric("response_length", "tokens", "mean length of a response, inherited tokens included"),
    Metric("cut_share", "share", "responses that ran out of tokens or thoughts"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of every component that samples."""

    mode: Mode = "plain"
    """plain: one response up to EOS or a stop string; thought: thought by thought, under the limits of `thoughts`;
    line, sentence: as plain, and each line or sentence of the response is a thought, so that the prompt need not ask
    for </thought>"""
    temperature: float = 1.0
    """sampling temperature, 0 is greedy; the learner computes its log-probs and entropies at the same temperature"""
    top_p: float = 1.0
    """keeps the smallest set of tokens with this probability; 1 switches it off"""
    top_k: int = 0
    """keeps the k most probable tokens; 0 switches it off"""
    max_tokens: int = 512
    """response budget in tokens, an inherited prefix included"""
    stop: tuple[str, ...] = ()
    """strings that end a response that is not sampled thought by thought; they stay in it"""
    thoughts: ThoughtLimits = field(default_factory=ThoughtLimits)
    """stop string, final string and limits of thought mode; `max_thoughts` counts inherited thoughts too"""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"expected temperature ≥ 0 (0 is greedy), got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"expected 0 < top_p ≤ 1 (1 switches it off), got {self.top_p}.")
        if self.max_tokens < 1:
            raise ValueError(f"expected max_tokens ≥ 1, got {self.max_tokens}.")
        if self.top_k < 0:
            raise ValueError(f"expected top_k ≥ 0 (0 switches it off), got {self.top_k}.")
        if min(self.thoughts.max_tokens, self.thoughts.max_thoughts) < 1:
            limits = self.thoughts
            raise ValueError(
                f"thoughts: expected max_tokens ≥ 1 and max_thoughts ≥ 1, got {limits.max_tokens} and "
                f"{limits.max_thoughts}."
            )

    def sampling(self) -> Sampling:
        """These settings as sampling parameters of an engine."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=() if self.mode == "thought" else tuple(self.stop),
            thoughts=self.thoughts if self.mode == "thought" else None,
            split=self.mode if self.mode in ("line", "sentence") else "",
        )


SAMPLING_NAMES = tuple(setting.name for setting in fields(SamplingSettings))


@dataclass(frozen=True, kw_only=True)
class GroupSettings(SamplingSettings):
    """Settings of samplers of plain groups."""

    group_size: int = 8
    """responses per prompt"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.group_size <= MAX_GROUP:
            raise ValueError(f"expected group_size of 1 to {MAX_GROUP:,}, got {self.group_size}.")


def keyed_seeds(stream: Stream, uid: Tensor, first: int, count: int) -> Tensor:
    """int64 [N, count] request seeds for draws first … first + count − 1 of each uid [N].

    Keyed by (uid, draw), so the samples of a prompt do not depend on the rest of the batch, nor on the split of draws
    into waves.
    """
    # torch.stack does not accept an empty list.
    if not count:
        return torch.zeros(len(uid), 0, dtype=torch.int64)
    return torch.stack([stream.seeds(uid, draw) for draw in range(first, first + count)], dim=1)


def unsampled(prompts: Prompts, rows: Tensor, uid: Tensor, version: int, temperature: float) -> Trajectories:
    """Trajectories without a token yet, one per entry of `rows` [N]; the group of each is its prompt.

    Args:
        prompts: the problems.
        rows: int64 [N], the prompt row of each trajectory.
        uid: int64 [N], ids of the trajectories.
        version: version of the weights that will sample their first tokens.
        temperature: sampling temperature; greedy sampling has log-probs at temperature 1.
    """
    prompt_uid = prompts.uid[rows]
    no_floats = Jagged.from_lengths(torch.zeros(0), torch.zeros_like(uid))
    no_ints = no_floats.to(torch.int32)
    return Trajectories(
        uid=uid,
        prompt_uid=prompt_uid,
        group=prompt_uid.clone(),
        parent=torch.full_like(uid, -1),
        prompt_tokens=prompts.tokens.select(rows),
        response_tokens=no_ints,
        inherited=torch.zeros_like(uid),
        engine_logprobs=no_floats,
        entropies=no_floats,
        thought_ends=no_ints,
        policy_version=torch.full_like(uid, version),
        finish_reason=[""] * len(uid),
        text=[""] * len(uid),
        temperature=temperature or 1.0,
    )


def sample_fresh(
    policy: Policy,
    prompts: Prompts,
    rows: Tensor,
    seed: Tensor,
    sampling: Sampling,
    uid: Tensor,
    max_tokens: Tensor | None = None,
) -> Trajectories:
    """Samples one response per entry of `rows` [N] (rows of `prompts`); the group of each is its prompt.

    Args:
        policy: policy that samples.
        prompts: the problems.
        rows: int64 [N], the prompt row of each sample.
        seed: int64 [N], request seeds.
        sampling: how tokens are drawn.
        uid: int64 [N], ids of the new trajectories.
        max_tokens: int64 [N], the budget of each row if it is not that of `sampling`.
    """
    empty = unsampled(prompts, rows, uid, policy.version, sampling.temperature)
    done = generate_where_room(
        policy,
        Requests(
            tokens=empty.prompt_tokens,
            seed=seed,
            sampling=sampling,
            max_tokens=max_tokens,
            prompt_uid=empty.prompt_uid,
        ),
    )
    return completed(empty, done)


def completed(empty: Trajectories, done: Completions) -> Trajectories:
    """Trajectories without a token (`unsampled`) with what was sampled for them, row for row."""
    return empty.replace(
        response_tokens=done.tokens,
        engine_logprobs=done.logprobs,
        entropies=done.entropies,
        thought_ends=done.thought_ends,
        finish_reason=done.finish_reason,
        text=done.text,
        token_versions=done.token_versions,
        routed_experts=done.routed_experts,
    )


def sample_groups(
    context: Context,
    policy: Policy,
    prompts: Prompts,
    size: int,
    sampling: Sampling,
    first: int = 0,
    stream: Stream | None = None,
) -> Trajectories:
    """Samples `size` responses to each prompt, prompt by prompt, in one request batch.

    Args:
        context: context of the sampling node; provides ids and, without `stream`, the random stream.
        policy: policy that samples.
        prompts: the problems, P in number.
        size: responses per prompt; the result has P · size rows.
        sampling: how tokens are drawn.
        first: number of the first draw of each prompt, so that later calls use other random numbers.
        stream: random stream, keyed by (prompt uid, draw).
    """
    rows = torch.arange(len(prompts)).repeat_interleave(size)
    seed = keyed_seeds(stream or context.rng(), prompts.uid, first, size).reshape(-1)
    return sample_fresh(policy, prompts, rows, seed, sampling, context.uids(len(rows)))


def sample_from_prefix(
    policy: Policy, parents: Trajectories, prefix_length: Tensor, seed: Tensor, sampling: Sampling, uid: Tensor
) -> Trajectories:
    """Continues each parent (one row per new trajectory) from its first `prefix_length` [N] response tokens.

    The prefix is the parent's exact token ids, with its log-probs, entropies and thought ends. The budget is what the
    limits of `sampling` leave after the prefix; a row with nothing left keeps the bare prefix ("length" or "thoughts").
    The group of each is its parent's uid.
    """
    start = torch.zeros_like(prefix_length)
    ends = parents.thought_ends
    # Ends increase within a row, so those inside the prefix are the first ones.
    num_thoughts = ends.with_values((ends.values <= prefix_length[ends.row_ids]).to(torch.int64)).sum()
    prefix = parents.response_tokens.slice_rows(start, prefix_length)
    done = generate_where_room(
        policy,
        Requests(
            tokens=parents.prompt_tokens.join(prefix),
            seed=seed,
            sampling=sampling,
            max_tokens=sampling.max_tokens - prefix_length,
            max_thoughts=None if sampling.thoughts is None else sampling.thoughts.max_thoughts - num_thoughts,
            prompt_uid=parents.prompt_uid,
        ),
    )
    versions = done.token_versions
    if versions is not None:
        versions = parents.versions_by_token().slice_rows(start, prefix_length).join(versions)
    tokens = prefix.join(done.tokens)
    new_ends = done.thought_ends.with_values(done.thought_ends.values + prefix_length[done.thought_ends.row_ids])
    return parents.replace(
        uid=uid,
        group=parents.uid.clone(),
        parent=parents.uid.clone(),
        response_tokens=tokens,
        inherited=prefix_length.clone(),
        engine_logprobs=parents.engine_logprobs.slice_rows(start, prefix_length).join(done.logprobs),
        entropies=parents.entropies.slice_rows(start, prefix_length).join(done.entropies),
        thought_ends=ends.slice_rows(start, num_thoughts).join(new_ends),
        policy_version=torch.full_like(uid, policy.version),
        finish_reason=done.finish_reason,
        # Decoded as a whole: two decoded halves need not join to the decoding of their tokens.
        text=decode_rows(policy.tokenizer, tokens.to_lists()),
        temperature=sampling.temperature or 1.0,
        token_versions=versions,
        routed_experts=done.routed_experts,
    )


def unended(trajectories: Trajectories) -> Tensor:
    """bool [N]: rows that ran out of tokens or thoughts before they ended."""
    return torch.tensor([reason in ("length", "thoughts") for reason in trajectories.finish_reason], dtype=torch.bool)


def length_metrics(trajectories: Trajectories) -> dict[str, float]:
    """Values of `LENGTH_METRICS` for a batch."""
    lengths = trajectories.response_tokens.lengths
    count = max(len(trajectories), 1)
    return {
        "sampled_tokens": Count((lengths - trajectories.inherited).sum()),
        "response_length": float(lengths.sum()) / count,
        "cut_share": float(unended(trajectories).sum()) / count,
    }


def scatter_rows(part: Jagged, rows: Tensor, count: int) -> Jagged:
    """Puts the rows of `part` at the (increasing) places `rows` of `count` rows; the others are empty."""
    lengths = torch.zeros(count, dtype=torch.int64)
    lengths[rows] = part.lengths
    return Jagged.from_lengths(part.values, lengths)


def generate_where_room(policy: Policy, requests: Requests) -> Completions:
    """`policy.generate` for the rows that have budget, with thoughts where `Sampling.split` says; others are empty."""
    done = _generate_where_room(policy, requests)
    split = requests.sampling.split
    if not split or not len(done.tokens.values):
        return done
    ends = [ends_of_thoughts(pieces, split) for pieces in token_texts(policy.tokenizer, done.tokens)]
    return replace(done, thought_ends=Jagged.from_rows(ends, torch.int32))


def _generate_where_room(policy: Policy, requests: Requests) -> Completions:
    count = len(requests.seed)
    has_tokens = torch.ones(count, dtype=torch.bool) if requests.max_tokens is None else requests.max_tokens > 0
    has_budget = has_tokens if requests.max_thoughts is None else has_tokens & (requests.max_thoughts > 0)
    rows = has_budget.nonzero(as_tuple=True)[0]
    if 0 < count == len(rows):
        return policy.generate(requests)
    if len(rows):
        part = policy.generate(
            Requests(
                tokens=requests.tokens.select(rows),
                seed=requests.seed[rows],
                sampling=requests.sampling,
                max_tokens=None if requests.max_tokens is None else requests.max_tokens[rows],
                max_thoughts=None if requests.max_thoughts is None else requests.max_thoughts[rows],
                prompt_uid=None if requests.prompt_uid is None else requests.prompt_uid[rows],
            )
        )
    else:
        # Engines do not accept an empty request batch.
        no_floats = Jagged.from_rows([], torch.float32)
        no_ints = Jagged.from_rows([], torch.int32)
        part = Completions(
            tokens=no_ints, logprobs=no_floats, entropies=no_floats, thought_ends=no_ints, finish_reason=[], text=[]
        )
    reasons = ["thoughts" if left else "length" for left in has_tokens.tolist()]
    texts = [""] * count
    for row, reason, text in zip(rows.tolist(), part.finish_reason, part.text, strict=True):
        reasons[row] = reason
        texts[row] = text
    return Completions(
        tokens=scatter_rows(part.tokens, rows, count),
        logprobs=scatter_rows(part.logprobs, rows, count),
        entropies=scatter_rows(part.entropies, rows, count),
        thought_ends=scatter_rows(part.thought_ends, rows, count),
        finish_reason=reasons,
        text=texts,
        token_versions=None if part.token_versions is None else scatter_rows(part.token_versions, rows, count),
        routed_experts=None if part.routed_experts is None else scatter_rows(part.routed_experts, rows, count),
    )
