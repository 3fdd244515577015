"""Paused rows continue as if they had never been paused: engine.local, and rows of engines with one request each."""

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch

from creditgraph.components.engine.messages import BadResponse, RowResponse
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.handles import Progress, Requests, Sampling, ThoughtLimits
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.streams import counter_seed


def load_rows_tests():
    spec = importlib.util.spec_from_file_location("engine_rows_tests", Path(__file__).parents[1] / "test_rows.py")
    module = sys.modules.setdefault("engine_rows_tests", importlib.util.module_from_spec(spec))
    if not hasattr(module, "Replay"):
        spec.loader.exec_module(module)
    return module


rows_tests = load_rows_tests()
random_requests, Replay, rows_of = (getattr(rows_tests, n) for n in ("random_requests", "Replay", "rows_of"))


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


def feed_all(rows, part, replay, places, generator):
    """Feeds rows in pieces of random size, until they have ended or are paused."""
    for request in rows.start():
        done = len(part.progress.tokens.row(request.row))
        own = [x[places[request.row]][done:] for x in (replay.tokens, replay.logprobs, replay.entropies)]
        size = min(request.max_tokens, len(own[0]) + generator.randint(0, 5))
        tokens, logprobs, entropies = (
            x + [filler] * (size - len(x)) for x, filler in zip(own, (5, -1.0, 1.0), strict=True)
        )
        place, ended = 0, False
        while not ended:
            end = min(size, place + generator.randint(0, 4))
            piece = RowResponse(
                tokens=tokens[place:end], logprobs=logprobs[place:end], entropies=entropies[place:end], reason="length"
            )
            ended, place = rows.feed(request.row, piece, last=end == size), end
    return rows.completions()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["word", "byte", "metaspace"])
def test_pauses_change_no_token_and_no_thought(tokenizer, start):
    generator = random.Random(11)
    policy, _ = start("qwen2", tokenizer, max_context=48)
    reasons, most = set(), 0
    for n in range(30):
        requests = random_requests(generator, tokenizer)
        replay = Replay(policy, requests)
        expected = replay.done

        def local(part, _):
            return policy.generate(part)

        def fed(part, rows, replay=replay):
            return feed_all(rows_of(policy, part), part, replay, rows, generator)

        for generate in (local, fed):
            tokens, logprobs, entropies, ends, actual, calls = in_parts(requests, generate, generator)
            assert tokens == expected.tokens.to_lists(), n
            assert ends == expected.thought_ends.to_lists(), n
            assert actual == expected.finish_reason, n
            # A prefill in place of single steps adds in another order.
            flat = [torch.tensor([x for row in rows for x in row]) for rows in (logprobs, entropies)]
            torch.testing.assert_close(flat[0], expected.logprobs.values, atol=2e-5, rtol=1e-4, check_dtype=False)
            torch.testing.assert_close(flat[1], expected.entropies.values, atol=2e-5, rtol=1e-4, check_dtype=False)
        reasons, most = reasons | set(actual), max(most, calls)
    assert {"stop", "length", "thoughts", "final"} <= reasons
    assert most > 3


def test_a_paused_request_covers_the_pause_and_its_seed_the_place(start):
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
    (request,) = rows.start()
    assert (request.tokens, request.max_tokens, request.seed) == ([5, 6, 7, 8, 9], 4, counter_seed(4, 3))
    with pytest.raises(BadResponse, match="expected 7 tokens, or fewer that end it, got 4 and reason 'stop'"):
        rows.feed(0, RowResponse(tokens=[10], logprobs=[-1.0], entropies=None, reason="stop"), last=True)
    rows.reset(0)
    assert rows.feed(0, RowResponse(tokens=[10] * 4, logprobs=[-1.0] * 4, entropies=None, reason="length"), last=True)
    done = rows.completions()
    assert (done.tokens.to_lists(), done.finish_reason, done.thought_ends.to_lists()) == ([[10] * 4], ["paused"], [[2]])


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
    rows = rows_of(policy, part)
    (request,) = rows.start()
    assert rows.feed(1, RowResponse(tokens=[7] * 3, logprobs=[-1.0] * 3, entropies=None, reason="length"), last=True)
    assert (request.row, rows.completions().tokens.to_lists()) == (1, [[], [7] * 3])


def test_a_pause_of_no_tokens_is_refused(start):
    policy, _ = start()
    part = Requests(
        tokens=Jagged.from_rows([[5]], torch.int32),
        seed=torch.tensor([1]),
        sampling=Sampling(),
        pause=torch.tensor([0]),
    )
    with pytest.raises(CreditgraphError, match="expected a pause after at least 1 token, got 0"):
        policy.generate(part)
