"""torch's flash attention by every signature it has had, computed here by a loop over rows."""

import pytest
import torch
from torch.nn import functional as F

from creditgraph.components.learner.packing import attention, flash
from creditgraph.components.learner.packing.attention import make_layout
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged


def rows_one_by_one(q, k, v, begin, key_begin, scale, window):
    out = []
    for i in range(len(begin) - 1):
        own, keys = (slice(int(x[i]), int(x[i + 1])) for x in (begin, key_begin))
        a, b, c = q[own].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        gap = torch.arange(a.shape[1])[:, None] - torch.arange(b.shape[1])[None] + b.shape[1] - a.shape[1]
        mask = (gap >= 0) & (gap <= window) if window >= 0 else gap >= 0
        out.append(F.scaled_dot_product_attention(a, b, c, mask, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(out)


# Signatures of torch's sources (torch/nn/attention/varlen.py of the wheels of 2.10.0, 2.11.0 and 2.12.0).
def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    return rows_one_by_one(query, key, value, cu_seq_q, cu_seq_k, None, -1)


def of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # fmt: skip
    assert window_size[1] == 0
    return rows_one_by_one(query, key, value, cu_seq_q, cu_seq_k, scale, window_size[0])


def of_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None
):  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@pytest.fixture
def parameters_read_again():
    flash.parameters.cache_clear()
    yield
    flash.parameters.cache_clear()


@pytest.mark.usefixtures("parameters_read_again")
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    ("varlen_attn", "window"),
    [(of_2_10, None), (of_2_11, None), (of_2_11, 3), (of_2_12, None), (of_2_12, 3)],  # torch 2.10 has no windows
    ids=lambda given: getattr(given, "__name__", str(given)),
)
@pytest.mark.parametrize("shared", [False, True])
def test_every_signature_gives_padded_attention(monkeypatch, shared, varlen_attn, window, key_heads, scaling):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    keys = Jagged.from_rows([[0, 1, 2, 3, 4], [0, 1, 5, 6], [7, 8]], torch.int64) if shared else None
    layout = make_layout(torch.tensor([5, 2, 2]), keys)
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(9, heads, 8, generator=g) for heads in (4, key_heads, key_heads)]
    results = []
    for attend in (attention._flash, attention._padded):
        q, k, v = (x.clone().requires_grad_() for x in given)
        out = attend(q, k, v, layout, scaling, window).reshape(9, -1)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "window", "capability", "text"),
    [
        (torch.bfloat16, 128, 4, (9, 0), ""),
        (torch.float32, 128, None, (9, 0), "the model's dtype is float32 (expected bfloat16)"),
        (torch.bfloat16, 257, None, (9, 0), "its heads have 257 numbers (expected a multiple of 8 up to 256)"),
        (torch.bfloat16, 36, None, (9, 0), "its heads have 36 numbers (expected a multiple of 8 up to 256)"),
        (torch.float16, 64, None, (7, 5), "the GPU has compute capability 7.5 (expected 8.0 or newer)"),
    ],
)
def test_what_stands_in_the_way_is_named(monkeypatch, dtype, head_dim, window, capability, text):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    flash.obstacle.cache_clear()
    assert flash.obstacle(torch.device("cuda:0"), dtype, head_dim, window) == text
    flash.obstacle.cache_clear()


def test_windows_need_torch_2_11(monkeypatch):
    monkeypatch.setattr(flash, "parameters", lambda: frozenset({"is_causal"}))
    flash.obstacle.cache_clear()
    reason = flash.obstacle(torch.device("cuda:0"), torch.bfloat16, 64, 4)
    assert reason.endswith("has no sliding windows there (expected 2.11 or newer)")


def test_a_slow_path_is_an_error_that_names_the_setting():
    flash.check_fast("", slow_attention=False)
    flash.check_fast("the model's dtype is float32", slow_attention=True)
    with pytest.raises(ConfigError, match=r"the model's dtype is float32\. .* learner\.compute\.slow_attention=true"):
        flash.check_fast("the model's dtype is float32", slow_attention=False)


@pytest.fixture
def kernels():
    """torch's operations of flash attention on this CPU, by loops over rows; → how often the forward one was called."""
    from torch.nn.attention import varlen

    calls = []

    def scores(q, k, begin, scale):
        for i in range(len(begin) - 1):
            own = slice(int(begin[i]), int(begin[i + 1]))
            a, b = q[own].transpose(0, 1), k[own].transpose(0, 1)
            ahead = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool).triu(1)
            yield own, (a @ b.mT * scale).masked_fill(ahead, -torch.inf).softmax(-1), a, b

    def forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, *more, **others):
        calls.append(max_q)
        out = [(p @ value[own].transpose(0, 1)).transpose(0, 1) for own, p, *_ in scores(query, key, cu_seq_q, scale)]
        return torch.cat(out), torch.zeros(1), torch.zeros(1)

    def backward(grad, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng, scale=None, window=None):
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for own, p, a, b in scores(q, k, cu_seq_q, scale):
            g = grad[own].transpose(0, 1)
            dp = g @ v[own].transpose(0, 1).mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
            dq[own], dk[own], dv[own] = (x.transpose(0, 1) for x in (ds @ b, ds.mT @ a, p.mT @ g))
        return dq, dk, dv

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)
    return calls


def test_a_recomputed_layer_computes_its_attention_once(kernels, monkeypatch):
    import transformers

    from creditgraph.components.learner.hf.model import LearnerModel
    from creditgraph.components.learner.packing.pack import pack

    monkeypatch.setattr(attention, "_padded", attention._flash)
    config = transformers.Qwen2Config(
        vocab_size=42, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2,
    )  # fmt: skip
    found = {}
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        model = LearnerModel(transformers.Qwen2ForCausalLM(config), recompute=recompute)
        batch = pack(Jagged.from_rows([[1, 2], [3]]), Jagged.from_rows([[4, 5, 6], [7, 8]]), torch.arange(2))
        kernels.clear()
        logprobs, _ = model.logprobs(batch, 1.0)
        assert len(kernels) == 3
        logprobs.values.square().sum().backward()
        assert len(kernels) == 3
        found[recompute] = [p.grad for p in model.trainable().values()]
    assert all(torch.equal(a, b) for a, b in zip(found["none"], found["full"], strict=True))
