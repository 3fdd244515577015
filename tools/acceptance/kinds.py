"""What a plain dense step does not use: adapters, experts, vLLM beside the learner, TransformerEngine with 8 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from acceptance.engine import gap_to, generate
from acceptance.learners import PROMPT, alive
from acceptance.measure import Run
from acceptance.models import EXPERTS, HALF, QWEN2, QWEN3, Shape, batch_of, context_of, random_tokens, shape_of
from creditgraph.components.engine.channel import ChannelSettings
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.learner.lora import Lora
from creditgraph.pipeline.core.ranks import DeviceSlots


def lora(run: Run) -> None:
    """A step of adapters leaves the model's weights alone, and an engine samples with what was published."""
    shape = shape_of(run, QWEN2)
    with alive(run, "hf", shape, lora=Lora(rank=16, alpha=32.0), recompute="full") as learner:
        model: Any = learner.model  # type: ignore[attr-defined]
        frozen = {n: p.detach().clone() for n, p in model.causal_lm.named_parameters() if not p.requires_grad}
        _steps(run, learner, shape, "lora, rank 16")
        same = all(torch.equal(p, frozen[n]) for n, p in model.causal_lm.named_parameters() if n in frozen)
        run.check("the model's own weights have the same bits after the steps", same and bool(frozen))
        moved = max(float(p.detach().abs().max()) for n, p in model.trainable().items() if "lora_B" in n)
        run.check("adapters have moved", moved > 0)
        engine = LocalEngine(LocalEngine.Config())
        engine.setup(context_of(run, shape, "engine"))
        policy = engine.run(weights=learner.weights()).policy
        prompts, done = generate(run, policy, shape, *_sizes(run))
        gap_to(run, model, prompts, done, "with adapters")
        engine.close()


def experts(run: Run) -> None:
    """A mixture of experts: a step of learner.megatron against one of learner.hf on the same batch."""
    import mbridge  # noqa: F401 - so that a missing package is named before anything is loaded
    import megatron.core  # noqa: F401

    shape = shape_of(run, EXPERTS)
    reports = {}
    for kind in ("hf", "megatron"):
        with alive(run, kind, shape) as learner:
            reports[kind] = _steps(run, learner, shape, f"experts, learner.{kind}")
    for name in ("grad_norm", "entropy"):
        ours, theirs = (reports[kind][name] for kind in ("megatron", "hf"))
        limit = 0.05 if run.device == "cuda" else 1e-4
        run.check(f"{name} of learner.megatron over learner.hf, less 1", abs(ours / theirs - 1), limit)


def fp8(run: Run) -> None:
    """TransformerEngine's layers and attention, in bfloat16 and with products in 8 bits, against learner.hf."""
    import mbridge  # noqa: F401
    import megatron.core  # noqa: F401
    import transformer_engine  # noqa: F401

    from creditgraph.components.learner.megatron.settings import Fp8, LayerSettings

    shape = shape_of(run, QWEN2)
    with alive(run, "hf", shape, recompute="full") as learner:
        expected = _steps(run, learner, shape, "learner.hf")
    for recipe, limit in (("off", 0.02), ("tensorwise", 0.1)):
        layers = LayerSettings(library="transformer_engine", fp8=Fp8(recipe=recipe))
        with alive(run, "megatron", shape, recompute="full", layers=layers) as learner:
            found = _steps(run, learner, shape, f"TransformerEngine, 8 bits {recipe}")
        for name in ("grad_norm", "entropy"):
            run.check(f"{name}, 8 bits {recipe}, over learner.hf, less 1", abs(found[name] / expected[name] - 1), limit)


def vllm(run: Run) -> None:
    """vLLM in this process: it samples what the learner computes, takes its weights, sleeps and wakes."""
    _vllm(run, "in process", sleep="always" if run.device == "cuda" else "never")


def served(run: Run) -> None:
    """The same of a vLLM server, which takes weights as files and from the learner's GPU memory."""
    for kind in ("file", "ipc") if run.device == "cuda" else ("file",):
        _vllm(run, f"weights by {kind}", servers=1, channel=ChannelSettings(kind=kind), enforce_eager=True)


def _vllm(run: Run, what: str, **settings: Any) -> None:
    import vllm  # noqa: F401

    from creditgraph.components.engine.vllm.engine import VllmEngine

    shape = shape_of(run, QWEN3 if run.small else HALF)  # on a CPU vLLM has no kernel for heads narrower than 32
    gpu = run.device == "cuda"
    slots = DeviceSlots(shared=gpu)
    context = dataclasses.replace(context_of(run, shape, "engine"), slots=slots)
    context = dataclasses.replace(context, model=dataclasses.replace(context.model, max_context=2048))
    engine = VllmEngine(VllmEngine.Config(**settings))
    start = run.clock()
    engine.setup(context)
    run.row(what=f"start of vLLM, {what}", seconds=run.clock() - start)
    with alive(run, "hf", shape) as learner:
        for version in (f"first weights, {what}", f"after two steps, {what}"):
            start = run.clock()
            policy = engine.run(weights=learner.weights()).policy
            run.row(what=f"vLLM loads, {version}", seconds=run.clock() - start)
            prompts, done = generate(run, policy, shape, *_sizes(run))
            gap_to(run, learner.model, prompts, done, version)  # type: ignore[attr-defined]
            free = torch.cuda.mem_get_info()[0] if gpu else 0
            slots.begin()
            if gpu:
                given = (torch.cuda.mem_get_info()[0] - free) / 1e9
                run.check(f"GB that vLLM gives back, {version}", given, 0.5, at_least=True)
            _steps(run, learner, shape, f"a step while vLLM sleeps, {version}")
            slots.end()
    engine.close()


def _sizes(run: Run) -> tuple[int, int, int]:
    """Rows, and tokens of prompt and response."""
    return (8, 12, 6) if run.small else (64, 512, 256)


def _steps(run: Run, learner: Any, shape: Shape, what: str) -> dict[str, float]:
    """Two steps on one batch; metrics of the first, the second is timed."""
    length = 48 if run.small else 2048
    tokens = random_tokens(8, length + 1, shape.vocab, seed=9)
    batch = batch_of(tokens[:, :PROMPT], tokens[:, PROMPT:], shape.vocab)
    with run.peak() as peak:
        first = learner.run(trajectories=batch[0], credit=batch[1]).report
        start = run.clock()
        learner.run(trajectories=batch[0], credit=batch[1])
        seconds = run.clock() - start
    run.row(what=what, seconds=seconds, tokens_per_s=8 * length / seconds, peak_gb=peak["gb"])
    run.check(f"{what}: a step was made", first.metrics["steps"], 1.0, at_least=True)
    return dict(first.metrics)
