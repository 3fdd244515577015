"""Self-localisation: the policy names the first wrong step of its own failed chain."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import torch

from components.rollouts.thoughts import STEP_FRACTION, num_thoughts, thought_texts
from components.text.templates import localize_prompt
from pipeline.core.component import Component, Count, same_rows
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Policy, Prompts, Requests, Sampling, StepErrors, Trajectories
from pipeline.core.streams import keys_within

SOURCES = ("boxed", "step", "default")
_BOXED = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")
_STEP = re.compile(r"\bstep\s*#?\s*(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """One step per failure."""

    errors: Annotated[StepErrors, same_rows("failures")]


def parse_step(text: str, count: int) -> tuple[int, str]:
    """The step named by an answer, clamped to [1, count], and how it was found.

    Last \\boxed{integer} ("boxed"), else last "Step N" ("step"), else 1 ("default").

    >>> parse_step("Step 2 is fine, so \\\\boxed{3}", 8), parse_step("It is Step 12.", 8), parse_step("?", 8)
    ((3, 'boxed'), (8, 'step'), (1, 'default'))
    """
    for pattern, source in ((_BOXED, "boxed"), (_STEP, "step")):
        found = pattern.findall(text)
        if found:
            return min(max(int(found[-1]), 1), max(count, 1)), source
    return 1, "default"


class SelfLocalizer(Component):
    """One turn of the same policy: here is your wrong solution, which step is the originating error? Not trained on.

    Fails softly: an answer that names no step counts as step 1, which resets to the prompt. The share of each way an
    answer was read is logged.
    """

    paper = "2605.25507"
    metrics = (
        Metric("boxed_share", "share", "failures whose step was read from a box"),
        Metric("step_share", "share", "failures whose step was read from the text"),
        Metric("default_share", "share", "failures whose answer named no step"),
        *STEP_FRACTION,
        Metric("sampled_tokens", "tokens", "tokens of the answers"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """How the answer is sampled."""

        temperature: float = 0.3
        """of the answer"""
        top_p: float = 1.0
        """keeps the smallest set of tokens with this probability"""
        max_tokens: int = 4096
        """budget of the answer in tokens"""
        stop: tuple[str, ...] = ()
        """strings that end the answer, besides end of text"""

    config: Config

    def run(self, *, prompts: Prompts, failures: Trajectories, policy: Policy) -> Outputs:
        """Asks once per failure."""
        texts, tokens = self._ask(prompts, failures, policy)
        count = num_thoughts(failures)
        found = [parse_step(text, k) for text, k in zip(texts, count.tolist(), strict=True)]
        step = torch.tensor([s for s, _ in found], dtype=torch.int64)
        source, rows = [how for _, how in found], max(len(failures), 1)
        self.context.log(
            **{f"{name}_share": source.count(name) / rows for name in SOURCES},
            step_fraction=float(((step - 1) / count).sum()) / rows,
            sampled_tokens=Count(tokens),
        )
        return Outputs(errors=StepErrors(uid=failures.uid, step=step, source=source))

    def _ask(self, prompts: Prompts, failures: Trajectories, policy: Policy) -> tuple[list[str], int]:
        """The answer for each failure, and the number of sampled tokens."""
        if not len(failures):
            return [], 0
        tokenizer, rows = policy.tokenizer, prompts.index_of(failures.prompt_uid).tolist()
        asked = [
            localize_prompt(prompts.metadata[row], question_of(prompts, row), steps, tokenizer)
            for row, steps in zip(rows, thought_texts(failures, tokenizer), strict=True)
        ]
        settings = self.config
        done = policy.generate(
            Requests(
                tokens=Jagged.from_rows(
                    [tokenizer.encode(text, add_special_tokens=False) for text in asked], torch.int32
                ),
                seed=self.context.rng().seeds(keys_within(failures.prompt_uid)),
                sampling=Sampling(
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=settings.max_tokens,
                    stop=tuple(settings.stop),
                ),
            )
        )
        return done.text, len(done.tokens.values)


def question_of(prompts: Prompts, row: int) -> str:
    """The problem itself, without the instructions around it."""
    return str(prompts.metadata[row].get("question", prompts.text[row]))
