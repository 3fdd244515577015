"""Thoughts of trajectories: their number, their text, and the first wrong one if the task provides it."""

import re
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.tasks import TASKS
from creditgraph.components.text.stops import decode_rows
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories

STEP_FRACTION = Metric(
    "step_fraction", "share", "(localised step − 1) / thoughts, mean over failures: 0 is the first thought"
)


_STEPS = re.compile(r"(?<=</thought>)|\n")


def num_thoughts(trajectories: Trajectories) -> Tensor:
    """int64 [N], at least 1: a response without thought ends counts as one thought."""
    return trajectories.thought_ends.lengths.clamp(min=1)


def thought_texts(trajectories: Trajectories, tokenizer: Any) -> list[list[str]]:
    """The thoughts of each row as text, stop strings kept; at least one per row, which may be empty."""
    texts = []
    for tokens, ends in zip(trajectories.response_tokens.to_lists(), trajectories.thought_ends.to_lists(), strict=True):
        bounds = [0, *(ends or [len(tokens)])]
        texts.append(decode_rows(tokenizer, [tokens[a:b] for a, b in pairwise(bounds)]))
    return texts


def has_oracle(prompts: Prompts) -> bool:
    """Whether the first wrong step of every response to these prompts is known."""
    return all(row.get("task") in TASKS for row in prompts.metadata)


def true_first_errors(prompts: Prompts, trajectories: Trajectories, tokenizer: Any) -> Tensor:
    """int64 [N], 1-based: the first wrong thought of each response, in [1, number of thoughts].

    A response that ends too early, or has no wrong thought at all, has its error at its last thought.
    """
    rows = prompts.index_of(trajectories.prompt_uid).tolist()
    texts = thought_texts(trajectories, tokenizer)
    problems = [prompts.metadata[row] for row in rows]
    errors = [TASKS[p["task"]].first_error(p, steps) for p, steps in zip(problems, texts, strict=True)]
    step = torch.tensor(errors, dtype=torch.int64)
    count = num_thoughts(trajectories)
    return torch.where(step > 0, torch.minimum(step, count), count)


def steps_of(solution: str) -> list[str]:
    """The steps of a worked solution: its thoughts, or its lines.

    >>> steps_of("a </thought> b </thought>"), steps_of("a\\n\\nb"), steps_of("")
    (['a </thought>', ' b </thought>'], ['a', 'b'], [])
    """
    return [step for step in _STEPS.split(solution) if step.strip()]
