"""Second turns: the policy answers a problem again, with earlier attempts in its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from components.rollouts.requests import sample_fresh
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Policy, Prompts, Sampling, Trajectories


def second_turn(
    policy: Policy,
    prompts: Prompts,
    firsts: Trajectories,
    asked: Sequence[str],
    seed: Tensor,
    sampling: Sampling,
    uid: Tensor,
) -> Trajectories:
    """Samples one response per row of `firsts` [N] to the text `asked` [N].

    The new rows keep the prompt they were sampled from as their `prompt_tokens`, so a learner conditions on what the
    policy saw. Their `prompt_uid` is the original problem, which they are judged by; `parent` is the first attempt,
    nothing is inherited; the group is the first attempt's.
    """
    encoded = [policy.tokenizer.encode(text, add_special_tokens=False) for text in asked]
    rows = prompts.select(prompts.index_of(firsts.prompt_uid))
    rows = rows.replace(tokens=Jagged.from_rows(encoded, torch.int32), text=list(asked))
    made = sample_fresh(policy, rows, torch.arange(len(firsts)), seed, sampling, uid)
    return made.replace(parent=firsts.uid.clone(), group=firsts.group.clone())


def unended(trajectories: Trajectories) -> Tensor:
    """bool [N]: rows that ran out of tokens or thoughts before they ended."""
    return torch.tensor([reason in ("length", "thoughts") for reason in trajectories.finish_reason], dtype=torch.bool)
