"""The redirect of CUDA calls: for megatron only, only while open, and never with a CUDA device."""

import builtins
import types
from typing import Any

import pytest
import torch

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
CALLS = {
    "a factory": lambda: torch.zeros(2, device="cuda"),
    "a device object": lambda: torch.zeros(2, device=torch.device("cuda", 0)),
    "a move": lambda: torch.zeros(2).cuda(),
    "the current device": lambda: torch.zeros(2, device=torch.cuda.current_device()),
    "the default stream": lambda: torch.cuda.synchronize() or torch.zeros(2),
    "a generator state": lambda: torch.cuda.get_rng_state()[:2] * 0,
}


@pytest.fixture
def random() -> types.ModuleType:
    """Megatron's random states; imported by the worker that runs these tests alone, because that takes seconds."""
    reason = "needs megatron-core: pip install 'creditgraph[megatron]'"
    return pytest.importorskip("megatron.core.tensor_parallel.random", reason=reason)


@pytest.fixture
def megatron_on_cpu(random: types.ModuleType) -> Any:
    from creditgraph.components.learner.megatron.cpu import megatron_on_cpu

    return megatron_on_cpu


def as_megatron(function: Any) -> Any:
    """The same code as if it stood in a module of megatron-core."""
    return types.FunctionType(
        function.__code__, {"torch": torch, "__name__": "megatron.core.somewhere", "__builtins__": builtins}
    )


@without_cuda
@pytest.mark.parametrize("call", CALLS)
def test_megatron_gets_the_cpu_and_others_the_error(call: str, megatron_on_cpu: Any) -> None:
    with megatron_on_cpu():
        assert as_megatron(CALLS[call])().tolist() == [0, 0]
        with pytest.raises((AssertionError, RuntimeError)):
            CALLS[call]()


@without_cuda
def test_types_read_as_on_cuda_for_megatron_only(megatron_on_cpu: Any) -> None:
    with megatron_on_cpu():
        assert as_megatron(lambda: torch.zeros(1).type())() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type() == "torch.FloatTensor"


@without_cuda
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_left_behind(call: str, megatron_on_cpu: Any) -> None:
    with pytest.raises(KeyError), megatron_on_cpu():
        raise KeyError
    with pytest.raises((AssertionError, RuntimeError)):
        as_megatron(CALLS[call])()


@without_cuda
def test_random_regions_are_restored(random: types.ModuleType, megatron_on_cpu: Any) -> None:
    with megatron_on_cpu():
        tracker = random.CudaRNGStatesTracker()
        tracker.add("region", 5)
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        with tracker.fork("region"):
            inside = torch.rand(3)
        assert torch.equal(torch.rand(3), expected)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), inside)


def test_inert_with_cuda(monkeypatch: pytest.MonkeyPatch, random: types.ModuleType, megatron_on_cpu: Any) -> None:
    own = (torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.manual_seed, torch.cuda.get_rng_state)
    states = (random._get_cuda_rng_state, random._set_cuda_rng_state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with megatron_on_cpu():
        assert own == (
            torch.cuda.current_device,
            torch.cuda.synchronize,
            torch.cuda.manual_seed,
            torch.cuda.get_rng_state,
        )
        assert states == (random._get_cuda_rng_state, random._set_cuda_rng_state)
        assert as_megatron(lambda: torch.zeros(1).type())() == "torch.FloatTensor"
        seen: list[str] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: seen.append("called") or 0)
        as_megatron(lambda: torch.cuda.current_device())()
        assert seen == ["called"]
