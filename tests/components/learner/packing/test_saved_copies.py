"""What attention keeps for the backward pass when rows share a prefix: no copies of keys and values above a size."""

import torch

from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.packing import attention
from creditgraph.components.learner.packing.pack import pack
from creditgraph.pipeline.core.jagged import Jagged

ROWS, PREFIX, OWN, LAYERS, HEADS, DIM = 12, 60, 5, 3, 2, 8


class Kept:
    """Bytes of the tensors that autograd keeps, each storage once; those that `checkpoint` holds included."""

    def __init__(self, monkeypatch):
        self.storages = {}
        own = attention.checkpoint

        def checkpoint(function, *args, **kwargs):
            for argument in args:
                if isinstance(argument, torch.Tensor):
                    self.keep(argument)
            return own(function, *args, **kwargs)

        monkeypatch.setattr(attention, "checkpoint", checkpoint)

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = (storage, storage.nbytes())  # held, so that its address is not used again
        return tensor

    def bytes(self):
        return sum(size for _, size in self.storages.values())


def model(recompute):
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=42,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        initializer_range=0.2,
    )
    return LearnerModel(transformers.Qwen2ForCausalLM(config), recompute=recompute)


def passes(monkeypatch, most, recompute="none"):
    """Bytes kept by a forward pass over a prefix that all rows share, and the gradient of all log-probs."""
    monkeypatch.setattr(attention, "KEPT_COPIES", most)
    g = torch.Generator().manual_seed(1)
    prefix = torch.randint(0, 42, (PREFIX,), generator=g).tolist()
    own = [[i, *torch.randint(0, 42, (OWN,), generator=g).tolist()] for i in range(ROWS)]
    batch = pack(Jagged.from_rows([prefix] * ROWS), Jagged.from_rows(own), torch.arange(ROWS), share=True)
    assert batch.saved == (ROWS - 1) * PREFIX
    learner = model(recompute)
    kept = Kept(monkeypatch)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        logprobs, _ = learner.logprobs(batch, 1.0)
    logprobs.values.sum().backward()
    return kept.bytes(), [p.grad for p in learner.trainable().values()]


def test_copies_are_made_again_and_not_kept(monkeypatch):
    before, gradients = passes(monkeypatch, most=1 << 40)
    after, again = passes(monkeypatch, most=0)
    # Keys and values, float32, of each row's whole path, in every layer.
    copies = LAYERS * 2 * ROWS * (PREFIX + OWN) * HEADS * DIM * 4
    assert before - after > copies
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


def test_a_layer_that_is_computed_again_makes_its_copies_once(monkeypatch):
    calls = []
    own = attention._padded
    monkeypatch.setattr(attention, "_padded", lambda *args: calls.append(torch.is_grad_enabled()) or own(*args))
    passes(monkeypatch, most=0, recompute="full")
    with_copies = [c for c in calls if c]
    assert len(with_copies) == 2 * LAYERS  # forward, and once more in the backward pass


def test_small_copies_are_kept(monkeypatch):
    called = []
    own = attention.checkpoint
    monkeypatch.setattr(attention, "checkpoint", lambda *a, **k: called.append(1) or own(*a, **k))
    before, _ = passes(monkeypatch, most=attention.KEPT_COPIES)
    assert before > 0
    assert not called
