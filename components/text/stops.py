"""Detects stop strings by one table lookup per sampled token, and decodes tokens.

With a tokenizer whose decoding is a concatenation of per-token byte strings (byte-level BPE, sentencepiece with byte
fallback, word level), a stop string becomes a finite automaton over bytes, and the automaton a table [state, token]:
strings and characters that span tokens cost nothing extra. With other tokenizers the open thought of each row is
decoded after every token, which is slow but correct.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditgraph.pipeline.core.jagged import Jagged

_PROBES = (
    "x = 7; y </thought> \\boxed{42}.",
    "Step 2:\n  so that's (3/4) — é 漢字 🙂 ok</s>",
    "</thought>\n\n",
    "a</thought>b \\boxed{",
)


class Matcher(Protocol):
    """Follows one set of strings through the tokens of a batch of rows."""

    def advance(self, tokens: Tensor) -> Tensor:
        """Takes one token per row [B]; bool [B], True where a string has occurred since the row's last reset."""

    def reset(self, rows: Tensor) -> None:
        """Resets rows, bool [B], to the start state."""

    def keep(self, index: Tensor) -> None:
        """Keeps rows by index, in its order."""


class TokenText:
    """The byte string of each token, and matchers that use it.

    Args:
        tokenizer: Hugging Face tokenizer.
        vocab_size: number of logit columns; tokens beyond the tokenizer's have no text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tables: dict[tuple[str, ...], Tensor] = {}
        self.pieces: list[bytes] | None = token_pieces(tokenizer, vocab_size)

    def matcher(self, strings: tuple[str, ...], rows: int, device: str | torch.device) -> Matcher:
        """A matcher for `rows` rows in the start state."""
        if self.pieces is None:
            return DecodeMatcher(self._tokenizer, strings, rows)
        if strings not in self._tables:
            self._tables[strings] = torch.from_numpy(token_table(byte_automaton(strings), self.pieces)).to(device)
        return TableMatcher(self._tables[strings], rows)


class TableMatcher:
    """Matcher by table [states, tokens]; the last state, which is absorbing, means that a string has occurred."""

    def __init__(self, table: Tensor, rows: int) -> None:
        self._states, self._tokens = table.shape
        self._table = table.reshape(-1)
        self._state = torch.zeros(rows, dtype=torch.int64, device=table.device)

    def advance(self, tokens: Tensor) -> Tensor:
        """See `Matcher.advance`."""
        self._state = self._table[self._state * self._tokens + tokens].to(torch.int64)
        return self._state == self._states - 1

    def reset(self, rows: Tensor) -> None:
        """See `Matcher.reset`."""
        self._state = self._state.masked_fill(rows, 0)

    def keep(self, index: Tensor) -> None:
        """See `Matcher.keep`."""
        self._state = self._state[index]


class DecodeMatcher:
    """Matcher that decodes each row's tokens since its last reset."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], rows: int) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        self._seen: list[list[int]] = [[] for _ in range(rows)]

    def advance(self, tokens: Tensor) -> Tensor:
        """See `Matcher.advance`."""
        for seen, token in zip(self._seen, tokens.tolist(), strict=True):
            seen.append(token)
        hits = [any(s in text for s in self._strings) for text in decode_rows(self._tokenizer, self._seen)]
        return torch.tensor(hits, dtype=torch.bool, device=tokens.device)

    def reset(self, rows: Tensor) -> None:
        """See `Matcher.reset`."""
        for row in rows.nonzero().flatten().tolist():
            self._seen[row] = []

    def keep(self, index: Tensor) -> None:
        """See `Matcher.keep`."""
        self._seen = [self._seen[i] for i in index.tolist()]


def decode_rows(tokenizer: Any, rows: Sequence[Sequence[int]]) -> list[str]:
    """Text of each row, special tokens kept and spaces left alone."""
    if not rows:
        return []
    texts: list[str] = tokenizer.batch_decode(list(rows), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return texts


def byte_automaton(strings: Sequence[str]) -> NDArray[np.int16]:
    """Aho-Corasick over bytes: next state [states, 256]; state 0 is the start, the last one an absorbing match."""
    children: list[dict[int, int]] = [{}]
    terminal = [False]
    for string in strings:
        node = 0
        for byte in string.encode():
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                terminal.append(False)
            node = children[node][byte]
        terminal[node] = True
    match = len(children)
    delta = np.zeros((match + 1, 256), dtype=np.int16)
    fallback = [0] * match  # the longest proper suffix of a node's string that is itself a node
    queue = [0]
    for node in queue:
        if node:
            delta[node] = delta[fallback[node]]
            terminal[node] |= terminal[fallback[node]]
        for byte, child in children[node].items():
            fallback[child] = int(delta[node][byte]) if node else 0
            delta[node][byte] = child
            queue.append(child)
    delta[:match] = np.where(np.array([*terminal, True])[delta[:match]], match, delta[:match])
    delta[match] = match
    return delta


def token_table(delta: NDArray[np.int16], pieces: Sequence[bytes]) -> NDArray[np.int16]:
    """Next state [states, tokens] of a byte automaton after a whole token."""
    states = len(delta)
    # Tokens from the longest to the shortest, so that those with a byte at some place are the first of them.
    order = sorted(range(len(pieces)), key=lambda i: -len(pieces[i]))
    lengths = np.array([len(pieces[i]) for i in order])
    state = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(pieces), axis=1)
    for place in range(int(lengths[0]) if len(lengths) else 0):
        count = int(np.searchsorted(-lengths, -place, side="left"))
        column = np.frombuffer(bytes(pieces[i][place] for i in order[:count]), dtype=np.uint8)
        state[:, :count] = delta[state[:, :count], column[None, :]]
    table = np.empty_like(state)
    table[:, order] = state
    return table


