"""Asks a policy the items of a task that are not on disk yet, judges the answers, and writes them chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from components.rollouts.requests import keyed_seeds, sample_fresh
from components.rollouts.rewards import finite_rewards
from components.text.templates import extract_answer
from pipeline.app.evaluate.items import Chunk, ItemStore, plan, short_hash
from pipeline.app.evaluate.sets import Problems
from pipeline.core.payloads import Policy, Prompts, Rewards, Sampling, Trajectories, Verifier
from pipeline.core.streams import Stream

NODE = "evaluation"


@dataclass(frozen=True, kw_only=True)
class Work:
    """One task to be measured.

    Attributes:
        problems: of the task.
        store: its records.
        flagged: per problem, whether it stands in the training data; None when nobody looked.
        seed: of the suite.
    """

    problems: Problems
    store: ItemStore
    flagged: Sequence[bool] | None
    seed: int

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks of the task."""
        task = self.problems.task
        return plan(len(self.problems.ids), task.greedy, task.samples, self.store.chunk_rows)

    def of(self, part: str) -> list[Chunk]:
        """The chunks of one pass."""
        return [c for c in self.chunks if c.part == part]

    def missing(self) -> list[Chunk]:
        """Chunks that are not on disk."""
        return [c for c in self.chunks if not self.store.done(c)]


def measure(work: Work, policy: Policy, verifier: Verifier, told: Callable[[Chunk, int], None]) -> None:
    """Asks and judges every missing chunk; `told` gets each chunk and its right answers once it is on disk."""
    problems = work.problems
    greedy = replace(problems.task.sampling(), temperature=0.0, top_p=1.0, top_k=0)
    for chunk in work.missing():
        rows = torch.arange(chunk.first, chunk.last).repeat_interleave(chunk.samples)
        sampling = greedy if chunk.part == "greedy" else problems.task.sampling()
        seeds = request_seeds(work, chunk)
        responses, rewards = ask(policy, verifier, problems.prompts, rows, seeds, sampling)
        work.store.write(chunk, columns_of(work, chunk, rows, seeds, responses, rewards))
        told(chunk, int(rewards.correct.sum()))


def request_seeds(work: Work, chunk: Chunk) -> Tensor:
    """int64 [rows]: keyed by suite seed, task, pass, problem and sample, so that models compared get the same random
    numbers."""
    stream = Stream(work.seed, NODE, work.problems.name, chunk.part)
    return keyed_seeds(stream, work.problems.keys[chunk.first : chunk.last], 0, chunk.samples).reshape(-1)


def ask(
    policy: Policy, verifier: Verifier, prompts: Prompts, rows: Tensor, seeds: Tensor, sampling: Sampling
) -> tuple[Trajectories, Rewards]:
    """One judged response per entry of `rows` [N], prompt rows; a reward that is not finite is 0 and invalid."""
    responses = sample_fresh(policy, prompts, rows, seeds, sampling, torch.arange(len(rows)))
    return responses, finite_rewards(verifier.verify(prompts, responses))


def columns_of(
    work: Work, chunk: Chunk, rows: Tensor, seeds: Tensor, responses: Trajectories, rewards: Rewards
) -> dict[str, list[object]]:
    """The records of a chunk, by column of `items.SCHEMA`."""
    problems, numbers = work.problems, rows.tolist()
    prompts = problems.prompts
    hashes = {i: short_hash(prompts.tokens.row(i).numpy().tobytes()) for i in range(chunk.first, chunk.last)}
    logprobs = responses.engine_logprobs.with_values(responses.engine_logprobs.values.double())
    return {
        "task": [problems.name] * len(numbers),
        "pass": [chunk.part] * len(numbers),
        "problem": numbers,
        "problem_id": [problems.ids[i] for i in numbers],
        "prompt_hash": [hashes[i] for i in numbers],
        "sample": [j % chunk.samples for j in range(len(numbers))],
        "seed": seeds.tolist(),
        "tokens": responses.response_tokens.to_lists(),
        "text": [t.encode("utf-8", "replace").decode("utf-8") for t in responses.text],
        "answer": [extract_answer(t) for t in responses.text],
        "correct": rewards.correct.tolist(),
        "valid": rewards.valid.tolist(),
        "reason": list(rewards.detail),
        "reward": rewards.value.tolist(),
        "finish_reason": list(responses.finish_reason),
        "logprob": logprobs.sum().tolist(),
        "flagged": [None if work.flagged is None else bool(work.flagged[i]) for i in numbers],
    }
