"""The log-prob head of each learner against full logits in float64, and how its time and memory go with the chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acceptance.measure import Run, difference, generator
from acceptance.models import QWEN2, shape_of
from creditgraph.components.learner.logprobs import Head, VocabShard, token_logprobs

# Logits are rounded to the dtype of the weights, 2⁻⁹ of their size, and these logits are below 4.
LIMITS = {torch.bfloat16: 0.02, torch.float32: 1e-4}
PADDING = 64  # rows that Megatron adds to a vocabulary


def stage(run: Run) -> None:
    """See the module docstring."""
    shape = shape_of(run, QWEN2)
    for sharded in (False, True):
        _compare(run, sharded, 48 if run.small else 1024, shape.hidden, shape.vocab)
    _sweep(run, 96 if run.small else 16384, shape.hidden, shape.vocab)


def _inputs(run: Run, tokens: int, hidden: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(run.device)
    states = torch.randn(tokens, hidden, device=run.device, generator=g).to(run.dtype)
    weight = (torch.randn(vocab, hidden, device=run.device, generator=g) * hidden**-0.5).to(run.dtype)
    return states, weight, torch.randint(0, vocab, (tokens,), device=run.device, generator=g)


def _compare(run: Run, sharded: bool, tokens: int, hidden: int, vocab: int) -> None:
    states, weight, targets = _inputs(run, tokens, hidden, vocab)
    padding = torch.ones(PADDING if sharded else 0, hidden, device=run.device, dtype=run.dtype)
    narrow = [states.clone().requires_grad_(), torch.cat([weight, padding]).requires_grad_()]
    wide = [states.double().requires_grad_(), weight.double().requires_grad_()]
    shard = VocabShard(start=0, size=vocab) if sharded else None
    got = token_logprobs(narrow[0], targets, Head(weight=narrow[1], shard=shard), 0.8, chunk=tokens // 3)
    table = torch.log_softmax(wide[0] @ wide[1].t() / 0.8, -1)
    expected = (table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1))
    grads = torch.autograd.grad(_loss(got), narrow)
    true_grads = torch.autograd.grad(_loss(expected), wide)
    name = "megatron (padded shard)" if sharded else "hf"
    values = [float((a.double() - b).abs().max()) for a, b in zip(got, expected, strict=True)]
    gaps = [difference(a[: len(b)], b) for a, b in zip(grads, true_grads, strict=True)]
    run.row(head=name, logprob=values[0], entropy=values[1], d_hidden=gaps[0], d_weight=gaps[1])
    run.check(f"{name}: largest gap to float64", max(*values, *gaps), LIMITS[run.dtype])
    if sharded:
        run.check(f"{name}: padding gets no gradient", float(grads[1][vocab:].abs().max()), 0.0)


def _loss(values: tuple[Tensor, Tensor]) -> Tensor:
    logprobs, entropies = values
    sine = torch.sin(torch.arange(len(logprobs), device=logprobs.device, dtype=torch.float64)).to(logprobs.dtype)
    return (logprobs * sine).sum() + 0.1 * (entropies * sine).sum()


def _sweep(run: Run, tokens: int, hidden: int, vocab: int) -> None:
    states, weight, targets = _inputs(run, tokens, hidden, vocab)
    states.requires_grad_()
    weight.requires_grad_()
    rate = run.matmul_rate(tokens, hidden, vocab)

    def chunked(chunk: int) -> None:
        token_logprobs(states, targets, Head(weight=weight), 1.0, chunk)[0].sum().backward()

    def full() -> None:
        (states @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None]).sum().backward()

    def measure(name: str, work: Any, **more: Any) -> float:
        with run.peak() as peak:
            seconds = run.seconds(work)
        # Forward, recomputation, and a product for each of the two gradients.
        share = 8.0 * tokens * hidden * vocab / seconds / rate
        run.row(head=name, seconds=seconds, of_matmul_rate=share, peak_added_gb=peak["added_gb"], **more)
        states.grad = weight.grad = None
        return seconds

    sizes = [2**e for e in ((12, 14) if run.small else range(26, 31))]
    own = measure("chunk of the product", lambda: chunked(0))
    times = {size: measure(f"chunk 2^{size.bit_length() - 1}", lambda s=size: chunked(s // vocab)) for size in sizes}
    measure("whole logits", full)
    best = min(times, key=lambda size: times[size])
    run.note(
        f"The fastest chunk has 2^{best.bit_length() - 1} logits; the product's takes {own / times[best]:.2f} × as "
        "long."
    )
