"""Bookkeeping of one `Requests` batch for an engine that answers one request at a time.

An engine behind an API knows token limits and stop strings, but not thoughts, budgets per row or finish reasons. `Rows`
turns each row into a sequence of asks (one per thought, or one for a plain response), checks every answer, and decides
from the tokens alone where a thought or the response ends, by the rules of `engine.local`. What an engine says about
why it stopped is only checked.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from components.engine.base import Limits
from components.text.stops import TokenText, decode_rows
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Completions, Requests
from pipeline.core.streams import counter_seed

# Log-probs computed in low precision may exceed 0 by rounding.
_LARGEST_LOGPROB = 1e-2


class BadAnswer(CreditgraphError):
    """An answer that cannot be what the model sampled; another server may give a good one to the same ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to an engine.

    Attributes:
        row: of the `Requests`.
        group: rows with equal prompts share it; their asks should go where the prompt is cached.
        tokens: everything before the first token to sample.
        max_tokens: most tokens to sample, at least 1.
        seed: below 2**63; an engine that gets the same ask twice samples the same tokens.
        stop: strings that end the answer, kept in it.
        temperature: 0 is greedy.
        top_p, top_k: 1.0 and 0 are off.
    """

    row: int
    group: int
    tokens: list[int]
    max_tokens: int
    seed: int
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an engine sampled for an ask.

    Attributes:
        tokens: sampled ids, stop string and end-of-text token included.
        logprobs: one per token, nats, at the sampling temperature (1 for greedy), before truncation.
        entropies: one per token, nats, of the same distribution, or None where the engine gives none.
        reason: why the engine ended; "abort" drops the tokens and the same ask is made again.
        version: of the weights that sampled all tokens, or None when the engine does not say.
    """

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float] | None
    reason: Literal["stop", "length", "eos", "abort"]
    version: int | None = None


@dataclass(slots=True)
class _Row:
    prompt: list[int]
    group: int
    seed: int
    budget: int
    thoughts: int
    limit: int  # tokens at which it ends or is paused
    begun: int  # tokens of earlier requests, the first of `tokens`
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of the new tokens, as entropies
    entropies: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    start: int = 0  # of the open thought
    tail: bytes = b""  # end of its text, as far as a stop string may reach back
    reason: str = ""
    asked: Ask | None = None
    mark: tuple[Ask, int, list[int], int, bytes, int] | None = None  # where its ask found it: see `Rows.again`


