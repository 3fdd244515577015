"""A learner that shares its devices with engines: what it moves to the CPU, when, and what it publishes alive."""

import pytest
import torch
from learner_steps import FAST, run, same

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.offload import HostMemory
from creditgraph.components.models.fixed_sequence import fixed_tokens
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.encoding import decode, encode
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.ranks import DeviceSlots


def learner_of(folder, turns=None, lockstep=False, dtype="bfloat16", **settings):
    learner = HFLearner(HFLearner.Config(optimizer=FAST, **settings))
    spec = ModelSpec(path=str(folder), dtype=dtype)
    context = Context(node="learner", iterations=4, model=spec, slots=turns or DeviceSlots(), lockstep=lockstep)
    learner.setup(context)
    return learner


def test_moved_tensors_come_back_bit_for_bit_and_stay_views():
    whole = torch.randn(1000, dtype=torch.float32)
    view, shared = whole[10:20], torch.randn(7, dtype=torch.bfloat16)
    stays = shared[2:]
    copies = [whole.clone(), shared.clone()]
    memory = HostMemory()
    for _ in range(2):  # the second time into the memory of the first
        memory.offload([whole, view, shared], stay=[stays])
        assert (whole.untyped_storage().nbytes(), shared.untyped_storage().nbytes()) == (0, 14)
        memory.offload([torch.ones(3)])  # holds some already
        memory.onload()
        assert not memory.holds
        assert torch.equal(whole, copies[0])
        assert torch.equal(shared, copies[1])
        assert view.data_ptr() == whole.data_ptr() + 40


def test_gpu_memory_goes_to_locked_pages_and_is_returned_to_other_processes(monkeypatch):
    """CUDA by mocks: a storage that says it is on a GPU."""
    calls = []
    empty = torch.empty
    monkeypatch.setattr("creditgraph.components.learner.offload._bytes", lambda storage: real(storage.held))

    class Storage:
        def __init__(self, held):
            self.held, self.device, self._cdata = held, torch.device("cuda"), 1

        def nbytes(self):
            return self.held.nbytes()

        def resize_(self, size):
            calls.append(size)

    class OnGpu:
        def __init__(self, tensor):
            self.storage = Storage(tensor.untyped_storage())

        def detach(self):
            return self

        def untyped_storage(self):
            return self.storage

    def allocate(*size, pin_memory=False, **more):
        calls.append(f"locked {pin_memory}")
        return empty(*size, **more)

    real = lambda storage: empty(0, dtype=torch.uint8).set_(storage)  # noqa: E731
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("returned"))
    memory = HostMemory()
    memory.offload([OnGpu(torch.ones(3))])
    memory.onload()
    assert calls == ["locked True", 0, "returned", 12]


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_taking_turns_changes_no_bit_of_training(model_folder, make_batch, dtype, lora):
    alone = learner_of(model_folder(), dtype=dtype, lora=lora)
    said = []
    turns = DeviceSlots(shared=True, meet=lambda: said.append("meet"))
    turns.add_engine(lambda: said.append("engines sleep"))
    sharing = learner_of(model_folder(), turns, dtype=dtype, lora=lora)
    assert said == ["engines sleep", "meet"], "before the model loads"
    for seed in range(2):
        turns.end()  # as the executor does when an iteration begins
        moments = [v for state in sharing.optimizer._adam.state.values() for v in state.values()]
        assert not seed or moments
        assert {v.untyped_storage().nbytes() for v in moments} <= {0}, "while engines sample"
        assert same(sharing.weights().tensors, alone.weights().tensors)
        said.clear()
        for learner in (alone, sharing):
            learner.context.iteration = seed
            run(learner, make_batch(seed=seed))
        assert said == ["engines sleep", "meet"]
        # A checkpoint after the iteration has everything.
        assert same_tree(sharing.state_dict()["optimizer"], alone.state_dict()["optimizer"])
    turns.end()
    assert said[2:] == ["meet"]
    turns.recall()  # servers are lost: a checkpoint outside of the turn
    assert same_tree(sharing.state_dict()["optimizer"], alone.state_dict()["optimizer"])


def same_tree(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_learner_on_its_own_devices_moves_nothing(model_folder, make_batch):
    learner = learner_of(model_folder())
    run(learner, make_batch())
    moments = [v for state in learner.optimizer._adam.state.values() for v in state.values()]
    assert all(v.untyped_storage().nbytes() for v in moments)


def test_weights_are_streamed_from_the_parameters_until_the_learner_trains_again(model_folder, make_batch):
    learner = learner_of(model_folder(), lockstep=True)
    first = learner.initial()["weights"]
    assert first.tensors is None
    parameters = dict(learner.model.causal_lm.named_parameters())
    for _ in range(2):
        assert all(tensor.data_ptr() == parameters[name].data_ptr() for name, tensor in first.pairs())
    before = {name: tensor.clone() for name, tensor in first.pairs()}
    stored = decode(encode({"weights": first}, "a checkpoint"))["weights"]
    assert stored.stream is None
    assert same(stored.tensors, before)
    second = run(learner, make_batch()).weights
    with pytest.raises(CreditgraphError, match=r"expected a reader of weights version 1, .* got one of version 0"):
        next(first.pairs())
    open_one = second.pairs()
    next(open_one)
    with pytest.raises(CreditgraphError, match="are being changed or read"):
        next(second.pairs())
    open_one.close()
    assert not same(dict(second.pairs()), before)
    assert same(stored.tensors, before)


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2), Lora(rank=2, publish="adapter")])
def test_the_learner_scores_the_fixed_sequence_with_the_weights_that_it_publishes(model_folder, make_batch, lora):
    from transformers import AutoModelForCausalLM

    learner = learner_of(model_folder(), dtype="float32", lora=lora, lockstep=True)
    scored = run(learner, make_batch()).weights.scored
    assert scored.tokens == fixed_tokens(42, 64)
    model = AutoModelForCausalLM.from_pretrained(learner.context.model.path)
    model.load_state_dict(learner.model.published(), strict=False)
    ids = torch.tensor([scored.tokens])
    with torch.no_grad():
        expected = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=0, atol=1e-5)