def token_pieces(tokenizer: Any, vocab_size: int) -> list[bytes] | None:
    """Byte string of each token id below `vocab_size`, or None where decoding is not a concatenation of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"))
    names = {i: t for t, i in tokenizer.get_vocab().items() if 0 <= i < vocab_size}
    added = {i for i in tokenizer.added_tokens_decoder if i < vocab_size}
    if '"ByteLevel"' in decoder:
        pieces = _byte_level_pieces(names, added)
    else:
        pieces = _difference_pieces(backend, names, "ByteFallback" in decoder)
    if pieces is None:
        return None
    whole = [pieces.get(i, b"") for i in range(vocab_size)]
    return whole if _pieces_hold(tokenizer, whole, sorted(names)) else None


def _byte_level_pieces(names: dict[int, str], added: set[int]) -> dict[int, bytes] | None:
    # Byte-level BPE writes bytes as printable characters (Radford et al. 2019): printable Latin-1 as itself, the rest
    # from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(b): b for b in printable}
    byte_of.update({chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)})
    try:
        return {i: t.encode() if i in added else bytes(byte_of[c] for c in t) for i, t in names.items()}
    except KeyError:
        return None


def _difference_pieces(backend: Any, names: dict[int, str], byte_fallback: bool) -> dict[int, bytes] | None:
    # What a token adds after an anchor: decoders may treat the first token of a text differently.
    # A token of plain text, so that the decoder has something to put the next token after.
    anchor = next((i for i, t in sorted(names.items()) if t.isalnum()), min(names, default=0))
    ids = list(names)
    before = backend.decode([anchor], skip_special_tokens=False)
    pieces = {}
    for i, text in zip(ids, backend.decode_batch([[anchor, i] for i in ids], skip_special_tokens=False), strict=True):
        as_byte = re.fullmatch(r"<0x([0-9A-F]{2})>", names[i]) if byte_fallback else None
        if as_byte:
            pieces[i] = bytes([int(as_byte[1], 16)])
        elif text.startswith(before):
            pieces[i] = text[len(before) :].encode()
        else:
            return None
    return pieces


def _pieces_hold(tokenizer: Any, pieces: list[bytes], ids: list[int]) -> bool:
    """Whether joined pieces equal the tokenizer's own decoding, of encoded probe texts and of arbitrary ids."""
    whole = [i for i in ids if pieces[i] and b"\xef\xbf\xbd" not in pieces[i] and _is_text(pieces[i])]
    if not whole:
        return False
    # About 500 tokens, spread over the vocabulary, in an order that repeats no neighbours.
    step = max(1, len(whole) // 499)
    spread = whole[::step]
    rows = [tokenizer.encode(p, add_special_tokens=False) for p in _PROBES]
    rows += [[spread[(k * (7 + 2 * r) + r) % len(spread)] for k in range(40)] for r in range(16)]
    rows = [[whole[0], *r] for r in rows]
    for row, text in zip(rows, decode_rows(tokenizer, rows), strict=True):
        start = decode_rows(tokenizer, [row[:1]])[0]
        joined = start + b"".join(pieces[i] for i in row[1:]).decode(errors="replace")
        if re.sub("�+", "�", joined) != re.sub("�+", "�", text):
            return False
    return True


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def token_texts(tokenizer: Any, tokens: Jagged) -> list[list[str]]:
    """Each row as one string per token; every distinct token is decoded once."""
    ids, place = torch.unique(tokens.values, return_inverse=True)
    texts = decode_rows(tokenizer, ids[:, None].tolist())
    return [[texts[i] for i in row] for row in tokens.with_values(place).to_lists()]


# Where a thought ends in a response that was sampled as a whole: white space after it belongs to it.
_ENDS = {
    "line": re.compile(r"\S[^\S\n]*\n\s*"),
    "sentence": re.compile(r"""[.!?]["')\]*]*\s+|[。！？]\s*|\S[^\S\n]*\n\s*"""),
}


def ends_of_thoughts(pieces: Sequence[str], split: str) -> list[int]:
    """Exclusive token ends of the lines or sentences of a response given as one string per token; the last is its end.

    A token that ends a line and begins the next one belongs to the first. A line is never empty: further line breaks
    belong to the one before. A sentence ends with . ! or ? and white space, or with its line, so "3.5" is one word but
    "e.g. " ends a sentence.

    >>> ends_of_thoughts(["So", " 3.5", ".", " Then", "\\n\\n", "end"], "line")
    [5, 6]
    >>> ends_of_thoughts(["So", " 3.5", ".", " Then", "\\n\\n", "end"], "sentence")
    [4, 5, 6]
    """
    text = "".join(pieces)
    bounds = [0, *accumulate(len(piece) for piece in pieces)]
    ends = {bisect_left(bounds, match.end()) for match in _ENDS[split].finditer(text)}
    return sorted(ends | {len(pieces)}) if pieces else []


def ends_of_stop(pieces: Sequence[str], stop: str) -> list[int]:
    """Exclusive token ends of every occurrence of `stop` in a response given as one string per token.

    >>> ends_of_stop(["a", "</tho", "ught>", "b"], "</thought>")
    [3]
    """
    text = "".join(pieces)
    bounds = [0, *accumulate(len(piece) for piece in pieces)]
    ends = []
    place = text.find(stop)
    while place >= 0:
        place += len(stop)
        ends.append(bisect_left(bounds, place))
        place = text.find(stop, place)
    return ends
