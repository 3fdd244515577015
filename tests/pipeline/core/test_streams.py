"""Random streams: addressed by key and uid, never by order or batch cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.core.streams import Stream, counter_seed, counter_uniform, key_of, mix64

UIDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)


def test_splitmix_reference_values() -> None:
    # The published generator from seed 1234567 (Vigna's splitmix64.c): output i is mix64(seed + (i + 1)·golden).
    golden = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * golden) % 2**64 for i in (1, 2, 3)], dtype=np.uint64)
    with np.errstate(over="ignore"):
        assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_counter_uniform_is_the_same_generator() -> None:
    seed = np.array([1234567], dtype=np.uint64)
    assert counter_uniform(seed, 0)[0] == (6457827717110365317 >> 11) / 2**53
    assert counter_uniform(seed, 1)[0] == (3203168211198807973 >> 11) / 2**53
    rows = counter_uniform(np.repeat(seed, 3), np.arange(3, dtype=np.uint64))
    assert rows.tolist() == [counter_uniform(seed, i)[0] for i in range(3)]


@settings(max_examples=40, deadline=None)
@given(UIDS, st.integers(0, 20))
def test_a_batch_cut_changes_nothing(uids: list[int], cut: int) -> None:
    stream, uid = Stream(0, "sampler", 3), torch.tensor(uids)
    whole = stream.uniform(uid)
    assert torch.equal(torch.cat([stream.uniform(uid[:cut]), stream.uniform(uid[cut:])]), whole)
    assert torch.equal(stream.uniform(uid.flip(0)), whole.flip(0))
    assert torch.equal(stream.seeds(uid), Stream(0, "sampler", 3).seeds(uid))
    assert bool((whole >= 0).all() and (whole < 1).all() and (stream.seeds(uid) >= 0).all())


def test_every_part_of_the_key_matters() -> None:
    uid = torch.arange(1000)
    base = Stream(0, "sampler", 3).uniform(uid)
    others = [
        Stream(1, "sampler", 3).uniform(uid),
        Stream(0, "expander", 3).uniform(uid),
        Stream(0, "sampler", 4).uniform(uid),
        Stream(0, "sampler", 3).uniform(uid, draw=1),
        Stream(0, "sampler", 3).uniform(uid, draw="cut"),
        Stream(0, "sampler", 3).uniform(uid + 1),
    ]
    for other in others:
        assert not torch.equal(base, other)
        # 1000 pairs of independent draws correlate by 0 ± 0.03
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.13


def test_uniform_is_flat() -> None:
    draws = Stream(7, "n", 0).uniform(torch.arange(20_000))
    counts = torch.histc(draws, bins=20, min=0, max=1)
    # chi² with 19 degrees of freedom is above 50 once in ten thousand keys
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50


def test_tokens_of_a_row_are_independent() -> None:
    seeds = Stream(0, "engine", 0).seeds(torch.arange(2000)).numpy().astype(np.uint64)
    first, second = counter_uniform(seeds, 0), counter_uniform(seeds, 1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.09


@settings(max_examples=40, deadline=None)
@given(UIDS, st.integers(-5, 5), st.integers(1, 9))
def test_integers_stay_in_their_bounds(uids: list[int], low: int, span: int) -> None:
    drawn = Stream(0, "n", 0).integers(torch.tensor(uids), low, low + span)
    assert drawn.dtype == torch.int64
    assert bool((drawn >= low).all() and (drawn < low + span).all())


def test_integers_take_bounds_per_row_and_reach_all() -> None:
    uid = torch.arange(3000)
    high = torch.tensor([1, 2, 3]).repeat(1000)
    drawn = Stream(0, "n", 0).integers(uid, 0, high)
    assert [sorted(set(drawn[i::3].tolist())) for i in range(3)] == [[0], [0, 1], [0, 1, 2]]


def test_generator_is_keyed() -> None:
    a, b = Stream(0, "n", 1).generator(), Stream(0, "n", 1).generator()
    assert a.permutation(50).tolist() == b.permutation(50).tolist()
    assert a.permutation(50).tolist() != Stream(0, "n", 1).generator(draw=1).permutation(50).tolist()


def test_keys_are_stable_and_tell_types_apart() -> None:
    # A changed number here would change every recorded run.
    assert key_of(0, "sampler", 3) == 13853108088383943781
    assert len({key_of(1, 2), key_of("1", 2), key_of(12), key_of("1", "2"), key_of("12"), key_of(2, 1)}) == 6


def test_context_stream_and_uids() -> None:
    context = Context(node="sampler", node_index=5, seed=9, iteration=2)
    uid = torch.tensor([4])
    assert torch.equal(context.rng().uniform(uid), Stream(9, "sampler", 2).uniform(uid))
    first, second = context.uids(2), context.uids(1)
    base = (2 << 39) | (5 << 32)
    assert first.tolist() == [base, base + 1]
    assert second.tolist() == [base + 2]
    context.iteration = 3
    assert context.uids(1).tolist() == [(3 << 39) | (5 << 32)]
    second = Context(node="sampler", node_index=5, iteration=2, ranks=Ranks(rank=1, world=2, num_replicas=2))
    assert second.uids(1).tolist() == [base + (1 << 22)]
    assert second.common_uids(1).tolist() == [base + 1]
    with pytest.raises(
        RunError,
        match=r"node 'sampler': 4194306 rows in iteration 2 of one replica; expected at most 4194304.*more replicas",
    ):
        second.uids(2**22)
    assert Context(node_index=127, iteration=2**24 - 1).uids(1).item() == pytest.approx(2**63 - 2**32, abs=0)


def test_counter_seed_follows_the_stream_and_fits_an_engine() -> None:
    for seed, counter in [(0, 0), (5, 1), (2**63 - 1, 700)]:
        result = counter_seed(seed, counter)
        assert 0 <= result < 2**63
        # The uniform is the upper 53 bits of the same number.
        assert (result >> 10) * 2.0**-53 == counter_uniform(np.array([seed], dtype=np.uint64), counter)[0]
