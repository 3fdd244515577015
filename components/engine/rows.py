"""State of one `Requests` batch for an engine that processes one request at a time.

Such an engine supports token limits, but not thoughts, budgets per row or our finish reasons. `Rows` turns each row
into one request for all of its tokens, checks the response, and determines the ends of thoughts and of the response
from the tokens alone, by the rules of `engine.local`. The finish reason of the engine is only checked.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from creditgraph.components.engine.base import Limits
from creditgraph.components.engine.messages import (
    LOWEST_SAMPLED,
    BadResponse,
    RowRequest,
    RowResponse,
    check_entropies,
    check_lengths,
    check_logprobs,
    group_of,
)
from creditgraph.components.text.stops import TokenText, decode_rows
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Completions, Requests
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import counter_seed


@dataclass(slots=True)
class _Row:
    budget: int
    limit: int  # tokens at which it ends or is paused
    begun: int  # tokens of earlier requests, the first of `tokens`
    thoughts: int  # that it may still have
    tokens: list[int]
    ends: list[int]
    start: int  # of the open thought
    tail: bytes  # end of that thought's text, as far back as a stop string may reach
    logprobs: list[float] = field(default_factory=list)  # of the new tokens, as entropies
    entropies: list[float] = field(default_factory=list)
    experts: np.ndarray | None = None  # of all its tokens and of what the engine sampled beyond them
    reason: str = ""  # "" until the row ends


class Rows:
    """The rows of a batch while an engine samples them. Rows are independent; responses may come in any order.

    Args:
        requests: the batch.
        limits: token and thought limits of each row, and end-of-text ids (`EnginePolicy` computes them).
        text: byte strings of the tokens.
        tokenizer: Hugging Face tokenizer.
        vocab_size: ids that the engine may return.
        experts: whether it returns the experts of each token.
    """

    def __init__(
        self,
        requests: Requests,
        limits: Limits,
        text: TokenText,
        tokenizer: object,
        vocab_size: int,
        experts: bool = False,
    ) -> None:
        self._requests = requests
        self._sampling = requests.sampling
        self._thoughts = requests.sampling.thoughts
        self._stop = requests.sampling.stop if self._thoughts is None else (self._thoughts.stop,)
        self._stop_bytes = [stop.encode() for stop in self._stop]
        self._longest = max(map(len, self._stop_bytes), default=1)
        self._text = text
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._returns_experts = experts
        self._eos = frozenset(limits.eos.nonzero()[:, 0].tolist())
        self._prompts = requests.tokens.to_lists()
        self._seeds = requests.seed.tolist()
        self._budgets = limits.tokens.tolist()
        self._max_thoughts = limits.thoughts.tolist()
        self._rows = [self._new_row(index) for index in range(len(self._prompts))]

    def start(self) -> list[RowRequest]:
        """The request of every row that may have a token; call once."""
        requests = []
        progress = self._requests.progress
        versions = None if progress is None or progress.versions is None else progress.versions.tolist()
        for index, row in enumerate(self._rows):
            prompt = self._prompts[index]
            if row.budget <= row.begun:
                row.reason = "length"
                continue
            request = RowRequest(
                row=index,
                group=group_of(prompt),
                tokens=prompt + row.tokens,
                max_tokens=row.limit - row.begun,
                seed=counter_seed(self._seeds[index], row.begun),
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                top_k=self._sampling.top_k,
                stream=bool(self._stop),
                ignore_eos=self._thoughts is not None and not self._thoughts.ends_at_eos,
                cache=versions[index] if versions else None,
            )
            requests.append(request)
        return requests

    def feed(self, index: int, part: RowResponse, last: bool) -> bool:
        """Takes the next tokens of row `index`; True when the row has ended.

        Tokens that the engine samples for the row after that are ignored; the last part may still bring its experts. A
        part with reason "abort" resets the row.

        Raises:
            BadResponse: the part is incomplete or impossible, or it is the `last` one and the row has not ended.
        """
        row = self._rows[index]
        if part.routed_experts is not None:
            row.experts = part.routed_experts
        if row.reason:
            if part.tokens:
                raise CreditgraphError(f"row {index}: expected no response to a row that has ended, got one.")
            return True
        if part.reason == "abort":
            self.reset(index)
            return False
        self._check(index, part)
        entropies = itertools.repeat(math.nan) if part.entropies is None else part.entropies
        for token, logprob, entropy in zip(part.tokens, part.logprobs, entropies, strict=False):
            if self._push(row, token, logprob, entropy):
                return True
        if last:
            raise BadResponse(
                f"row {index}: expected {row.limit} tokens, or fewer that end it, "
                f"got {len(row.tokens)} and reason '{part.reason}'."
            )
        return False

    def reset(self, index: int) -> None:
        """Drops the tokens of row `index`, which is requested again: its response was cut off or is not valid."""
        self._rows[index] = self._new_row(index)

    def completions(self) -> Completions:
        """All rows in order; every row must have ended."""
        running = sum(not row.reason for row in self._rows)
        if running:
            raise CreditgraphError(
                f"expected a response to every request, got {running} of {len(self._rows)} rows that have not ended."
            )
        tokens = [row.tokens[row.begun :] for row in self._rows]
        return Completions(
            tokens=Jagged.from_rows(tokens, torch.int32),
            logprobs=Jagged.from_rows([row.logprobs for row in self._rows], torch.float32),
            entropies=Jagged.from_rows([row.entropies for row in self._rows], torch.float32),
            thought_ends=Jagged.from_rows([row.ends for row in self._rows], torch.int32),
            finish_reason=[row.reason for row in self._rows],
            text=decode_rows(self._tokenizer, tokens),
            routed_experts=self._experts(),
        )

    def _experts(self) -> Jagged | None:
        """Those of each row's tokens but the last; an empty row where the engine has not given as many."""
        if not self._returns_experts:
            return None
        out = []
        for prompt, row in zip(self._prompts, self._rows, strict=True):
            count = len(prompt) + len(row.tokens) - 1
            experts = row.experts
            if experts is None or len(experts) < count:
                experts = np.zeros(0, np.uint8)
            out.append(torch.from_numpy(experts[:count].flatten()))
        return Jagged.from_rows(out)

    def _new_row(self, index: int) -> _Row:
        """The row in the state after earlier requests."""
        progress = self._requests.progress
        tokens = [] if progress is None else progress.tokens.row(index).tolist()
        ends = [] if progress is None else progress.thought_ends.row(index).tolist()
        start = ends[-1] if ends else 0
        pieces = self._text.pieces
        tail = b"" if pieces is None else b"".join(pieces[token] for token in tokens[start:])
        budget = self._budgets[index]
        pause = self._requests.pause
        return _Row(
            budget=budget,
            limit=budget if pause is None else min(budget, len(tokens) + int(pause[index])),
            begun=len(tokens),
            thoughts=self._max_thoughts[index] - len(ends),
            tokens=tokens,
            ends=ends,
            start=start,
            tail=tail[-self._longest :],
        )

    def _check(self, index: int, part: RowResponse) -> None:
        """Raises BadResponse for tokens or log-probs that the model cannot have sampled."""
        place = f"row {index}"
        check_lengths(place, len(part.tokens), part.logprobs, part.entropies)
        for token in part.tokens:
            if not 0 <= token < self._vocab_size:
                raise BadResponse(f"{place}: expected token ids from 0 to {self._vocab_size - 1}, got {token}.")
        check_logprobs(place, part.logprobs, LOWEST_SAMPLED)
        check_entropies(place, part.entropies, math.log(self._vocab_size))
        row = self._rows[index]
        if len(row.tokens) + len(part.tokens) > row.limit:
            raise BadResponse(
                f"{place}: expected at most {row.limit - row.begun} tokens, got "
                f"{len(row.tokens) + len(part.tokens) - row.begun}."
            )

    def _push(self, row: _Row, token: int, logprob: float, entropy: float) -> bool:
        """Adds one token; sets the reason and returns True when the row ends there."""
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.entropies.append(entropy)
        thoughts = self._thoughts
        stopped = bool(self._stop) and self._completes(row, token)
        # A limit of 0 closes each thought after its first token.
        closed = stopped or (thoughts is not None and len(row.tokens) >= row.start + thoughts.max_tokens)
        if closed or len(row.tokens) >= row.limit or token in self._eos:
            row.reason = self._reason(row, stopped)
            row.tail = b""
        return bool(row.reason)

    def _completes(self, row: _Row, token: int) -> bool:
        """Whether the row's newest token completes a stop string in the open thought."""
        pieces = self._text.pieces
        if pieces is None:
            return self._contains(row.tokens[row.start :], self._stop)
        window = row.tail + pieces[token]
        row.tail = window[-self._longest :]
        return any(stop in window for stop in self._stop_bytes)

    def _contains(self, tokens: list[int], strings: tuple[str, ...]) -> bool:
        """Whether the text of the tokens contained one of the strings after any of them."""
        pieces = self._text.pieces
        if pieces is None:
            texts = decode_rows(self._tokenizer, [tokens[:n] for n in range(1, len(tokens) + 1)])
            return any(s in text for text in texts for s in strings)
        whole = b"".join(pieces[token] for token in tokens)
        return any(s.encode() in whole for s in strings)

    def _reason(self, row: _Row, stopped: bool) -> str:
        """Why the row ends with its last token, "" if it continues; records thought ends. As in engine.local."""
        taken = len(row.tokens)
        thoughts = self._thoughts
        reason = "length" if taken >= row.budget else "paused" if taken >= row.limit else ""
        eos = row.tokens[-1] in self._eos
        if thoughts is None:
            return "eos" if eos else "stop" if stopped else reason
        closed = stopped or taken >= row.start + thoughts.max_tokens
        if not thoughts.ends_at_eos:
            closed = closed or eos
            # Of a thought that holds more, end of text is only the end.
            eos = eos and row.start + 1 == taken
        if closed:
            row.thoughts -= 1
            if row.thoughts <= 0:
                reason = "thoughts"
            if thoughts.final and self._contains(row.tokens[row.start :], (thoughts.final,)):
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
