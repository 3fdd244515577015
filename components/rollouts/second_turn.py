"""Second turns: the policy is shown earlier attempts at a problem and writes a response about them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from creditgraph.components.rollouts.requests import sample_fresh
from creditgraph.components.rollouts.thoughts import thought_texts
from creditgraph.components.text.templates import Mode, retry_prompt
from creditgraph.pipeline.core.handles import Policy, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Trajectories


def problem_of(prompts: Prompts, row: int) -> tuple[dict[str, Any], str]:
    """Metadata of a prompt, and its question without instructions: the first two arguments of a prompt template."""
    metadata = prompts.metadata[row]
    return metadata, str(metadata.get("question", prompts.text[row]))


def encoded(tokenizer: Any, texts: Sequence[str]) -> Jagged:
    """Jagged int32: the tokens of each text, without special tokens added."""
    return Jagged.from_rows([tokenizer.encode(text, add_special_tokens=False) for text in texts], torch.int32)


def second_turn(
    policy: Policy,
    prompts: Prompts,
    firsts: Trajectories,
    texts: Sequence[str],
    seed: Tensor,
    sampling: Sampling,
    uid: Tensor,
) -> Trajectories:
    """Samples one response per row of `firsts` [N] to the prompt `texts` [N].

    The new rows keep the prompt they were sampled from as their `prompt_tokens`, so a learner conditions on the same
    prompt as the policy. Their `prompt_uid` is the original problem, by which they are verified; `parent` is the first
    attempt, nothing is inherited; the group is the first attempt's.
    """
    shown = prompts.select(prompts.index_of(firsts.prompt_uid))
    shown = shown.replace(tokens=encoded(policy.tokenizer, texts), text=list(texts))
    responses = sample_fresh(policy, shown, torch.arange(len(firsts)), seed, sampling, uid)
    return responses.replace(parent=firsts.uid.clone(), group=firsts.group.clone())


def retries(
    policy: Policy, prompts: Prompts, firsts: Trajectories, mode: Mode, seed: Tensor, sampling: Sampling, uid: Tensor
) -> Trajectories:
    """Samples a second attempt per first one [N], by a retry prompt that shows it; one without room has no tokens.

    The prompt does not say whether the first attempt is right; other rules are those of `second_turn`.
    """
    rows = prompts.index_of(firsts.prompt_uid).tolist()
    texts = [
        retry_prompt(*problem_of(prompts, row), attempt, policy.tokenizer, mode)
        for row, attempt in zip(rows, thought_texts(firsts, policy.tokenizer), strict=True)
    ]
    return second_turn(policy, prompts, firsts, texts, seed, sampling, uid)
