"""The generation loop: waves of rows, one token per row and step, rows leave when they end.

All rows of a wave have made the same number of steps, so the step, plus what a row had sampled before, is the counter
of the row's random stream. A row's tokens depend on its own prompt, seed and limits only, never on the rows beside it
or on how the batch was cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from components.engine.base import Limits
from components.engine.local.decoder import Decoder
from components.engine.local.sampling import draw
from components.text.stops import Matcher, TokenText
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Requests, Sampling
from pipeline.core.streams import counter_uniform

RUNNING, EOS, STOP, FINAL, THOUGHTS, LENGTH, PAUSED = range(7)
REASONS = ("", "eos", "stop", "final", "thoughts", "length", "paused")
# Rows leave the batch once this share of it has ended.
LEAVE_SHARE = 0.04
# On an accelerator each look at what has ended waits for the device, so it is taken every few steps.
LOOK_EVERY = {"cpu": 1, "cuda": 8}
_UNIFORM_BLOCK = 32


@dataclass
class Generated:
    """Rows in the order of the requests. `reason` indexes REASONS; `ends` marks tokens that end a thought."""

    tokens: Jagged
    logprobs: Jagged
    entropies: Jagged
    thought_ends: Jagged
    reason: Tensor
    prefill_tokens: int


@dataclass
class _Begun:
    """Where rows stand that may have sampled before.

    Attributes:
        contexts: Jagged int32 [N], prompt and what was sampled.
        taken: int64 [N], tokens sampled.
        thoughts: int64 [N], thoughts closed.
        opened: Jagged int32 [N], tokens of the open thought.
        room: int64 [N], tokens the row may still get.
        pause: int64 [N], new tokens after which it is left as it is, or None.
        ends: Jagged int32 [N], thought ends so far, or None.
    """

    contexts: Jagged
    taken: Tensor
    thoughts: Tensor
    opened: Jagged
    room: Tensor
    pause: Tensor | None
    ends: Jagged | None

    @classmethod
    def of(cls, requests: Requests, limits: Limits) -> _Begun:
        """The beginning of a call."""
        none, before = torch.zeros(len(requests.tokens), dtype=torch.int64), requests.progress
        if before is None:
            empty = Jagged.from_lengths(requests.tokens.values[:0], none)
            return cls(requests.tokens, none, none, empty, limits.tokens, requests.pause, None)
        taken, ends = before.tokens.lengths, before.thought_ends
        last = torch.tensor([row[-1] if row else 0 for row in ends.to_lists()], dtype=torch.int64)
        parts = [row for pair in zip(requests.tokens.rows(), before.tokens.rows(), strict=True) for row in pair]
        contexts = Jagged.from_lengths(torch.cat(parts), requests.tokens.lengths + taken) if parts else requests.tokens
        opened = before.tokens.slice_rows(last, taken)
        return cls(contexts, taken, ends.lengths, opened, (limits.tokens - taken).clamp(min=0), requests.pause, ends)

    @property
    def most(self) -> Tensor:
        """int64 [N]: new tokens of this call."""
        return self.room if self.pause is None else torch.minimum(self.room, self.pause)

    def all_ends(self, ends: Jagged, reason: Tensor) -> Jagged:
        """Thought ends of whole rows, given those among the new tokens and why the rows ended."""
        if self.ends is None:
            return ends
        rows = []
        for old, new, taken, why in zip(
            self.ends.to_lists(), ends.to_lists(), self.taken.tolist(), reason.tolist(), strict=True
        ):
            # An end-of-text token alone belongs to the thought before it, which may be an earlier call's.
            alone = why == EOS and new == [1] and old and old[-1] == taken
            rows.append([*(old[:-1] if alone else old), *(taken + end for end in new)])
        return Jagged.from_rows(rows, torch.int32)


@dataclass
class _Wave:
    rows: Tensor  # int64 [R], rows of the request
    prompts: Jagged
    group: Tensor  # int64 [R], prompt of each row


def waves(tokens: Jagged, budgets: Tensor, max_rows: int, max_tokens: int) -> Iterator[_Wave]:
    """Cuts rows with a budget into waves of at most `max_rows` rows and (unless it is one row) `max_tokens` cache tokens.

    Rows are ordered by length, equal rows together; a prompt occurs once per wave.
    """
    lists = tokens.values.cpu().numpy()
    bounds = tokens.offsets.tolist()
    keys = [lists[a:b].tobytes() for a, b in itertools.pairwise(bounds)]
    wanted = [i for i, budget in enumerate(budgets.tolist()) if budget > 0]
    first: dict[bytes, int] = {}
    for i in wanted:
        first.setdefault(keys[i], i)
    wanted.sort(key=lambda i: (bounds[i + 1] - bounds[i], first[keys[i]], i))
    budget_list, start = budgets.tolist(), 0
    while start < len(wanted):
        end, longest, budget = start, 0, 0
        while end < len(wanted) and end - start < max_rows:
            row = wanted[end]
            longest, budget = max(longest, len(keys[row]) // lists.itemsize), max(budget, budget_list[row])
            if end > start and (end + 1 - start) * (longest + budget) > max_tokens:
                break
            end += 1
        rows = wanted[start:end]
        distinct = {key: n for n, key in enumerate(dict.fromkeys(keys[i] for i in rows))}
        picked = {distinct[keys[i]]: i for i in reversed(rows)}
        prompts = tokens.select(torch.tensor([picked[n] for n in range(len(distinct))]))
        yield _Wave(torch.tensor(rows), prompts, torch.tensor([distinct[keys[i]] for i in rows]))
        start = end


class _Ends:
    """Decides for each row of a wave whether its token ended a thought or the response."""

    def __init__(
        self, sampling: Sampling, limits: Limits, begun: _Begun, rows: Tensor, text: TokenText, device: str
    ) -> None:
        count, self._sampling = len(rows), sampling
        self._budget = begun.room[rows].to(device)
        self._pause = None if begun.pause is None else begun.pause[rows].to(device)
        self._eos = limits.eos.to(device)
        thoughts = sampling.thoughts
        stops = sampling.stop if thoughts is None else (thoughts.stop,)
        self._stop = text.matcher(stops, count, device) if stops else None
        self._final = (
            text.matcher((thoughts.final,), count, device) if thoughts is not None and thoughts.final else None
        )
        opened = begun.opened.select(rows)
        self._start = -opened.lengths.to(device)
        self._left = (limits.thoughts - begun.thoughts)[rows].to(device)
        for matcher in (self._stop, self._final):
            if matcher is not None:
                _replay(matcher, opened, device)
        self._early = self._budget.new_zeros(count, dtype=torch.bool)

    def step(self, taken: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """After the `taken`-th token of each row: reason int64 [B] (0 goes on), and whether a thought ended there, bool [B]."""
        hit = self._early if self._stop is None else self._stop.advance(tokens)
        thoughts = self._sampling.thoughts
        reason = (self._budget <= taken) * LENGTH
        if self._pause is not None:
            reason = reason.masked_fill((reason == 0) & (self._pause <= taken), PAUSED)
        if thoughts is None:
            reason = reason.masked_fill(hit, STOP)
            closed = self._early
        else:
            closed = hit | (self._start + thoughts.max_tokens <= taken)
            self._left = self._left - closed.to(torch.int64)
            reason = reason.masked_fill(closed & (self._left <= 0), THOUGHTS)
            if self._final is not None:
                final = self._final.advance(tokens)
                reason = reason.masked_fill(closed & final, FINAL)
                self._final.reset(closed)
            if self._stop is not None:
                self._stop.reset(closed)
            self._start = self._start.masked_fill(closed, taken)
        return reason.masked_fill(self._eos[tokens], EOS), closed

    def keep(self, index: Tensor) -> None:
        self._budget, self._start, self._left, self._early = (
            x[index] for x in (self._budget, self._start, self._left, self._early)
        )
        self._pause = None if self._pause is None else self._pause[index]
        for matcher in (self._stop, self._final):
            if matcher is not None:
                matcher.keep(index)


def _replay(matcher: Matcher, opened: Jagged, device: str) -> None:
    """Shows a matcher the tokens of open thoughts, so that it finds strings that began before the row was paused."""
    lengths = opened.lengths
    width = int(lengths.max()) if len(lengths) else 0
    table = torch.zeros(len(lengths), width, dtype=torch.int64)
    table[opened.row_ids, opened.positions + (width - lengths)[opened.row_ids]] = opened.values.to(torch.int64)
    table, first = table.to(device), (width - lengths).to(device)
    for column in range(width):
        matcher.advance(table[:, column])
        matcher.reset(first > column)


@dataclass
class _Record:
    """Per-step results of a wave, put into [rows, steps] tables whenever the rows of the batch change."""

    rows: int
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)
    parts: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    def flush(self, place: Tensor) -> None:
        """Ends a stretch of steps whose batch rows are rows `place` of the wave."""
        self.parts.append((place, [torch.stack(column, 1).cpu() for column in zip(*self.steps, strict=True)]))
        self.steps = []

    def table(self, column: int) -> Tensor:
        width = sum(columns[0].shape[1] for _, columns in self.parts)
        out = torch.zeros(self.rows, width, dtype=self.parts[0][1][column].dtype)
        start = 0
        for place, columns in self.parts:
            block = columns[column]
            out[place, start : start + block.shape[1]] = block
            start += block.shape[1]
        return out


@torch.inference_mode()
def generate(
    decoder: Decoder,
    requests: Requests,
    limits: Limits,
    text: TokenText,
    forbidden: Tensor | None,
    device: str,
    max_rows: int,
    max_tokens: int,
) -> Generated:
    """Samples every row of the requests; rows that may get no token come back empty with reason "length"."""
    empty, begun = torch.zeros(0), _Begun.of(requests, limits)
    order, parts, prefilled = [], [], 0
    for wave in waves(begun.contexts, begun.most, max_rows, max_tokens):
        try:
            parts.append(_run_wave(decoder, wave, requests, limits, begun, text, forbidden, device))
        finally:
            decoder.release()
        order.append(wave.rows)
        prefilled += len(wave.prompts.values)
    idle = (begun.most <= 0).nonzero()[:, 0]
    order.append(idle)
    nothing = torch.zeros(len(idle), dtype=torch.int64)
    dtypes = (torch.int32, torch.float32, torch.float32, torch.int32)
    parts.append(([Jagged.from_lengths(empty.to(d), nothing) for d in dtypes], nothing + LENGTH))
    back = torch.argsort(torch.cat(order))
    columns = [Jagged.concat([p[0][n] for p in parts]).select(back) for n in range(4)]
    reason = torch.cat([p[1] for p in parts])[back]
    return Generated(columns[0], columns[1], columns[2], begun.all_ends(columns[3], reason), reason, prefilled)


def _run_wave(
    decoder: Decoder,
    wave: _Wave,
    requests: Requests,
    limits: Limits,
    begun: _Begun,
    text: TokenText,
    forbidden: Tensor | None,
    device: str,
) -> tuple[list[Jagged], Tensor]:
    sampling = requests.sampling
    seeds = requests.seed[wave.rows].cpu().numpy().astype(np.uint64)
    drawn = begun.taken[wave.rows].numpy().astype(np.uint64)
    ends = _Ends(sampling, limits, begun, wave.rows, text, device)
    place = torch.arange(len(wave.rows))
    record = _Record(len(wave.rows))
    finished = torch.zeros(len(wave.rows), dtype=torch.bool, device=device)
    uniforms = torch.zeros(0)
    room = int(begun.most[wave.rows].max())
    logits = decoder.prefill(wave.prompts.to(device), wave.group.to(device), room)
    look_every = LOOK_EVERY.get(torch.device(device).type, 1)
    for taken in range(1, room + 1):
        offset = (taken - 1) % _UNIFORM_BLOCK
        if offset == 0:
            counters = np.arange(taken - 1, taken - 1 + _UNIFORM_BLOCK, dtype=np.uint64)
            here = place.numpy()
            uniforms = torch.from_numpy(counter_uniform(seeds[here, None], drawn[here, None] + counters)).to(device)
        tokens, logprobs, entropies = draw(
            logits, uniforms[:, offset], sampling.temperature, sampling.top_p, sampling.top_k, forbidden
        )
        reason, closed = ends.step(taken, tokens)
        record.steps.append((tokens, logprobs, entropies, closed, reason))
        finished = finished | (reason > 0)
        if taken % look_every and taken < room:
            logits = decoder.step(tokens)
            continue
        count = int(finished.sum())
        if count == len(finished):
            break
        if count and count >= LEAVE_SHARE * len(finished):
            record.flush(place)
            index = _compacted(finished.cpu().numpy())
            place = place[index]
            index = index.to(device)
            tokens, uniforms, finished = tokens[index], uniforms[index], finished[index]
            ends.keep(index)
            decoder.keep(index)
        logits = decoder.step(tokens)
    if record.steps:
        record.flush(place)
    return _collect(record)


def _compacted(finished: np.ndarray) -> Tensor:
    """Index of the rows to keep: those below the new size stay, holes are filled from the end."""
    alive = np.flatnonzero(~finished)
    index = np.arange(len(alive))
    index[finished[: len(alive)]] = alive[alive >= len(alive)]
    return torch.from_numpy(index)


def _collect(record: _Record) -> tuple[list[Jagged], Tensor]:
    reasons = record.table(4)
    ended = reasons > 0
    last = ended.to(torch.int8).argmax(1)
    rows = torch.arange(len(last))
    reason, lengths = reasons[rows, last], last + 1
    inside = torch.arange(reasons.shape[1]) < lengths[:, None]
    columns = [
        Jagged.from_lengths(record.table(n)[inside].to(dtype), lengths)
        for n, dtype in ((0, torch.int32), (1, torch.float32), (2, torch.float32))
    ]
    return [*columns, _thought_ends(record.table(3) & inside, last, reason)], reason


def _thought_ends(closed: Tensor, last: Tensor, reason: Tensor) -> Jagged:
    """Exclusive thought ends. The response's end closes the last thought; an end-of-text token alone belongs to the thought before."""
    rows = torch.arange(len(closed))
    closed[rows, last] |= reason != PAUSED
    alone = (reason == EOS) & (last > 0) & closed[rows, (last - 1).clamp(min=0)]
    closed[rows[alone], last[alone] - 1] = False
    place = torch.arange(1, closed.shape[1] + 1, dtype=torch.int32).expand_as(closed)
    return Jagged.from_lengths(place[closed], closed.sum(1))
