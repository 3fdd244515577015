"""Whole steps of the learners, through their settings: MFU and memory, and what shared prefixes save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from acceptance.measure import Run
from acceptance.models import QWEN2, QWEN3, Shape, batch_of, context_of, random_tokens, shape_of
from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.learner import PolicyLearner
from creditgraph.components.learner.packing.pack import pack
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged

AIM = 0.45  # of the matmul rate measured in the same run
PROMPT = 16  # short, so that nearly every token is predicted and the count of operations is right


def build(run: Run, kind: str, shape: Shape, **settings: Any) -> PolicyLearner:
    """A set-up learner: "hf", "fsdp" (learner.hf sharded over one rank), or "megatron"."""
    cls: type[PolicyLearner] = one_rank() if kind == "fsdp" else HFLearner
    if kind == "megatron":
        from creditgraph.components.learner.megatron.learner import MegatronLearner

        cls = MegatronLearner
    learner = cls(cls.Config(**settings))
    learner.setup(context_of(run, shape))
    return learner


def one_rank() -> type[PolicyLearner]:
    """learner.hf sharded over a single rank, which its settings do not ask for: one rank has all of it anyway."""
    from creditgraph.components.learner.hf.sharding import Sharding
    from creditgraph.components.models.load import empty_causal_lm

    class OneRank(HFLearner):
        def load(self, context: Context, spec: ModelSpec, settings: Any) -> tuple[Any, tuple[Sharding, str]]:
            kind = "cpu:gloo,cuda:nccl" if context.device == "cuda" else "gloo"
            dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)
            self.sharded = True
            return empty_causal_lm(spec), (Sharding(context.ranks, context.device, 1), spec.path)

    return OneRank


@contextmanager
def alive(run: Run, kind: str, shape: Shape, **settings: Any) -> Iterator[PolicyLearner]:
    """A learner for the length of a block; its memory is given back afterwards."""
    learner = build(run, kind, shape, **settings)
    try:
        yield learner
    finally:
        learner.close()
        learner.__dict__.clear()
        del learner
        if dist.is_initialized() and kind != "hf":  # vLLM in this process has a group of its own
            if kind == "megatron":
                from creditgraph.components.learner.megatron.parallel import destroy

                destroy()
            dist.destroy_process_group()
        run.free()


# shape, recomputation, norms and products compiled (learner.hf alone), tokens per micro-batch, lengths of rows
CASES = (
    (QWEN2, "none", False, 32768, (4096, 32768)),
    (QWEN2, "full", False, 32768, (4096, 32768)),
    (QWEN3, "full", True, 32768, (4096, 32768)),
    (QWEN3, "full", False, 32768, (4096, 32768)),
    (QWEN3, "none", False, 8192, (4096,)),
)


def hf(run: Run) -> None:
    """MFU of learner.hf."""
    _mfu(run, "hf")


def fsdp(run: Run) -> None:
    """MFU of learner.hf sharded over one rank, which shows what sharding costs beside communication."""
    _mfu(run, "fsdp")


def megatron(run: Run) -> None:
    """MFU of learner.megatron with its local layers."""
    import mbridge  # noqa: F401 - so that a missing package is named before anything is loaded
    import megatron.core  # noqa: F401

    _mfu(run, "megatron")


def _mfu(run: Run, kind: str) -> None:
    best: dict[tuple[str, int], float] = {}
    big = QWEN2 if run.small else QWEN3
    rate = run.matmul_rate(256 if run.small else 16384, shape_of(run, big).hidden, shape_of(run, big).mlp)
    run.row(model="one matrix product", tflops=rate / 1e12)
    for full_shape, recompute, compiled, budget, lengths in CASES[: 2 if run.small else None]:
        if compiled and kind != "hf":
            continue
        shape = shape_of(run, full_shape)
        settings = {"compile": True} if compiled else {}
        how = f"{recompute}, compiled" if compiled else recompute
        budget = 256 if run.small else budget
        try:
            with alive(run, kind, shape, recompute=recompute, micro_batch_tokens=budget, **settings) as learner:
                if kind == "fsdp":
                    run.check(f"{shape.name}, {recompute}: every weight is a DTensor", _is_sharded(learner))
                for length in (64, 128) if run.small else lengths:
                    share = _one(run, learner, shape, how, length, budget, rate)
                    key = (shape.name, length)
                    best[key] = max(best.get(key, 0.0), share)
        except torch.OutOfMemoryError as error:
            run.row(model=shape.name, recompute=how, length=f"does not fit: {str(error).splitlines()[0][:80]}")
        run.free()
    for (name, length), share in best.items():
        run.check(f"{name}, rows of {length}: MFU of the better recomputation", share, None if run.small else AIM, True)


def _is_sharded(learner: Any) -> bool:
    """Whether FSDP holds all weights, and nothing of it has fallen back to the plain learner."""
    return all(isinstance(p, DTensor) for p in learner.model.causal_lm.parameters())


def _one(
    run: Run, learner: PolicyLearner, shape: Shape, recompute: str, length: int, budget: int, rate: float
) -> float:
    """Two micro-batches a step; the first step is not timed."""
    rows = max(2, 2 * budget // length)
    tokens = random_tokens(rows, length + 1, shape.vocab, seed=length)
    batch = batch_of(tokens[:, :PROMPT], tokens[:, PROMPT:], shape.vocab)
    times = []
    phases: dict[str, float] = {}
    with run.peak() as peak:
        for step in range(2 if run.small else 3):
            report = learner.run(trajectories=batch[0], credit=batch[1]).report
            if step:
                times.append(report.seconds["forward_backward"] + report.seconds["optimizer"])
                phases = report.seconds
    seconds = min(times)
    # Multiplications of forward and backward pass; what recomputation adds is not counted.
    share = 3 * shape.forward_flops(rows * length, length) / seconds / rate
    run.row(
        model=shape.name,
        recompute=recompute,
        length=length,
        micro_batch=budget,
        tokens_per_s=rows * length / seconds,
        tflops=share * rate / 1e12,
        mfu=share,
        peak_gb=peak["gb"],
        optimizer_share=phases["optimizer"] / seconds,
    )
    loss = report.metrics.get("loss", math.nan)
    if not math.isfinite(loss):
        run.check(f"{shape.name}, {recompute}, {length}: the loss is finite", False)
    return share


def prefixes(run: Run) -> None:
    """Forward and backward pass with the prompt computed once, against once per response."""
    cases = ((16, 512, 4096), (8, 16384, 2048))
    for rows, prompt, response in ((4, 48, 16), (3, 64, 8)) if run.small else cases:
        shape = shape_of(run, QWEN2)
        with alive(run, "hf", shape, recompute="full") as learner:
            _prefix(run, learner, shape, rows, prompt, response)


def _prefix(run: Run, learner: Any, shape: Shape, rows: int, prompt: int, response: int) -> None:
    first = random_tokens(1, prompt, shape.vocab, seed=1).expand(rows, -1)
    last = random_tokens(rows, response, shape.vocab, seed=2)
    prompts, responses = (Jagged.from_rows(list(x), torch.int32).to(run.device) for x in (first, last))
    model = learner.model
    order = torch.arange(rows, device=run.device)
    weights = torch.sin(torch.arange(rows * response, device=run.device, dtype=torch.float32))

    def passes(share: bool, index: torch.Tensor) -> None:
        logprobs, _ = model.logprobs(pack(prompts, responses, index, share=share), 1.0)
        own = weights.view(rows, response)[index].reshape(-1)
        (logprobs.values * own).sum().backward()

    def measured(share: bool) -> tuple[float, float | None]:
        with run.peak() as peak:
            seconds = run.seconds(lambda: passes(share, order), repeats=2)
        return seconds, peak["added_gb"]

    def gradient(share: bool, index: torch.Tensor) -> dict[str, torch.Tensor]:
        model.causal_lm.zero_grad(set_to_none=True)
        passes(share, index)
        return {name: p.grad.detach().cpu() for name, p in model.trainable().items()}

    plain = gradient(False, order)
    # The same rows in another order: how much of a gap is rounding.
    floor = _gap(gradient(False, order.flip(0)), plain)
    gap = _gap(gradient(True, order), plain)
    (slow, slow_gb), (quick, quick_gb) = measured(False), measured(True)
    name = f"{rows} × ({prompt} + {response})"
    computed = rows * (prompt + response) / (prompt + rows * response)
    run.row(
        rows=name,
        plain_s=slow,
        shared_s=quick,
        speed_up=slow / quick,
        fewer_tokens=computed,
        plain_gb=slow_gb,
        shared_gb=quick_gb,
        gradient_gap=gap,
        gap_of_reordering=floor,
    )
    run.check(f"{name}: gap of gradients", gap, max(2 * floor, 0.03 if run.device == "cuda" else 1e-4))
    if not run.small:
        run.check(f"{name}: speed-up", slow / quick, 1.0, at_least=True)
    model.causal_lm.zero_grad(set_to_none=True)


def _gap(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """‖got − expected‖ / ‖expected‖ over all parameters."""
    apart = sum(float((got[n].double() - g.double()).square().sum()) for n, g in expected.items())
    return math.sqrt(apart / sum(float(g.double().square().sum()) for g in expected.values()))
