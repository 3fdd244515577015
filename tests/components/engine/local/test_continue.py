"""Paused rows continue as if they had never been paused: engine.local, and rows of engines with one request each."""

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from components.engine.served.rows import Answer, BadAnswer
from pipeline.core.errors import CreditgraphError
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Progress, Requests, Sampling, ThoughtLimits
from pipeline.core.streams import counter_seed


def load_rows_tests():
    spec = importlib.util.spec_from_file_location(
        "engine_rows_tests", Path(__file__).parents[1] / "served" / "test_rows.py"
    )
    module = sys.modules.setdefault("engine_rows_tests", importlib.util.module_from_spec(spec))
    if not hasattr(module, "drive"):
        spec.loader.exec_module(module)
    return module


rows_tests = load_rows_tests()
drive, random_requests, Replay, rows_of = (
    getattr(rows_tests, n) for n in ("drive", "random_requests", "Replay", "rows_of")
)


def in_parts(requests, generate, generator):
    """Samples with pauses at random places; tokens, log-probs, entropies and ends of whole rows, and why they ended."""
    count = len(requests.seed)
    tokens, logprobs, entropies, ends = ([[] for _ in range(count)] for _ in range(4))
    reasons, open_rows, calls = [""] * count, list(range(count)), 0
    while open_rows:
        index = torch.tensor(open_rows)
        part = dataclasses.replace(
            requests,
            tokens=requests.tokens.select(index),
            seed=requests.seed[index],
            max_tokens=None if requests.max_tokens is None else requests.max_tokens[index],
            max_thoughts=None if requests.max_thoughts is None else requests.max_thoughts[index],
            progress=Progress(
                tokens=Jagged.from_rows([tokens[i] for i in open_rows], torch.int32),
                thought_ends=Jagged.from_rows([ends[i] for i in open_rows], torch.int32),
            ),
            pause=torch.tensor([generator.randint(1, 9) for _ in open_rows]),
        )
        done, calls = generate(part, open_rows), calls + 1
        columns = (
            done.tokens.to_lists(),
            done.logprobs.to_lists(),
            done.entropies.to_lists(),
            done.thought_ends.to_lists(),
        )
        for i, more, lp, ent, all_ends, reason, pause in zip(
            open_rows, *columns, done.finish_reason, part.pause.tolist(), strict=True
        ):
            assert len(more) == pause if reason == "paused" else len(more) <= pause
            tokens[i], logprobs[i], entropies[i], ends[i] = (
                tokens[i] + more,
                logprobs[i] + lp,
                entropies[i] + ent,
                all_ends,
            )
            reasons[i] = "" if reason == "paused" else reason
        open_rows = [i for i in open_rows if not reasons[i]]
    return tokens, logprobs, entropies, ends, reasons, calls


def watch(rows, part, replay, places, generator):
    """Feeds whole asks in pieces of random size, until the row says that it has ended or is paused."""
    for ask in rows.start(whole=True):
        done = len(part.progress.tokens.row(ask.row))
        own = [x[places[ask.row]][done:] for x in (replay.tokens, replay.logprobs, replay.entropies)]
        size = min(ask.max_tokens, len(own[0]) + generator.randint(0, 5))
        tokens, logprobs, entropies = (
            x + [filler] * (size - len(x)) for x, filler in zip(own, (5, -1.0, 1.0), strict=True)
        )
        place, ended = 0, False
        while not ended:
            end = min(size, place + generator.randint(0, 4))
            piece = Answer(
                tokens=tokens[place:end], logprobs=logprobs[place:end], entropies=entropies[place:end], reason="length"
            )
            ended, place = rows.feed(ask.row, piece, last=end == size), end
    return rows.completions()


