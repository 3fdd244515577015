"""A language model small enough to enumerate: one token is one character, probabilities from a keyed table."""

import math

import pytest
import torch

from creditgraph.pipeline.core.handles import Policy, Scores
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import key_of


class OffsetTokenizer:
    """Token id = code point, with offsets as fast tokenizers give them."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}

    def batch_decode(self, rows, **_):
        return ["".join(chr(i) for i in row) for row in rows]


class TablePolicy(Policy):
    """Next-character probabilities over `alphabet`, a fixed random function of everything before."""

    def __init__(self, alphabet="ab"):
        self.alphabet, self.version, self.tokenizer, self.scored = alphabet, 0, OffsetTokenizer(), 0

    def next(self, context):
        weights = [1 + key_of(context, c) % 7 for c in self.alphabet]
        return {c: w / sum(weights) for c, w in zip(self.alphabet, weights, strict=True)}

    def probability(self, context, text):
        out = 1.0
        for i, c in enumerate(text):
            out *= self.next(context + text[:i])[c]
        return out

    def generate(self, requests):
        raise NotImplementedError

    def score(self, context, tokens, temperature=1.0):
        rows = []
        for before, after in zip(context.to_lists(), tokens.to_lists(), strict=True):
            text = "".join(map(chr, before))
            rows.append([])
            for c in map(chr, after):
                rows[-1].append(math.log(self.next(text)[c]))
                text += c
            self.scored += 1
        logprobs = Jagged.from_rows(rows, torch.float64)
        return Scores(logprobs=logprobs, entropies=logprobs)


@pytest.fixture
def table():
    return TablePolicy
