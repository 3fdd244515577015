"""The generation loop: waves of rows, one token per row and step; rows leave the batch when they end.

All rows of a wave have made the same number of steps, so the step, plus what a row had sampled before, is the counter
of the row's random stream. A row's tokens depend on its own prompt, seed and limits only, never on other rows or on how
the batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from creditgraph.components.engine.base import Limits
from creditgraph.components.engine.local.decoder import Decoder, left_padded
from creditgraph.components.engine.local.sampling import draw
from creditgraph.components.engine.local.waves import Begun, Wave, waves
from creditgraph.components.text.stops import Matcher, TokenText
from creditgraph.pipeline.core.handles import Requests
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import counter_uniform

RUNNING, EOS, STOP, FINAL, THOUGHTS, LENGTH, PAUSED = range(7)
REASONS = ("", "eos", "stop", "final", "thoughts", "length", "paused")
# Rows leave the batch once this share of it has ended, because removing rows copies parts of the cache.
LEAVE_SHARE = 0.04
# On an accelerator each check for ended rows waits for the device, so it is done every few steps.
LOOK_EVERY = {"cpu": 1, "cuda": 8}
_UNIFORM_BLOCK = 32  # steps whose random numbers are drawn at once


class Generated(NamedTuple):
    """Completions of N rows.

    Attributes:
        tokens: Jagged int32, the new tokens.
        logprobs, entropies: Jagged float32.
        thought_ends: Jagged int32, exclusive ends of the thoughts.
        reason: int64 [N], index of REASONS.
    """

    tokens: Jagged
    logprobs: Jagged
    entropies: Jagged
    thought_ends: Jagged
    reason: Tensor

    @classmethod
    def nothing(cls, count: int) -> Generated:
        """`count` rows that may get no token."""
        zeros = torch.zeros(count, dtype=torch.int64)
        floats = Jagged.from_lengths(torch.zeros(0), zeros)
        ints = floats.to(torch.int32)
        return cls(ints, floats, floats, ints, zeros + LENGTH)

    @classmethod
    def joined(cls, parts: list[Generated], order: Tensor) -> Generated:
        """The rows of all parts at `order`."""
        *columns, reasons = zip(*parts, strict=True)
        tokens, logprobs, entropies, thought_ends = (Jagged.concat(column).select(order) for column in columns)
        return cls(tokens, logprobs, entropies, thought_ends, torch.cat(reasons)[order])


class _Ends:
    """Decides for each row of a wave whether its token ended a thought or the response."""

    def __init__(self, call: _Call, rows: Tensor) -> None:
        count = len(rows)
        device = call.decoder.device
        begun = call.begun
        self._budget = begun.room[rows].to(device)
        self._pause = None if begun.pause is None else begun.pause[rows].to(device)
        self._eos = call.limits.eos.to(device)
        thoughts = call.requests.sampling.thoughts
        self._thoughts = thoughts
        stops = call.requests.sampling.stop if thoughts is None else (thoughts.stop,)
        finals = (thoughts.final,) if thoughts is not None and thoughts.final else ()
        self._stop = call.text.matcher(stops, count, device) if stops else None
        self._final = call.text.matcher(finals, count, device) if finals else None
        opened = begun.opened.select(rows)
        self._start = -opened.lengths.to(device)
        self._left = (call.limits.thoughts - begun.thoughts)[rows].to(device)
        for matcher in (self._stop, self._final):
            if matcher is not None:
                _replay(matcher, opened, device)
        self._never = self._budget.new_zeros(count, dtype=torch.bool)

    def step(self, taken: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """After the `taken`-th token: int64 [B], why a row ended (0: not ended); bool [B], whether a thought ended."""
        hit = self._never if self._stop is None else self._stop.advance(tokens)
        # Later reasons take precedence over earlier ones.
        eos = self._eos[tokens]
        reason = (self._budget <= taken) * LENGTH
        if self._pause is not None:
            reason = reason.masked_fill((reason == 0) & (self._pause <= taken), PAUSED)
        if self._thoughts is None:
            reason = reason.masked_fill(hit, STOP)
            closed = self._never
        else:
            closed = hit | (self._start + self._thoughts.max_tokens <= taken)
            if not self._thoughts.ends_at_eos:
                closed = closed | eos
                # Of a thought that holds more, end of text is only the end.
                eos = eos & (self._start + 1 == taken)
            self._left = self._left - closed.to(torch.int64)
            reason = reason.masked_fill(closed & (self._left <= 0), THOUGHTS)
            if self._final is not None:
                reason = reason.masked_fill(closed & self._final.advance(tokens), FINAL)
                self._final.reset(closed)
            if self._stop is not None:
                self._stop.reset(closed)
            self._start = self._start.masked_fill(closed, taken)
        return reason.masked_fill(eos, EOS), closed

    def keep(self, index: Tensor) -> None:
        self._budget = self._budget[index]
        self._start = self._start[index]
        self._left = self._left[index]
        self._never = self._never[index]
        self._pause = None if self._pause is None else self._pause[index]
        for matcher in (self._stop, self._final):
            if matcher is not None:
                matcher.keep(index)


def _replay(matcher: Matcher, opened: Jagged, device: torch.device) -> None:
    """Feeds a matcher the tokens of open thoughts, so that it matches strings that began before the row was paused."""
    table, mask = left_padded(opened)
    table = table.to(device)
    mask = mask.to(device)
    for column in range(table.shape[1]):
        matcher.advance(table[:, column])
        matcher.reset(~mask[:, column])


class _Step(NamedTuple):
    """Results of one step for each row of the batch, each [B]; also tables of many steps, [rows, steps].

    Attributes:
        tokens: int64.
        logprobs, entropies: float32.
        closed: bool, whether a thought ends with the token.
        reason: int64, index of REASONS.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor
    closed: Tensor
    reason: Tensor


