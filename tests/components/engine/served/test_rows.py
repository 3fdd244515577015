"""Rows against engine.local: the same tokens, cut and labelled by other code, must give the same completions."""

import dataclasses
import itertools
import math
import random

import pytest
import torch

from components.engine.served.rows import Answer, BadAnswer, Rows
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Requests, Sampling, ThoughtLimits
from pipeline.core.streams import counter_seed


class Replay:
    """An engine that samples what engine.local sampled. It may overrun a stop string, end early, or abort."""

    def __init__(self, policy, requests, generator):
        self.done, self.generator = policy.generate(requests), generator
        self.tokens, self.prompts = self.done.tokens.to_lists(), requests.tokens.to_lists()
        self.logprobs, self.entropies = self.done.logprobs.to_lists(), self.done.entropies.to_lists()
        self.asked = []

    def __call__(self, ask):
        self.asked.append(ask)
        start = len(ask.tokens) - len(self.prompts[ask.row])
        assert ask.tokens == self.prompts[ask.row] + self.tokens[ask.row][:start]
        if self.generator.random() < 0.1:
            return Answer(tokens=[], logprobs=[], entropies=None, reason="abort")
        count = min(len(self.tokens[ask.row]) - start, ask.max_tokens)
        early = self.generator.random() < 0.2
        if early:
            count = self.generator.randint(1, count)
        window = slice(start, start + count)
        overrun = (
            0 if early else self.generator.randint(0, ask.max_tokens - count) if self.generator.random() < 0.5 else 0
        )
        return Answer(
            tokens=self.tokens[ask.row][window] + [5] * overrun,
            logprobs=self.logprobs[ask.row][window] + [-1.0] * overrun,
            entropies=self.entropies[ask.row][window] + [1.0] * overrun,
            reason="length" if count + overrun == ask.max_tokens else "stop",
        )


def rows_of(policy, requests, version=None):
    engine = policy.engine
    return Rows(requests, policy._limits(requests), engine.text, engine.tokenizer, engine.vocab_size, version)


def drive(rows, engine, generator):
    """Answers open asks in random order."""
    waiting = rows.start()
    while waiting:
        ask = waiting.pop(generator.randrange(len(waiting)))
        following = rows.advance(ask.row, engine(ask))
        if following is not None:
            waiting.append(following)
    return rows.completions()


def watch(rows, replay, generator):
    """Feeds whole asks in parts of random size, until the row says that it has ended; some are cut off, or not trusted at their end."""
    for ask in rows.start(whole=True):
        assert ask.stop == ()
        own = [x[ask.row] for x in (replay.tokens, replay.logprobs, replay.entropies)]
        size = min(ask.max_tokens, len(own[0]) + generator.randint(0, 5))
        tokens, logprobs, entropies = (
            x + [filler] * (size - len(x)) for x, filler in zip(own, (5, -1.0, 1.0), strict=True)
        )
        place, ended = 0, False
        while not ended:
            if generator.random() < 0.1:
                if generator.random() < 0.5:
                    rows.again(ask.row)
                else:
                    assert not rows.feed(
                        ask.row, Answer(tokens=[], logprobs=[], entropies=None, reason="abort"), last=True
                    )
                place = 0
            end = min(size, place + generator.randint(0, 4))
            part = Answer(
                tokens=tokens[place:end], logprobs=logprobs[place:end], entropies=entropies[place:end], reason="length"
            )
            ended, place = rows.feed(ask.row, part, last=end == size), end
            if ended and generator.random() < 0.1:
                rows.again(ask.row)
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


@pytest.mark.parametrize("tokenizer", ["word", "byte", "metaspace"])
def test_completions_equal_those_of_engine_local(tokenizer, start):
    generator = random.Random(7)
    policy, _ = start("qwen2", tokenizer, max_context=48)
    reasons = set()
    for _ in range(60):
        requests = random_requests(generator, tokenizer)
        replay = Replay(policy, requests, generator)
        wanted = replay.done
        asked, watched = (
            drive(rows_of(policy, requests), replay, generator),
            watch(rows_of(policy, requests), replay, generator),
        )
        for got, field in itertools.product((asked, watched), dataclasses.fields(wanted)):
            a, b = getattr(got, field.name), getattr(wanted, field.name)
            assert a.equal(b) if isinstance(a, Jagged) else a == b, (field.name, requests)
        reasons |= set(got.finish_reason)
    assert {"stop", "length", "thoughts", "final"} <= reasons
    assert tokenizer != "word" or "eos" in reasons


def test_a_tokenizer_without_pieces_gives_the_same(start, monkeypatch):
    generator = random.Random(3)
    policy, _ = start("qwen2", "word")
    for _ in range(10):
        requests = random_requests(generator, "word")
        replay = Replay(policy, requests, generator)
        monkeypatch.setattr(policy.engine.text, "pieces", None)
        got = drive(rows_of(policy, requests), replay, generator)
        monkeypatch.undo()
        assert got.thought_ends.equal(replay.done.thought_ends)
        assert got.finish_reason == replay.done.finish_reason
        assert got.tokens.equal(replay.done.tokens)