@pytest.mark.parametrize("tokenizer", ["word", "byte", "metaspace"])
def test_pauses_change_no_token_and_no_thought(tokenizer, start):
    generator = random.Random(11)
    policy, _ = start("qwen2", tokenizer, max_context=48)
    reasons, most = set(), 0
    for n in range(30):
        requests = random_requests(generator, tokenizer)
        replay = Replay(policy, requests, generator)
        wanted = replay.done

        def local(part, _):
            return policy.generate(part)

        def by_asks(part, rows, replay=replay):
            return drive(
                rows_of(policy, part), lambda ask: replay(dataclasses.replace(ask, row=rows[ask.row])), generator
            )

        def watched(part, rows, replay=replay):
            return watch(rows_of(policy, part), part, replay, rows, generator)

        for generate in (local, by_asks, watched):
            tokens, logprobs, entropies, ends, found, calls = in_parts(requests, generate, generator)
            assert tokens == wanted.tokens.to_lists(), n
            assert ends == wanted.thought_ends.to_lists(), n
            assert found == wanted.finish_reason, n
            # A prefill in place of single steps adds in another order.
            flat = [torch.tensor([x for row in rows for x in row]) for rows in (logprobs, entropies)]
            torch.testing.assert_close(flat[0], wanted.logprobs.values, atol=2e-5, rtol=1e-4, check_dtype=False)
            torch.testing.assert_close(flat[1], wanted.entropies.values, atol=2e-5, rtol=1e-4, check_dtype=False)
        reasons, most = reasons | set(found), max(most, calls)
    assert {"stop", "length", "thoughts", "final"} <= reasons
    assert most > 3


def test_a_paused_ask_covers_the_pause_and_its_seed_the_place(start):
    policy, _ = start()
    sampling = Sampling(max_tokens=20, thoughts=ThoughtLimits(stop="}", max_tokens=6, max_thoughts=9))
    part = Requests(
        tokens=Jagged.from_rows([[5, 6]], torch.int32),
        seed=torch.tensor([4]),
        sampling=sampling,
        progress=Progress(
            tokens=Jagged.from_rows([[7, 8, 9]], torch.int32), thought_ends=Jagged.from_rows([[2]], torch.int32)
        ),
        pause=torch.tensor([4]),
    )
    rows = rows_of(policy, part)
    (ask,) = rows.start()
    assert (ask.tokens, ask.max_tokens, ask.seed) == ([5, 6, 7, 8, 9], 4, counter_seed(4, 3))
    assert rows.advance(0, Answer(tokens=[10] * 4, logprobs=[-1.0] * 4, entropies=None, reason="length")) is None
    done = rows.completions()
    assert (done.tokens.to_lists(), done.finish_reason, done.thought_ends.to_lists()) == ([[10] * 4], ["paused"], [[2]])
    rows = rows_of(policy, part)
    (ask,) = rows.start(whole=True)
    with pytest.raises(BadAnswer, match="ended by 'stop' after 4 tokens; wanted 7 or an end"):
        rows.feed(0, Answer(tokens=[10], logprobs=[-1.0], entropies=None, reason="stop"), last=True)


def test_a_row_that_has_spent_its_budget_gets_nothing_more(start):
    policy, _ = start()
    part = Requests(
        tokens=Jagged.from_rows([[5, 6], [5]], torch.int32),
        seed=torch.tensor([4, 5]),
        sampling=Sampling(max_tokens=3),
        progress=Progress(
            tokens=Jagged.from_rows([[7, 8, 9], []], torch.int32), thought_ends=Jagged.from_rows([[], []], torch.int32)
        ),
    )
    done = policy.generate(part)
    assert done.tokens.lengths[0] == 0
    assert done.finish_reason[0] == "length"
    assert int(done.tokens.lengths[1]) > 0
    assert drive(
        rows_of(policy, part),
        lambda ask: Answer(tokens=[7] * 3, logprobs=[-1.0] * 3, entropies=None, reason="length"),
        random.Random(0),
    ).tokens.to_lists() == [
        [],
        [7] * 3,
    ]


def test_a_pause_of_no_tokens_is_refused(start):
    policy, _ = start()
    part = Requests(
        tokens=Jagged.from_rows([[5]], torch.int32),
        seed=torch.tensor([1]),
        sampling=Sampling(),
        pause=torch.tensor([0]),
    )
    with pytest.raises(CreditgraphError, match="pause of 0 tokens; wanted at least 1"):
        policy.generate(part)