@dataclass
class _Record:
    """The steps of a wave, put into [rows, steps] tables whenever the rows of the batch change."""

    rows: int
    steps: list[_Step] = field(default_factory=list)
    parts: list[tuple[Tensor, _Step]] = field(default_factory=list)

    def flush(self, place: Tensor) -> None:
        """Ends a stretch of steps whose batch rows are rows `place` of the wave."""
        # One copy from the device for many steps.
        self.parts.append((place, _Step(*(torch.stack(column, 1).cpu() for column in zip(*self.steps, strict=True)))))
        self.steps = []

    def collected(self) -> Generated:
        """All rows, each up to the step that ended it."""
        width = sum(part.tokens.shape[1] for _, part in self.parts)
        steps = _Step(*(torch.zeros(self.rows, width, dtype=column.dtype) for column in self.parts[0][1]))
        start = 0
        for place, part in self.parts:
            end = start + part.tokens.shape[1]
            for table, block in zip(steps, part, strict=True):
                table[place, start:end] = block
            start = end
        # The first step with a reason ended the row; what it sampled after that is dropped.
        last = (steps.reason > 0).to(torch.int8).argmax(1)
        reason = steps.reason[torch.arange(self.rows), last]
        lengths = last + 1
        inside = torch.arange(width) < lengths[:, None]
        return Generated(
            tokens=Jagged.from_lengths(steps.tokens[inside].to(torch.int32), lengths),
            logprobs=Jagged.from_lengths(steps.logprobs[inside].to(torch.float32), lengths),
            entropies=Jagged.from_lengths(steps.entropies[inside].to(torch.float32), lengths),
            thought_ends=_thought_ends(steps.closed & inside, last, reason),
            reason=reason,
        )


