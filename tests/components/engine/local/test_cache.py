"""The key-value cache: what it holds after growing and losing rows, how much memory growing takes, and its size."""

import weakref

import pytest
import torch

from creditgraph.components.engine.local import engine
from creditgraph.components.engine.local.cache import ON_CPU, GroupCache, tokens_in_free_memory
from creditgraph.components.engine.local.decoder import TransformersDecoder
from creditgraph.components.engine.local.lean import LeanDecoder

LAYERS, HEADS, DIM = 5, 2, 4


def new_cache(room=512, rows=6):
    group = torch.arange(rows) // 2
    return GroupCache(torch.tensor([3, 2, 3]), group, room, LAYERS, HEADS, DIM, torch.zeros(1))


@pytest.mark.slow
def test_rows_keep_their_columns_while_the_cache_grows_and_rows_leave():
    g = torch.Generator().manual_seed(0)
    cache = new_cache()
    rows = [[[] for _ in range(LAYERS)] for _ in range(6)]  # row → layer → columns, the slow way
    for step in range(300):
        cache.append_column()
        for layer in range(LAYERS):
            keys, values = torch.randn(2, len(rows), HEADS, DIM, generator=g)
            all_keys, all_values = cache.write(layer, keys, values)
            for row, columns in enumerate(rows):
                columns[layer].append((keys[row], values[row]))
            expected = [torch.stack([pair[0] for pair in columns[layer]], -1) for columns in rows]
            assert torch.equal(all_keys.view(len(rows), HEADS, DIM, -1), torch.stack(expected))
            expected = [torch.stack([pair[1] for pair in columns[layer]], 1) for columns in rows]
            assert torch.equal(all_values.view(len(rows), HEADS, -1, DIM), torch.stack(expected))
        if step in (70, 140):  # the last row takes the place of the second
            index = [0, len(rows) - 1, *range(2, len(rows) - 1)]
            cache.keep(torch.tensor(index))
            rows = [rows[i] for i in index]


def test_growing_holds_one_layer_twice_and_no_more(monkeypatch):
    cache = new_cache(room=1024)
    live = []
    most = 0
    own = torch.Tensor.new_empty

    def counted(self, *size, **options):
        nonlocal most
        tensor = own(self, *size, **options)
        live.append(weakref.ref(tensor))
        most = max(most, sum(t.nbytes for t in (ref() for ref in live) if t is not None))
        return tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    for _ in range(1000):
        cache.append_column()
    whole = 2 * LAYERS * 6 * HEADS * DIM * 1024 * 4
    one_layer_before = whole / LAYERS / 2  # of half the columns
    assert whole < most <= whole + one_layer_before


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of which `free` bytes are free, of what this process has reserved 300 bytes unused."""
    sizes = {"free": 80_000, "device": None}

    def mem_get_info(device):
        sizes["device"] = device
        return sizes["free"], 10**6

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    return sizes


def test_tokens_are_those_that_free_memory_holds(gpu):
    device = torch.device("cuda", 3)
    assert tokens_in_free_memory(8, device) == int(0.8 * 80_300) // 8
    assert gpu["device"] == device
    gpu["free"] = -300 + 5
    assert tokens_in_free_memory(8, device) == 1  # one row always goes, whatever it takes
    assert tokens_in_free_memory(0, device) == tokens_in_free_memory(8, torch.device("cpu")) == ON_CPU


@pytest.mark.parametrize(("kind", "decoder"), [("qwen3", LeanDecoder), ("gemma2", TransformersDecoder), ("gpt2", None)])
def test_bytes_per_token_are_those_that_a_prefill_stores(kind, decoder, start):
    policy, model = start(kind)
    found = policy.engine.decoder
    assert decoder is None or isinstance(found, decoder)
    with torch.no_grad():
        out = model(input_ids=torch.arange(3, 9, device=model.device)[None], use_cache=True)
    stored = out.cache if hasattr(out, "cache") else out.past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in stored.layers)
    assert held == 6 * found.cached_bytes


def test_free_memory_cuts_the_waves_and_changes_no_token(start, prompts, ask, monkeypatch):
    rows, seeds = [p for p in prompts for _ in range(3)], list(range(18))
    policy, _ = start()
    whole = ask(policy, rows, seeds, max_tokens=30)
    waves = []
    prefill = type(policy.engine.decoder).prefill
    monkeypatch.setattr(
        type(policy.engine.decoder),
        "prefill",
        lambda self, p, group, room: waves.append(group) or prefill(self, p, group, room),
    )
    monkeypatch.setattr(engine, "tokens_in_free_memory", lambda *_: 100)
    cut = ask(policy, rows, seeds, max_tokens=30)
    assert len(waves) > 3
    assert cut.tokens.to_lists() == whole.tokens.to_lists()
