"""Micro-batches through the pipeline: 1F1B and interleaved schedules of megatron-core, and forward-only passes.

Micro-batches have any lengths: stages send each other the shape first. Replicas may run different numbers
of them, since gradients are summed only after the last; the interleaved schedule requires a multiple of the pipeline
size and is filled up with one-token micro-batches of weight zero, and so is a replica without rows, or with fewer than
one with which it shares experts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from creditgraph.components.learner.megatron.experts import most_of_sharing
from creditgraph.components.learner.packing.pack import PackedBatch, filler

COMPUTE = ("forward-compute", "backward-compute")
Forward = Callable[[nn.Module, PackedBatch], Tensor]
Consume = Callable[[int, PackedBatch, Tensor], tuple[Tensor, Any]]


def num_fillers(count: int, pipeline: int, virtual: int, most: int = 0) -> int:
    """Number of micro-batches to add to `count` so that the schedule accepts them, and are at least `most`.

    >>> [num_fillers(n, pipeline=2, virtual=2) for n in (0, 1, 2, 5)]
    [2, 1, 0, 1]
    >>> [num_fillers(n, pipeline=2, virtual=1, most=3) for n in (0, 1, 5)]
    [3, 2, 0]
    """
    total = max(count, most, 1)
    return total - count + (-total % pipeline if virtual > 1 else 0)


def run_schedule(
    chunks: Sequence[nn.Module],
    forward: Forward,
    batches: Sequence[PackedBatch],
    consume: Consume,
    device: str,
    train: bool,
) -> list[Any]:
    """Forward, and with `train` backward, passes of all micro-batches.

    Args:
        chunks: model chunks of this rank, in virtual pipeline order.
        forward: (chunk, micro-batch) → hidden states, between stages and at last.
        batches: micro-batches of this replica, the same on all its ranks.
        consume: on the last stage, (index of the micro-batch, micro-batch, hidden states) → (loss, data). Not called
            for fillers.
        device: device of the fillers.
        train: whether to accumulate gradients and finalise them over all ranks; otherwise runs without gradient.

    Returns:
        on the last stage the data, in order; elsewhere nothing.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    extra = num_fillers(len(batches), pipeline, len(chunks), most_of_sharing(len(batches), device))
    work = list(enumerate(batches)) + [(-1, filler(device))] * extra

    def loss_of(index: int, batch: PackedBatch, hidden: Tensor) -> tuple[Tensor, Tensor, Any]:
        loss, data = (_nothing(chunks[-1], hidden), None) if index < 0 else consume(index, batch, hidden)
        return loss, torch.ones((), dtype=torch.int, device=device), data

    def step(items: Iterator[tuple[int, PackedBatch]], chunk: nn.Module, *_: Any) -> tuple[Tensor, Callable[..., Any]]:
        index, batch = next(items)
        return forward(chunk, batch), partial(loss_of, index, batch)

    run = get_forward_backward_func()
    iterators = [iter(work) for _ in chunks]
    with torch.set_grad_enabled(train):
        data = run(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(work),
            seq_length=1,  # every micro-batch sends its own shape
            micro_batch_size=1,
            forward_only=not train,
        )
    return data[: len(batches)] if is_last_stage() else []


def _nothing(chunk: nn.Module, hidden: Tensor) -> Tensor:
    """A filler's loss, 0, with a gradient for every weight: an overlapped sum over replicas waits for each of them."""
    head = chunk.get_submodule("module.output_layer" if hasattr(chunk, "module") else "output_layer")
    return hidden.sum() * 0.0 + sum(p.sum() * 0.0 for p in head.parameters() if p.requires_grad)


def is_last_stage() -> bool:
    """Whether this rank holds the output head, and so the log-probs, the loss and the metrics."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def from_last_stage(value: Tensor) -> Tensor:
    """The last stage's value on all stages of the pipeline; shape and dtype must agree."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        value = value.contiguous().clone()
        dist.broadcast(
            value,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return value


def objects_from_last_stage(value: Any) -> Any:
    """The last stage's Python value on all stages of the pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def mean_and_maximum(value: float) -> tuple[float, float]:
    """Mean and largest of a number over all ranks of the run."""
    total = torch.tensor(value, dtype=torch.float64)
    largest = total.clone()
    dist.all_reduce(total)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(total) / dist.get_world_size(), float(largest)


def sum_over_ranks(value: Tensor) -> Tensor:
    """A CPU tensor summed over all ranks of the run."""
    total = value.clone()
    dist.all_reduce(total)
    return total


class ComputeClock:
    """Replaces the timers of megatron-core's schedules: adds up the forward and backward passes of this rank.

    On a GPU passes are measured by events of the stream, so waiting for another stage's tensors does not count.

    >>> clock = ComputeClock("cpu")
    >>> clock("forward-recv").start(); clock("forward-recv").stop(); clock.take()
    0.0
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._cuda = device.startswith("cuda")
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """The timer of that name: this clock for passes, nothing for others."""
        return self if name in COMPUTE else _NOTHING

    def start(self, barrier: bool = False) -> None:
        """A pass begins."""
        self._begin = self._now()

    def stop(self, barrier: bool = False) -> None:
        """A pass ends."""
        self._marks.append((self._begin, self._now()))

    def take(self) -> float:
        """Seconds of all passes since the last call; on a GPU it waits until they are done."""
        marks, self._marks = self._marks, []
        if not self._cuda:
            return float(sum(end - begin for begin, end in marks))
        torch.cuda.synchronize(self._device)
        return float(sum(begin.elapsed_time(end) for begin, end in marks)) / 1000

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class _Nothing:
    def start(self, barrier: bool = False) -> None:
        """Does nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Does nothing."""


_NOTHING = _Nothing()
