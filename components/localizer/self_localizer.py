"""Self-localisation: the policy names the first wrong step of its own failure (SRPO)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from creditgraph.components.localizer.base import Localizer, Outputs
from creditgraph.components.rollouts.second_turn import encoded, problem_of
from creditgraph.components.rollouts.thoughts import num_thoughts, steps_of, thought_texts
from creditgraph.components.text.templates import localize_prompt
from creditgraph.pipeline.core.component import Count
from creditgraph.pipeline.core.handles import Policy, Requests, Sampling
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Trajectories
from creditgraph.pipeline.core.streams import keys_within

SOURCES = ("boxed", "step", "default")
_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{\s*)?(-?\d+)\s*\.?\s*\}")
_STEP = re.compile(r"\bstep\s*#?\s*(\d+)", re.IGNORECASE)


class Verdict(NamedTuple):
    """The step that a response names, how it was read, and whether the response also named numbers that are no step."""

    step: int
    source: str
    out_of_range: bool


def parse_step(text: str, count: int) -> Verdict:
    """The step of `count` steps that a response names.

    The last \\boxed{integer} from 1 to `count` ("boxed"), else the last "Step N" from 1 to `count` ("step"), else 1
    ("default"). A number out of range names no step: it is most often the problem's answer.

    >>> tuple(parse_step("Step 2 is fine, so \\\\boxed{3}", 8)), tuple(parse_step("Step 3: it is \\\\boxed{42}", 8))
    ((3, 'boxed', False), (3, 'step', True))
    """
    out_of_range = False
    found: tuple[int, str] | None = None
    for pattern, source in ((_BOXED, "boxed"), (_STEP, "step")):
        numbers = [int(number) for number in pattern.findall(text)]
        steps = [number for number in numbers if 1 <= number <= count]
        out_of_range = out_of_range or len(steps) < len(numbers)
        # The last step counts: responses name earlier steps while they check them in order.
        if steps and found is None:
            found = (steps[-1], source)
    return Verdict(*(found or (1, "default")), out_of_range)


class SelfLocalizer(Localizer):
    """Asks the same policy, in one turn that is not trained on, which step of its wrong solution is the first error.

    A response that names no step counts as step 1, which resets to the prompt. The share of each source is logged.
    """

    paper = "2605.25507"
    metrics = (
        Metric("boxed_share", "share", "failures whose step was read from a box"),
        Metric("step_share", "share", "failures whose step was read from the text"),
        Metric(
            "default_share",
            "share",
            "failures for which the response named no step in range",
            alarm="the policy never named a step of its failures, so all were reset to the prompt. Read what it is "
            "asked with `creditgraph data preview`, and give it enough max_tokens; a stronger model, or "
            "localizer.uniform, names steps.",
        ),
        Metric("out_of_range_share", "share", "failures whose response named a number that is none of the steps"),
        *Localizer.metrics,
        Metric("sampled_tokens", "tokens", "tokens of the responses"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Sampling of the response."""

        temperature: float = 0.3
        """sampling temperature of the response"""
        top_p: float = 0.95
        """keeps the smallest set of tokens with this probability; the sampler's, as in the authors' release"""
        max_tokens: int = 4096
        """budget of the response in tokens"""
        stop: tuple[str, ...] = ()
        """strings that end the response, in addition to end of text"""
        reference: bool = False
        """show the problem's reference solution too, where it has one (InT); task families' own prompts cannot"""

    config: Config

    @classmethod
    def shown_responses(cls, config: Any) -> int:
        """The failure."""
        return 1

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy) -> Outputs:
        """Samples one response per failure."""
        texts, num_tokens = self._responses(prompts, failures, policy)
        parsed = [parse_step(text, k) for text, k in zip(texts, num_thoughts(failures).tolist(), strict=True)]
        source = [verdict.source for verdict in parsed]
        shares = {f"{name}_share": source.count(name) / max(len(failures), 1) for name in SOURCES}
        out_of_range = sum(verdict.out_of_range for verdict in parsed) / max(len(failures), 1)
        self.context.log(**shares, out_of_range_share=out_of_range, sampled_tokens=Count(num_tokens))
        return self.outputs(failures, torch.tensor([verdict.step for verdict in parsed], dtype=torch.int64), source)

    def _solution(self, prompts: Prompts, row: int) -> list[str]:
        return steps_of(prompts.solution[row]) if self.config.reference else []

    def _responses(self, prompts: Prompts, failures: Trajectories, policy: Policy) -> tuple[list[str], int]:
        """The response about each failure, and the number of sampled tokens."""
        if not len(failures):
            return [], 0
        tokenizer = policy.tokenizer
        rows = prompts.index_of(failures.prompt_uid).tolist()
        texts = [
            localize_prompt(*problem_of(prompts, row), steps, tokenizer, self._solution(prompts, row))
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
