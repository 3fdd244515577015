"""Self-localisation: the policy names the first wrong step of its own failure (SRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from components.localizer.base import Localizer, Outputs
from components.rollouts.second_turn import encoded, problem_of
from components.rollouts.thoughts import num_thoughts, thought_texts
from components.text.templates import localize_prompt
from pipeline.core.component import Count
from pipeline.core.handles import Policy, Requests, Sampling
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Trajectories
from pipeline.core.streams import keys_within

SOURCES = ("boxed", "step", "default")
_BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")
_STEP = re.compile(r"\bstep\s*#?\s*(\d+)", re.IGNORECASE)


def parse_step(text: str, count: int) -> tuple[int, str]:
    """The step that a response names, clamped to [1, count], and its source.

    Last \\boxed{integer} ("boxed"), else last "Step N" ("step"), else 1 ("default").

    >>> parse_step("Step 2 is fine, so \\\\boxed{3}", 8), parse_step("It is Step 12.", 8), parse_step("?", 8)
    ((3, 'boxed'), (8, 'step'), (1, 'default'))
    """
    for pattern, source in ((_BOXED, "boxed"), (_STEP, "step")):
        numbers = pattern.findall(text)
        if numbers:
            # The last number counts: responses name earlier steps while they check them in order.
            return min(max(int(numbers[-1]), 1), max(count, 1)), source
    return 1, "default"


class SelfLocalizer(Localizer):
    """Asks the same policy, in one turn that is not trained on, which step of its wrong solution is the first error.

    A response that names no step counts as step 1, which resets to the prompt. The share of each source is logged.
    """

    paper = "2605.25507"
    metrics = (
        Metric("boxed_share", "share", "failures whose step was read from a box"),
        Metric("step_share", "share", "failures whose step was read from the text"),
        Metric("default_share", "share", "failures for which the response named no step"),
        *Localizer.metrics,
        Metric("sampled_tokens", "tokens", "tokens of the responses"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Sampling of the response."""

        temperature: float = 0.3
        """sampling temperature of the response"""
        top_p: float = 1.0
        """keeps the smallest set of tokens with this probability"""
        max_tokens: int = 4096
        """budget of the response in tokens"""
        stop: tuple[str, ...] = ()
        """strings that end the response, in addition to end of text"""

    config: Config

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy) -> Outputs:
        """Samples one response per failure."""
        texts, num_tokens = self._responses(prompts, failures, policy)
        parsed = [parse_step(text, k) for text, k in zip(texts, num_thoughts(failures).tolist(), strict=True)]
        source = [how for _, how in parsed]
        shares = {f"{name}_share": source.count(name) / max(len(failures), 1) for name in SOURCES}
        self.context.log(**shares, sampled_tokens=Count(num_tokens))
        return self.outputs(failures, torch.tensor([step for step, _ in parsed], dtype=torch.int64), source)

    def _responses(self, prompts: Prompts, failures: Trajectories, policy: Policy) -> tuple[list[str], int]:
        """The response about each failure, and the number of sampled tokens."""
        if not len(failures):
            return [], 0
        tokenizer = policy.tokenizer
        rows = prompts.index_of(failures.prompt_uid).tolist()
        texts = [
            localize_prompt(*problem_of(prompts, row), steps, tokenizer)
            for row, steps in zip(rows, thought_texts(failures, tokenizer), strict=True)
        ]
        settings = self.config
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stop=tuple(settings.stop),
        )
        seed = self.context.rng().seeds(keys_within(failures.prompt_uid))
        done = policy.generate(Requests(tokens=encoded(tokenizer, texts), seed=seed, sampling=sampling))
        return done.text, len(done.tokens.values)