def requests(prompts=((5, 6),), **sampling):
    return Requests(
        tokens=Jagged.from_rows([list(p) for p in prompts], torch.int32),
        seed=torch.arange(len(prompts)),
        sampling=Sampling(**sampling),
    )


def good(count, token=7, **changes):
    return Answer(
        **({"tokens": [token] * count, "logprobs": [-1.0] * count, "entropies": None, "reason": "length"} | changes)
    )


def test_asks_carry_limits_groups_and_keyed_seeds(start):
    policy, _ = start()
    thoughts = ThoughtLimits(stop="}", max_tokens=4, max_thoughts=9)
    rows = rows_of(
        policy, requests([(5, 6), (8,), (5, 6)], temperature=0.5, top_p=0.9, top_k=3, max_tokens=6, thoughts=thoughts)
    )
    first = rows.start()
    assert [(a.row, a.group, a.tokens, a.max_tokens) for a in first] == [
        (0, 0, [5, 6], 4),
        (1, 1, [8], 4),
        (2, 0, [5, 6], 4),
    ]
    assert rows.prompt_tokens == 3
    assert {(a.stop, a.temperature, a.top_p, a.top_k) for a in first} == {(("}",), 0.5, 0.9, 3)}
    following = rows.advance(2, good(4))
    assert following.tokens == [5, 6, 7, 7, 7, 7]
    assert following.max_tokens == 2  # of 6, 4 are taken
    assert following.seed == counter_seed(2, 4)
    assert first[2].seed == counter_seed(2, 0)
    assert len({a.seed for a in [*first, following]}) == 4
    assert [a.row for a in rows.open] == [0, 1, 2]
    assert rows.advance(2, good(2)) is None
    with pytest.raises(CreditgraphError, match=r"2 of 3 rows have not ended; wanted an answer to every ask"):
        rows.completions()
    with pytest.raises(CreditgraphError, match=r"row 2: an answer without an open ask; wanted one answer per ask"):
        rows.advance(2, good(2))


def test_missing_entropies_are_nan(start):
    rows = rows_of(start()[0], requests(max_tokens=2))
    rows.start()
    assert rows.advance(0, good(2)) is None
    assert all(math.isnan(e) for e in rows.completions().entropies.values.tolist())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (good(0, reason="stop"), r"row 0: 0 tokens, ended by 'stop'; wanted 1 to 3"),
        (good(4), r"row 0: 4 tokens, ended by 'length'; wanted 1 to 3"),
        (good(2), r"row 0: 2 tokens, ended by 'length'; wanted 1 to 3, all of them for 'length'"),
        (good(3, logprobs=[-1.0]), r"row 0: 3 tokens with 1 log-probs; wanted one per token"),
        (good(3, entropies=[1.0]), r"row 0: 3 tokens with 3 log-probs and 1 entropies; wanted one per token"),
        (good(3, tokens=[7, 999, 7]), r"row 0: token id 999; wanted 0 to \d+"),
        (good(3, tokens=[7, -1, 7]), r"row 0: token id -1; wanted 0 to \d+"),
        (
            good(3, logprobs=[-1.0, math.nan, -1.0]),
            r"row 0: a log-prob that is not finite; wanted finite logits. The weights have likely",
        ),
        (good(3, logprobs=[-1.0, 0.5, -1.0]), r"row 0: a log-prob of 0.5; wanted at most 0"),
        (good(2, reason="eos"), r"row 0: ended by 'eos' without an end-of-text token"),
        (good(3, version=4), r"row 0: sampled by weights version 4; wanted version 3"),
    ],
)
def test_a_bad_answer_is_refused_and_the_ask_stays_open(answer, sentence, start):
    rows = rows_of(start()[0], requests(max_tokens=3), version=3)
    (ask,) = rows.start()
    with pytest.raises(BadAnswer, match=sentence):
        rows.advance(0, answer)
    assert rows.open == [ask]
    assert rows.advance(0, good(3, version=3)) is None
    assert rows.completions().tokens.to_lists() == [[7, 7, 7]]


def test_a_whole_row_that_ends_too_early_is_refused(start):
    rows = rows_of(start()[0], requests(max_tokens=3))
    rows.start(whole=True)
    assert not rows.feed(0, good(1), last=False)
    with pytest.raises(BadAnswer, match=r"row 0: 1 tokens with 0 log-probs; wanted one per token"):
        rows.feed(0, good(1, logprobs=[]), last=False)
    with pytest.raises(BadAnswer, match=r"row 0: ended by 'length' after 2 tokens; wanted 3 or an end"):
        rows.feed(0, good(1), last=True)


def test_an_aborted_ask_is_made_again(start):
    rows = rows_of(start()[0], requests(max_tokens=3))
    (ask,) = rows.start()
    assert rows.advance(0, good(1, reason="abort", logprobs=[])) == ask