class Rows:
    """The rows of a batch while an engine samples them. Rows are independent; answers may come in any order.

    Args:
        requests: the batch.
        limits: token and thought limits of each row, and end-of-text ids (`components.engine.checks.limits`).
        text: byte strings of the tokens.
        tokenizer: Hugging Face tokenizer.
        vocab_size: ids that the engine may give.
        version: of the weights that must sample, or None to take any.
    """

    def __init__(
        self,
        requests: Requests,
        limits: Limits,
        text: TokenText,
        tokenizer: object,
        vocab_size: int,
        version: int | None = None,
    ) -> None:
        self._sampling = requests.sampling
        self._thoughts = requests.sampling.thoughts
        self._stop = requests.sampling.stop if self._thoughts is None else (self._thoughts.stop,)
        self._text, self._tokenizer, self._vocab_size, self._version = text, tokenizer, vocab_size, version
        self._stop_bytes = [stop.encode() for stop in self._stop]
        self._longest = max(map(len, self._stop_bytes), default=1)
        self._whole = False
        self._eos = frozenset(limits.eos.nonzero()[:, 0].tolist())
        groups: dict[tuple[int, ...], int] = {}
        prompts = requests.tokens.to_lists()
        self._rows = [
            _Row(prompt, groups.setdefault(tuple(prompt), len(groups)), seed, budget, thoughts, limit=budget, begun=0)
            for prompt, seed, budget, thoughts in zip(
                prompts, requests.seed.tolist(), limits.tokens.tolist(), limits.thoughts.tolist(), strict=True
            )
        ]
        if requests.progress is not None:
            for row, tokens, ends in zip(
                self._rows, requests.progress.tokens.to_lists(), requests.progress.thought_ends.to_lists(), strict=True
            ):
                self._resume(row, tokens, ends)
        if requests.pause is not None:
            for row, pause in zip(self._rows, requests.pause.tolist(), strict=True):
                row.limit = min(row.budget, row.begun + pause)
        self.prompt_tokens = sum(map(len, groups))
        """tokens of the distinct prompts"""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def open(self) -> list[Ask]:
        """Asks that have no good answer yet."""
        return [row.asked for row in self._rows if row.asked is not None]

    @property
    def watched(self) -> bool:
        """Whether the text of a row may end it."""
        return bool(self._stop)

    def start(self, whole: bool = False) -> list[Ask]:
        """The first ask of every row that may have a token; call once.

        With `whole` an ask covers all that is left of its row, without stop strings: for engines whose answers are
            watched token by
        token (`feed`) and can be ended at any of them.
        """
        self._whole = whole
        asks = []
        for index, row in enumerate(self._rows):
            if row.budget <= len(row.tokens):
                row.reason = "length"
            else:
                asks.append(self._ask(index))
        return asks

    def advance(self, index: int, answer: Answer) -> Ask | None:
        """Takes the answer to the open ask of row `index`; the row's next ask, or None when it has ended.

        Raises BadAnswer, with the row as it was, for an answer that is incomplete or impossible.
        """
        row = self._rows[index]
        ask = row.asked
        if ask is None:
            raise CreditgraphError(f"row {index}: an answer without an open ask; wanted one answer per ask.")
        self._check(ask, answer)
        if answer.reason == "abort":
            return ask
        entropies = itertools.repeat(math.nan) if answer.entropies is None else answer.entropies
        for token, logprob, entropy in zip(answer.tokens, answer.logprobs, entropies, strict=False):
            closed = self._push(row, token, logprob, entropy)
            if row.reason:
                row.asked = None
                return None
            if closed:
                break
        return self._ask(index)

    def feed(self, index: int, part: Answer, last: bool) -> bool:
        """Takes the next tokens of the open ask of row `index`, for asks of whole rows; True when the row has ended.

        What the engine samples for the ask after that is of no use. A part with reason "abort" leaves the row as
        `again` does. Raises BadAnswer as `advance` does, and for a `last` part after which the row has not ended.
        """
        row = self._rows[index]
        ask = row.asked
        if ask is None:
            raise CreditgraphError(f"row {index}: an answer without an open ask; wanted one answer per ask.")
        self._check(ask, part, len(row.tokens))
        if part.reason == "abort":
            self.again(index)
            return False
        entropies = itertools.repeat(math.nan) if part.entropies is None else part.entropies
        for token, logprob, entropy in zip(part.tokens, part.logprobs, entropies, strict=False):
            self._push(row, token, logprob, entropy)
            if row.reason:
                row.asked = None
                return True
        if last:
            raise BadAnswer(
                f"row {index}: ended by '{part.reason}' after {len(row.tokens)} tokens; wanted {row.limit} or an end."
            )
        return False

    def again(self, index: int) -> None:
        """Forgets what `feed` took for the ask of row `index`, which is open again: its answer was cut off or is not to be trusted."""
        row = self._rows[index]
        if row.mark is None:
            raise CreditgraphError(f"row {index}: no ask of a whole row; wanted one, made by start(whole=True).")
        row.asked, taken, ends, row.start, row.tail, row.thoughts = row.mark
        row.reason, row.ends = "", list(ends)
        del row.tokens[taken:], row.logprobs[taken - row.begun :], row.entropies[taken - row.begun :]

    def completions(self) -> Completions:
        """All rows in order; every row must have ended."""
        left = sum(not row.reason for row in self._rows)
        if left:
            raise CreditgraphError(f"{left} of {len(self._rows)} rows have not ended; wanted an answer to every ask.")
        tokens = [row.tokens[row.begun :] for row in self._rows]
        return Completions(
            tokens=Jagged.from_rows(tokens, torch.int32),
            logprobs=Jagged.from_rows([row.logprobs for row in self._rows], torch.float32),
            entropies=Jagged.from_rows([row.entropies for row in self._rows], torch.float32),
            thought_ends=Jagged.from_rows([row.ends for row in self._rows], torch.int32),
            finish_reason=[row.reason for row in self._rows],
            text=decode_rows(self._tokenizer, tokens),
        )

    def _resume(self, row: _Row, tokens: list[int], ends: list[int]) -> None:
        """Puts a row where an earlier request has left it."""
        row.begun, row.tokens, row.ends, row.start = len(tokens), list(tokens), list(ends), ends[-1] if ends else 0
        row.thoughts -= len(ends)
        pieces = self._text.pieces
        if pieces is not None:
            row.tail = b"".join(pieces[token] for token in tokens[row.start :])[-self._longest :]

    def _ask(self, index: int) -> Ask:
        row, sampling, taken = self._rows[index], self._sampling, len(self._rows[index].tokens)
        room = row.limit - taken
        if self._thoughts is not None and not self._whole:
            # At least 1: a limit of 0 closes each thought after its first token.
            room = min(room, max(1, row.start + self._thoughts.max_tokens - taken))
        row.asked = Ask(
            row=index,
            group=row.group,
            tokens=row.prompt + row.tokens,
            max_tokens=room,
            seed=counter_seed(row.seed, taken),
            stop=() if self._whole else self._stop,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        if self._whole:
            row.mark = (row.asked, taken, list(row.ends), row.start, row.tail, row.thoughts)
        return row.asked

    def _check(self, ask: Ask, answer: Answer, before: int | None = None) -> None:
        """Raises BadAnswer for an impossible answer; `before`: tokens that the row has, when it may be a part of the answer."""
        count, place = len(answer.tokens), f"row {ask.row}"
        if self._version is not None and answer.version is not None and answer.version != self._version:
            raise BadAnswer(f"{place}: sampled by weights version {answer.version}; wanted version {self._version}.")
        if answer.reason == "abort":
            return
        if before is None and (
            count == 0 or count > ask.max_tokens or (answer.reason == "length" and count < ask.max_tokens)
        ):
            raise BadAnswer(
                f"{place}: {count} tokens, ended by '{answer.reason}'; wanted 1 to {ask.max_tokens}, all of them for "
                "'length'."
            )
        if len(answer.logprobs) != count or (answer.entropies is not None and len(answer.entropies) != count):
            entropies = "" if answer.entropies is None else f" and {len(answer.entropies)} entropies"
            raise BadAnswer(
                f"{place}: {count} tokens with {len(answer.logprobs)} log-probs{entropies}; wanted one per token."
            )
        low, high = min(answer.tokens, default=0), max(answer.tokens, default=0)
        if low < 0 or high >= self._vocab_size:
            raise BadAnswer(f"{place}: token id {low if low < 0 else high}; wanted 0 to {self._vocab_size - 1}.")
        if before is None and answer.reason == "eos" and self._eos.isdisjoint(answer.tokens):
            raise BadAnswer(f"{place}: ended by 'eos' without an end-of-text token; wanted it among the tokens.")
        for value in answer.logprobs:
            if not math.isfinite(value):
                raise BadAnswer(
                    f"{place}: a log-prob that is not finite; wanted finite logits. The weights have likely diverged: "
                    "lower the "
                    "learning rate or go back to an earlier checkpoint."
                )
            if value > _LARGEST_LOGPROB:
                raise BadAnswer(f"{place}: a log-prob of {value:.4g}; wanted at most 0.")

    def _push(self, row: _Row, token: int, logprob: float, entropy: float) -> bool:
        """Adds one token; sets the reason when the row ends there. Whether the token closes a thought or completes a stop string."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.entropies.append(entropy)
        stopped = bool(self._stop) and self._completes(row, token)
        taken, thoughts = len(row.tokens), self._thoughts
        closed = stopped or (thoughts is not None and taken >= row.start + thoughts.max_tokens)
        if closed or taken >= row.limit or token in self._eos:
            row.reason = self._reason(row, stopped)
            row.tail = b""
        return closed

    def _completes(self, row: _Row, token: int) -> bool:
        """Whether the row's newest token completes a stop string in the open thought."""
        pieces = self._text.pieces
        if pieces is None:
            return self._holds(row.tokens[row.start :], self._stop)
        window = row.tail + pieces[token]
        row.tail = window[-self._longest :]
        return any(stop in window for stop in self._stop_bytes)

    def _holds(self, tokens: list[int], strings: tuple[str, ...]) -> bool:
        """Whether the text of the tokens has held one of the strings at any of its tokens."""
        pieces = self._text.pieces
        if pieces is None:
            texts = decode_rows(self._tokenizer, [tokens[:n] for n in range(1, len(tokens) + 1)])
            return any(s in text for text in texts for s in strings)
        whole = b"".join(pieces[token] for token in tokens)
        return any(s.encode() in whole for s in strings)

    def _reason(self, row: _Row, stopped: bool) -> str:
        """Why the row ends with its last token, "" when it goes on; records thought ends. Order of the rules as in engine.local."""
        taken, thoughts = len(row.tokens), self._thoughts
        reason = "length" if taken >= row.budget else "paused" if taken >= row.limit else ""
        eos = row.tokens[-1] in self._eos
        if thoughts is None:
            return "eos" if eos else "stop" if stopped else reason
        closed = stopped or taken >= row.start + thoughts.max_tokens
        if closed:
            row.thoughts -= 1
            if row.thoughts <= 0:
                reason = "thoughts"
            if thoughts.final and self._holds(row.tokens[row.start :], (thoughts.final,)):
                reason = "final"
        if eos:
            reason = "eos"
            # An end-of-text token alone belongs to the thought before it.
            if row.ends and row.start == taken - 1:
                row.ends.pop()
        if closed or reason not in ("", "paused"):
            row.ends.append(taken)
            row.start = taken
        return reason
