"""Samples and verifies the responses of a task that are not on disk yet, chunk by chunk."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import keyed_seeds, sample_fresh
from creditgraph.components.rollouts.rewards import finite_rewards
from creditgraph.components.text.templates import extract_answer
from creditgraph.lab.evaluate.items import Chunk, ItemStore, plan, short_hash
from creditgraph.lab.evaluate.sets import Problems
from creditgraph.pipeline.core.handles import Policy, Verifier
from creditgraph.pipeline.core.payloads import Rewards, Trajectories
from creditgraph.pipeline.core.streams import Stream

NODE = "evaluation"


@dataclass(kw_only=True)
class Work:
    """One task of one subject.

    Attributes:
        problems: problems of the task.
        store: records of the task.
        seed: random seed of the suite.
        contamination: the report on its problems in the training data.
    """

    problems: Problems
    store: ItemStore
    seed: int
    contamination: dict[str, Any] = field(default_factory=dict)

    @property
    def flagged(self) -> list[bool] | None:
        """Per problem, whether it is in the training data; None when that was not searched."""
        if self.contamination["status"] != "checked":
            return None
        hits = {item["problem"] for item in self.contamination["overlapping"] if item["flagged"]}
        return [number in hits for number in range(len(self.problems.ids))]

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks of the task."""
        task = self.problems.task
        return plan(len(self.problems.ids), task.greedy, task.samples, self.store.chunk_rows)

    def missing(self) -> list[Chunk]:
        """Chunks that are not on disk."""
        return [c for c in self.chunks if not self.store.done(c)]


def measure(work: Work, policy: Policy, verifier: Verifier, on_chunk: Callable[[Chunk, int], None]) -> None:
    """Samples and verifies every missing chunk; `on_chunk` gets each one and its right answers once it is on disk."""
    prompts = work.problems.prompts
    sampled = work.problems.task.sampling()
    greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=0)
    for chunk in work.missing():
        rows = torch.arange(chunk.first, chunk.last).repeat_interleave(chunk.samples)
        seeds = request_seeds(work, chunk)
        sampling = greedy if chunk.part == "greedy" else sampled
        responses = sample_fresh(policy, prompts, rows, seeds, sampling, torch.arange(len(rows)))
        rewards = finite_rewards(verifier.verify(prompts, responses))
        work.store.write(chunk, columns_of(work, chunk, rows, seeds, responses, rewards))
        on_chunk(chunk, int(rewards.correct.sum()))


def request_seeds(work: Work, chunk: Chunk) -> Tensor:
    """int64 [rows], keyed by suite seed, task, pass, problem and sample: models that are compared share their draws."""
    stream = Stream(work.seed, NODE, work.problems.name, chunk.part)
    return keyed_seeds(stream, work.problems.keys[chunk.first : chunk.last], 0, chunk.samples).reshape(-1)


def columns_of(
    work: Work, chunk: Chunk, rows: Tensor, seeds: Tensor, responses: Trajectories, rewards: Rewards
) -> dict[str, list[object]]:
    """The records of a chunk, by column of `items.SCHEMA`."""
    problems = work.problems
    prompts = problems.prompts
    numbers = rows.tolist()
    flagged = work.flagged
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
        "flagged": [None if flagged is None else flagged[i] for i in numbers],
    }
