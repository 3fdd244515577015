"""Rows against engine.local: the same tokens, split and labelled by other code, must give the same completions."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from creditgraph.components.engine.messages import BadResponse, RowResponse, group_of
from creditgraph.components.engine.rows import Rows
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import counter_seed


class Replay:
    """Returns what engine.local sampled."""

    def __init__(self, policy, requests):
        self.done = policy.generate(requests)
        self.tokens = self.done.tokens.to_lists()
        self.logprobs = self.done.logprobs.to_lists()
        self.entropies = self.done.entropies.to_lists()


ABORTED = RowResponse(tokens=[], logprobs=[], entropies=None, reason="abort")


def rows_of(policy, requests):
    engine = policy.engine
    return Rows(requests, policy._limits(requests), engine.text, engine.tokenizer, engine.vocab_size)


def feed_all(rows, replay, generator):
    """Feeds rows in parts of random size until they end; some responses overrun, are aborted, or are dropped."""
    for request in rows.start():
        own = [x[request.row] for x in (replay.tokens, replay.logprobs, replay.entropies)]
        size = min(request.max_tokens, len(own[0]) + generator.randint(0, 5))
        tokens, logprobs, entropies = (
            x + [filler] * (size - len(x)) for x, filler in zip(own, (5, -1.0, 1.0), strict=True)
        )
        most = generator.choice([4, size])
        place, ended = 0, False
        while not ended:
            if generator.random() < 0.1:
                if generator.random() < 0.5:
                    rows.reset(request.row)
                else:
                    assert not rows.feed(request.row, ABORTED, last=True)
                place = 0
            end = min(size, place + generator.randint(0, most))
            part = RowResponse(
                tokens=tokens[place:end], logprobs=logprobs[place:end], entropies=entropies[place:end], reason="length"
            )
            ended, place = rows.feed(request.row, part, last=end == size), end
            if ended and generator.random() < 0.1:
                rows.reset(request.row)
                ended, place = False, 0
    return rows.completions()


def random_requests(generator, tokenizer):
    count = generator.randint(1, 12)
    prompts = [[generator.randrange(3, 34) for _ in range(generator.choice([1, 4, 9, 20]))] for _ in range(3)]
    strings = {
        "word": ["</thought>", "3", "} a", "\\boxed{"],
        "byte": ["</th", "é", "a", "st"],
        "metaspace": ["x", "ab", "<", "}7"],
    }
    stops = strings[tokenizer]
    thoughts = ThoughtLimits(
        stop=generator.choice(stops),
        final=generator.choice([*stops, "", "never"]),
        max_tokens=generator.choice([0, 1, 3, 7, 30]),
        max_thoughts=generator.choice([0, 1, 2, 5, 20]),
        ends_at_eos=generator.choice([True, False]),
    )
    sampling = Sampling(
        temperature=generator.choice([0.0, 0.7, 1.0, 3.0]),
        top_p=generator.choice([1.0, 0.8]),
        top_k=generator.choice([0, 9]),
        max_tokens=generator.choice([0, 1, 8, 40]),
        stop=tuple(generator.sample(stops, generator.randint(0, 3))),
        thoughts=generator.choice([None, thoughts, thoughts]),
    )
    each = [
        torch.tensor([generator.randint(0, 30) for _ in range(count)]),
        torch.tensor([generator.randint(0, 4) for _ in range(count)]),
    ]
    return Requests(
        tokens=Jagged.from_rows([generator.choice(prompts) for _ in range(count)], torch.int32),
        seed=torch.tensor([generator.getrandbits(63) for _ in range(count)]),
        sampling=sampling,
        max_tokens=generator.choice([None, each[0]]),
        max_thoughts=generator.choice([None, each[1]]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["word", "byte", "metaspace"])
def test_completions_equal_those_of_engine_local(tokenizer, start):
    generator = random.Random(7)
    policy, _ = start("qwen2", tokenizer, max_context=48)
    reasons = set()
    for _ in range(60):
        requests = random_requests(generator, tokenizer)
        replay = Replay(policy, requests)
        completions = feed_all(rows_of(policy, requests), replay, generator)
        for field in dataclasses.fields(completions):
            a, b = getattr(completions, field.name), getattr(replay.done, field.name)
            assert a.equal(b) if isinstance(a, Jagged) else a == b, (field.name, requests)
        reasons |= set(completions.finish_reason)
    assert {"stop", "length", "thoughts", "final"} <= reasons
    assert tokenizer != "word" or "eos" in reasons


def test_a_tokenizer_without_pieces_gives_the_same(start, monkeypatch):
    generator = random.Random(3)
    policy, _ = start("qwen2", "word")
    for _ in range(10):
        requests = random_requests(generator, "word")
        replay = Replay(policy, requests)
        monkeypatch.setattr(policy.engine.text, "pieces", None)
        completions = feed_all(rows_of(policy, requests), replay, generator)
        monkeypatch.undo()
        assert completions.thought_ends.equal(replay.done.thought_ends)
        assert completions.finish_reason == replay.done.finish_reason
        assert completions.tokens.equal(replay.done.tokens)


def requests(prompts=((5, 6),), **sampling):
    return Requests(
        tokens=Jagged.from_rows([list(p) for p in prompts], torch.int32),
        seed=torch.arange(len(prompts)),
        sampling=Sampling(**sampling),
    )


def good(count, token=7, **changes):
    fields = {"tokens": [token] * count, "logprobs": [-1.0] * count, "entropies": None, "reason": "length"}
    return RowResponse(**fields | changes)


def test_a_row_is_one_request_with_limits_group_and_keyed_seed(start):
    policy, _ = start()
    thoughts = ThoughtLimits(stop="}", max_tokens=4, max_thoughts=9)
    prompts = [(5, 6), (8,), (5, 6)]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "max_tokens": 6}
    rows = rows_of(policy, requests(prompts, **sampling, thoughts=thoughts))
    first = rows.start()
    assert [(r.row, r.group, r.tokens, r.max_tokens) for r in first] == [
        (0, group_of([5, 6]), [5, 6], 6),
        (1, group_of([8]), [8], 6),
        (2, group_of([5, 6]), [5, 6], 6),
    ]
    assert {(r.temperature, r.top_p, r.top_k, r.stream) for r in first} == {(0.5, 0.9, 3, True)}
    assert first[2].seed == counter_seed(2, 0)
    assert len({r.seed for r in first}) == 3
    assert rows.feed(2, good(6), last=True)
    with pytest.raises(CreditgraphError, match=r"a response to every request, got 2 of 3 rows that have not ended"):
        rows.completions()
    with pytest.raises(CreditgraphError, match=r"row 2: expected no response to a row that has ended"):
        rows.feed(2, good(2), last=True)
    assert [r.stream for r in rows_of(policy, requests(prompts, **sampling)).start()] == [False] * 3
    assert not first[0].ignore_eos
    onward = dataclasses.replace(thoughts, ends_at_eos=False)
    assert rows_of(policy, requests(prompts, **sampling, thoughts=onward)).start()[0].ignore_eos


def test_missing_entropies_are_nan(start):
    rows = rows_of(start()[0], requests(max_tokens=2))
    rows.start()
    assert rows.feed(0, good(2), last=True)
    assert all(math.isnan(e) for e in rows.completions().entropies.values.tolist())


@pytest.mark.parametrize(
    ("response", "sentence"),
    [
        (good(0, reason="stop"), r"row 0: expected 3 tokens, or fewer that end it, got 0 and reason 'stop'"),
        (good(2), r"row 0: expected 3 tokens, or fewer that end it, got 2 and reason 'length'"),
        (good(2, reason="eos"), r"row 0: expected 3 tokens, or fewer that end it, got 2 and reason 'eos'"),
        (good(3, logprobs=[-1.0]), r"row 0: expected one log-prob per token, got 1 for 3 tokens"),
        (good(3, entropies=[1.0]), r"row 0: expected one entropy per token, got 1 for 3 tokens"),
        (good(3, tokens=[7, 999, 7]), r"row 0: expected token ids from 0 to \d+, got 999"),
        (good(3, tokens=[7, -1, 7]), r"row 0: expected token ids from 0 to \d+, got -1"),
        (
            good(3, logprobs=[-1.0, math.nan, -1.0]),
            r"row 0: expected finite log-probs, got one that is not. The weights have likely diverged",
        ),
        (good(3, logprobs=[-1.0, 0.5, -1.0]), r"row 0: expected log-probs of at most 0, got 0.5"),
    ],
)
def test_a_bad_response_is_refused_and_the_row_can_be_requested_again(response, sentence, start):
    rows = rows_of(start()[0], requests(max_tokens=3))
    rows.start()
    with pytest.raises(BadResponse, match=sentence):
        rows.feed(0, response, last=True)
    rows.reset(0)
    assert rows.feed(0, good(3), last=True)
    assert rows.completions().tokens.to_lists() == [[7, 7, 7]]


def test_tokens_after_the_end_of_a_row_are_dropped(start):
    rows = rows_of(start()[0], requests(max_tokens=5))
    rows.start()
    assert rows.feed(0, dataclasses.replace(good(5), tokens=[7, 7, 1, 7, 7]), last=True)
    assert rows.completions().tokens.to_lists() == [[7, 7, 1]]


def test_more_tokens_than_requested_are_no_response(start):
    rows = rows_of(start()[0], requests(max_tokens=3))
    rows.start()
    assert not rows.feed(0, good(2), last=False)
    with pytest.raises(BadResponse, match="row 0: expected at most 3 tokens, got 5"):
        rows.feed(0, good(3), last=True)


def test_an_aborted_row_begins_again(start):
    rows = rows_of(start()[0], requests(max_tokens=3))
    rows.start()
    assert not rows.feed(0, good(2), last=False)
    assert not rows.feed(0, ABORTED, last=True)
    assert not rows.feed(0, good(1, token=9), last=False)
    assert rows.feed(0, good(2, token=9), last=True)
    assert rows.completions().tokens.to_lists() == [[9, 9, 9]]


def test_experts_come_with_the_last_part_even_after_the_row_has_ended(start):
    policy, _ = start()
    engine = policy.engine
    batch = requests([(5, 6), (7, 8, 9), (5,)], max_tokens=3)
    rows = Rows(batch, policy._limits(batch), engine.text, engine.tokenizer, engine.vocab_size, experts=True)
    rows.start()
    whole = np.arange(12, dtype=np.uint8).reshape(6, 2)
    assert rows.feed(0, good(3, routed_experts=whole[:4]), last=True)
    # A server that had sampled on says so when the request is ended.
    assert not rows.feed(1, good(2), last=False)
    assert rows.feed(1, good(1), last=False)
    assert rows.feed(1, good(0, reason="abort", routed_experts=whole), last=True)
    with pytest.raises(CreditgraphError, match="expected no response to a row that has ended"):
        rows.feed(1, good(1), last=True)
    assert rows.feed(2, good(3, routed_experts=whole[:2]), last=True)  # too few
    assert rows.completions().routed_experts.to_lists() == [list(range(8)), list(range(10)), []]
    rows.reset(0)
    assert rows.feed(0, good(3), last=True)  # another try has its own
    assert rows.completions().routed_experts.row(0).tolist() == []
