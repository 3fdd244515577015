"""Stop strings: automaton, token table, real tokenizers of three kinds, and the decoding fallback."""

import random

import numpy as np
import pytest
import torch
from slow_generation import slow_generation

from creditgraph.components.text.stops import (
    DecodeMatcher,
    TableMatcher,
    TokenText,
    byte_automaton,
    decode_rows,
    token_table,
)
from creditgraph.pipeline.core.handles import Sampling


def follow(delta, text):
    state = 0
    for byte in text.encode():
        state = int(delta[state, byte])
    return state == len(delta) - 1


@pytest.mark.parametrize("strings", [["aab"], ["abab", "ba"], ["a", "aa"], ["bab", "abb", "é"], ["aabaab"]])
def test_automaton_finds_what_in_finds(strings):
    delta, draw = byte_automaton(strings), random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("aabbé") for _ in range(draw.randint(0, 9)))
        assert follow(delta, text) == any(s in text for s in strings)


def test_token_table_equals_the_automaton_byte_by_byte():
    delta, pieces = byte_automaton(["ab}", "b\n"]), [b"", b"a", b"ab", b"b", b"}x", b"\n", b"ab}ab", b"xxxxxxxx"]
    table = token_table(delta, pieces)
    for state in range(len(delta)):
        for token, piece in enumerate(pieces):
            expected = state
            for byte in piece:
                expected = int(delta[expected, byte])
            assert table[state, token] == expected


@pytest.mark.parametrize("kind", ["word", "byte", "metaspace"])
def test_pieces_join_to_the_decoded_text(kind, tokenizers):
    tokenizer = tokenizers[kind]
    pieces = TokenText(tokenizer, len(tokenizer)).pieces
    assert pieces is not None
    probe = "x = 7 a / b \\boxed{ }" if kind == "word" else "ab x=7 </thought> \\boxed{7} é 漢字 🙂"
    ids = tokenizer.encode("a " + probe, add_special_tokens=False)
    joined = decode_rows(tokenizer, [ids[:1]])[0].encode() + b"".join(pieces[i] for i in ids[1:])
    assert joined.decode() == decode_rows(tokenizer, [ids])[0]


@pytest.mark.parametrize("kind", ["byte", "metaspace"])
@pytest.mark.parametrize("strings", [("</thought>",), ("boxed{7", "漢"), ("🙂 ",)])
def test_matchers_agree_on_strings_across_tokens(kind, strings, tokenizers):
    tokenizer = tokenizers[kind]
    text = TokenText(tokenizer, len(tokenizer))
    texts = ["ab </thought> x", "a \\boxed{7} b", "漢字", "x 🙂 y", "</thoug ht>"]
    rows = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    width = max(map(len, rows))
    fast, slow = text.matcher(strings, len(rows), "cpu"), DecodeMatcher(tokenizer, strings, len(rows))
    assert isinstance(fast, TableMatcher)
    filler = tokenizer.encode("a", add_special_tokens=False)[-1]
    for t in range(width):
        tokens = torch.tensor([row[t] if t < len(row) else filler for row in rows])
        seen, decoded = fast.advance(tokens), slow.advance(tokens)
    assert torch.equal(seen, decoded)
    assert seen.tolist() == [any(s in t for s in strings) for t in texts]
    assert 0 < int(seen.sum()) < len(rows)


def test_reset_and_keep():
    table = torch.from_numpy(token_table(byte_automaton(["ab"]), [b"a", b"b"]))
    matcher = TableMatcher(table, 3)
    matcher.advance(torch.tensor([0, 0, 1]))
    matcher.reset(torch.tensor([True, False, False]))
    assert matcher.advance(torch.tensor([1, 1, 1])).tolist() == [False, True, False]
    matcher.keep(torch.tensor([2, 1]))
    assert matcher.advance(torch.tensor([0, 0])).tolist() == [False, True]


def test_stop_string_across_byte_tokens_is_kept_and_ends_the_row(start, ask):
    policy, model = start("qwen2", "byte", extra=5)
    assert policy.engine.text.pieces is not None
    sampling = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 60, "stop": ("t", "e ")}
    rows = [policy.tokenizer.encode("Step 1: we know", add_special_tokens=False)] * 12
    done = ask(policy, rows, list(range(12)), **sampling)
    forbidden = range(len(policy.tokenizer), len(policy.tokenizer) + 5)
    for i in range(12):
        tokens, _, _, _, reason = slow_generation(
            model, policy.tokenizer, rows[i], i, Sampling(**sampling), {1}, 96, forbidden
        )
        assert (done.tokens.row(i).tolist(), done.finish_reason[i]) == (tokens, reason)
    assert "stop" in done.finish_reason
    assert int(done.tokens.values.max()) < len(policy.tokenizer)


def test_tokenizer_that_does_not_concatenate_falls_back_to_decoding(start, ask, monkeypatch):
    from tokenizers import decoders

    policy, model = start()
    policy.tokenizer.backend_tokenizer.decoder = decoders.CTC(
        pad_token="<pad>", cleanup=False
    )  # merges repeated tokens
    policy.engine.text = TokenText(policy.tokenizer, policy.engine.decoder.vocab_size)
    assert policy.engine.text.pieces is None
    sampling = {"max_tokens": 30, "stop": ("ab", "7")}
    rows = [[5, 6, 20]] * 8
    done = ask(policy, rows, list(range(8)), **sampling)
    for i in range(8):
        tokens, _, _, _, reason = slow_generation(model, policy.tokenizer, rows[i], i, Sampling(**sampling), {1})
        assert (done.tokens.row(i).tolist(), done.finish_reason[i]) == (tokens, reason)
    assert "stop" in done.finish_reason


@pytest.mark.slow
def test_table_of_a_large_vocabulary_is_cheap():
    import time

    draw = np.random.default_rng(0)
    pieces = [bytes(draw.integers(32, 127, size=n, dtype=np.uint8)) for n in draw.integers(1, 12, size=150_000)]
    begin = time.perf_counter()
    token_table(byte_automaton(["</thought>"]), pieces)
    assert time.perf_counter() - begin < 5