@dataclass
class _Call:
    """One call of `generate`."""

    decoder: Decoder
    requests: Requests
    limits: Limits
    begun: Begun
    text: TokenText
    forbidden: Tensor | None

    def run(self, wave: Wave) -> Generated:
        """Samples the rows of one wave."""
        device = self.decoder.device
        sampling = self.requests.sampling
        seeds = self.requests.seed[wave.rows].cpu().numpy().astype(np.uint64)
        drawn = self.begun.taken[wave.rows].numpy().astype(np.uint64)
        room = int(self.begun.most[wave.rows].max())
        ends = _Ends(self, wave.rows)
        place = torch.arange(len(wave.rows))  # the row of the wave in each row of the batch
        record = _Record(len(wave.rows))
        finished = torch.zeros(len(wave.rows), dtype=torch.bool, device=device)
        uniforms = torch.zeros(0)
        logits = self.decoder.prefill(wave.prompts.to(device), wave.group.to(device), room)
        look_every = LOOK_EVERY.get(device.type, 1)
        for taken in range(1, room + 1):
            offset = (taken - 1) % _UNIFORM_BLOCK
            if offset == 0:
                # Random numbers of many steps at once; a continued row starts counting at its number of earlier tokens.
                counters = np.arange(taken - 1, taken - 1 + _UNIFORM_BLOCK, dtype=np.uint64)
                here = place.numpy()
                block = counter_uniform(seeds[here, None], drawn[here, None] + counters)
                uniforms = torch.from_numpy(block).to(device)
            tokens, logprobs, entropies = draw(
                logits, uniforms[:, offset], sampling.temperature, sampling.top_p, sampling.top_k, self.forbidden
            )
            reason, closed = ends.step(taken, tokens)
            record.steps.append(_Step(tokens, logprobs, entropies, closed, reason))
            finished = finished | (reason > 0)
            if taken % look_every == 0 or taken == room:
                count = int(finished.sum())
                if count == len(finished):
                    break
                if count and count >= LEAVE_SHARE * len(finished):
                    record.flush(place)
                    index = _compacted(finished.cpu().numpy())
                    place = place[index]
                    index = index.to(device)
                    tokens = tokens[index]
                    uniforms = uniforms[index]
                    finished = finished[index]
                    ends.keep(index)
                    self.decoder.keep(index)
            logits = self.decoder.step(tokens)
        if record.steps:
            record.flush(place)
        return record.collected()


@torch.inference_mode()
def generate(
    decoder: Decoder,
    requests: Requests,
    limits: Limits,
    text: TokenText,
    forbidden: Tensor | None,
    max_rows: int,
    max_tokens: int,
) -> tuple[Generated, int]:
    """Samples every row of the requests; also returns the number of prefilled tokens.

    Rows that may get no token are returned empty with reason "length". Thought ends are those of whole rows.
    """
    begun = Begun.of(requests, limits)
    call = _Call(decoder, requests, limits, begun, text, forbidden)
    idle = (begun.most <= 0).nonzero()[:, 0]
    order = [idle]
    parts = [Generated.nothing(len(idle))]
    prefilled = 0
    for wave in waves(begun.contexts, begun.most, max_rows, max_tokens):
        try:
            parts.append(call.run(wave))
        finally:
            decoder.release()
        order.append(wave.rows)
        prefilled += len(wave.prompts.values)
    done = Generated.joined(parts, torch.argsort(torch.cat(order)))
    return done._replace(thought_ends=begun.all_ends(done.thought_ends, done.reason == EOS)), prefilled


def _compacted(finished: np.ndarray) -> Tensor:
    """Index of the rows to keep: those below the new size stay, holes are filled from the end."""
    alive = np.flatnonzero(~finished)
    index = np.arange(len(alive))
    index[finished[: len(alive)]] = alive[alive >= len(alive)]
    return torch.from_numpy(index)


def _thought_ends(closed: Tensor, last: Tensor, reason: Tensor) -> Jagged:
    """Exclusive thought ends of rows whose tokens close thoughts (bool [rows, steps]) and whose last step is `last`.

    The response's end closes the last thought; an end-of-text token alone belongs to the thought before.
    """
    rows = torch.arange(len(closed))
    closed[rows, last] |= reason != PAUSED
    alone = (reason == EOS) & (last > 0) & closed[rows, (last - 1).clamp(min=0)]
    closed[rows[alone], last[alone] - 1] = False
    place = torch.arange(1, closed.shape[1] + 1, dtype=torch.int32).expand_as(closed)
    return Jagged.from_lengths(place[closed], closed.sum(1))
