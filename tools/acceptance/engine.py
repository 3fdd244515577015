"""engine.local: tokens per second, log-probs against the learner's, branches off long trunks."""

from __future__ import annotations

from typing import Any

import torch

from acceptance.learners import alive
from acceptance.measure import Run
from acceptance.models import QWEN2, Shape, context_of, random_tokens, shape_of
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.learner.packing.pack import pack, plan
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

# Nats. Two orders of summation over thousands of bfloat16 products; the mean is what ratios see.
GAPS = {torch.bfloat16: 0.03, torch.float32: 1e-4}


def stage(run: Run) -> None:
    """See the module docstring."""
    shape = shape_of(run, QWEN2)
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(context_of(run, shape, "engine"))
    policy = engine.run(weights=Weights(version=0)).policy
    run.check(f"decoder: {type(engine.decoder).__name__}", type(engine.decoder).__name__ == "LeanDecoder")
    cases = ((8, 12, 6),) if run.small else ((64, 512, 256), (512, 512, 512))
    prompts, done = [generate(run, policy, shape, *case) for case in reversed(cases)][-1]
    _branches(run, policy, shape)
    with alive(run, "hf", shape) as learner:
        gap_to(run, learner.model, prompts, done)  # type: ignore[attr-defined]
    engine.close()


def generate(run: Run, policy: Any, shape: Shape, rows: int, prompt: int, response: int) -> tuple[Jagged, Any]:
    """Samples responses to random prompts, eight to each; the prompts, row by row, and what was sampled."""
    tokens = random_tokens(rows // 8 or 1, prompt, shape.vocab, seed=3).repeat_interleave(8, 0)
    requests = Requests(
        tokens=Jagged.from_rows(list(tokens), torch.int32),
        seed=torch.arange(len(tokens)),
        sampling=Sampling(max_tokens=response),
    )
    with run.peak() as peak:
        start = run.clock()
        done = policy.generate(requests)
        seconds = run.clock() - start
    run.row(
        what=f"generate {len(tokens)} × ({prompt} + {response})",
        seconds=seconds,
        tokens_per_s=len(done.tokens.values) / seconds,
        peak_added_gb=peak["added_gb"],
    )
    return requests.tokens, done


def gap_to(run: Run, model: Any, prompts: Jagged, done: Any, of: str = "of engine.local") -> None:
    """Log-probs of the engine against those of the learner with the same weights."""
    prompt, response = prompts.to(run.device), done.tokens.to(run.device)
    gaps = []
    with torch.no_grad():
        for index in plan(prompt.lengths + response.lengths - 1, 16384):
            logprobs, _ = model.logprobs(pack(prompt, response, index), 1.0)
            engine = done.logprobs.to(run.device).select(index)
            gaps.append((logprobs.values - engine.values).abs())
    gap = torch.cat(gaps)
    run.row(
        what=f"gap to the learner, nats, {of}",
        mean=float(gap.mean()),
        p99=float(gap.quantile(0.99)),
        most=float(gap.max()),
    )
    run.check(f"mean gap of log-probs to the learner, {of}", float(gap.mean()), GAPS[run.dtype])


def _branches(run: Run, policy: Any, shape: Shape) -> None:
    """Eight boundaries of a long trunk, as boundary values ask for them, against eight whole contexts."""
    rows, length, per_trunk, answer = (2, 40, 4, 3) if run.small else (4, 25_000, 8, 32)
    trunk = Jagged.from_rows(list(random_tokens(rows, length, shape.vocab, seed=4)), torch.int32)
    places = torch.linspace(length / per_trunk, length, per_trunk).long()
    row = torch.arange(rows).repeat_interleave(per_trunk)
    at = places.repeat(rows)
    answers = random_tokens(rows * per_trunk, answer, shape.vocab, seed=5)
    tokens = Jagged.from_rows(list(answers), torch.int32)
    context = Jagged.from_rows([trunk.row(int(r))[: int(a)] for r, a in zip(row, at, strict=True)], torch.int32)
    with run.peak() as peak:
        start = run.clock()
        branched = policy.score_branches(trunk, row, at, tokens)
        quick = run.clock() - start
    start = run.clock()
    whole = policy.score(context, tokens)
    slow = run.clock() - start
    gap = (branched.logprobs.values - whole.logprobs.values).abs()
    run.row(
        what=f"{rows} trunks of {length} × {per_trunk} branches of {answer}",
        seconds=quick,
        whole_contexts_s=slow,
        speed_up=slow / quick,
        peak_added_gb=peak["added_gb"],
        mean=float(gap.mean()),
        most=float(gap.max()),
    )
    run.check("mean gap of branches to whole contexts", float(gap.mean()), GAPS[run.dtype])
    if not run.small:
        run.check("branches are faster than whole contexts", slow / quick, 1.0, at_least=True)
