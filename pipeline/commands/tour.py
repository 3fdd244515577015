"""`creditgraph tour`: sample, verify, localise, reset, and see credit change, on the embedded model."""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.compose import build_experiment, compose
from pipeline.payloads import Credit, Prompts, Rewards, StepErrors, Trajectories, Weights
from pipeline.report.page import visible

# Named by text: pipeline/ imports nothing of components/.
RUN_CREDIT = "components.bench.credit_run"
MOST_CHAINS = 4


def main(options: argparse.Namespace) -> int:
    """Walks through one batch of SRPO on the embedded task; waits for Enter between steps unless told not to."""
    console = Console(highlight=False, soft_wrap=True)
    wait = not options.yes and sys.stdin.isatty()
    experiment = build_experiment(compose(["recipe=toy_srpo", "prompts.batch=4", f"run.seed={options.seed}"]), "tour")
    console.print(Text("A 164 k-parameter model, its mistakes, and which of its steps are to blame.\nAbout five minutes; Ctrl-C ends it."))
    module: Any = importlib.import_module(RUN_CREDIT)
    with module.run_credit(experiment, Weights(version=0), options.seed) as run:
        story = Story.of(run.outputs)
    steps = (("Sample", sample), ("Verify", verify), ("Localise", localise), ("Reset", reset), ("Credit", credit), ("Go on", go_on))
    for number, (title, tell) in enumerate(steps, 1):
        console.print(Text(f"\n{number}. {title}\n", "bold"))
        for part in tell(story):
            console.print(part)
        if wait and number < len(steps):
            console.input(Text("\nEnter goes on ", "dim"))
    return 0


@dataclass(frozen=True)
class Story:
    """One problem of the batch: a failed response, its named first error, resets from there, and other chains.

    Attributes:
        problem, answer: the prompt and its reference answer.
        thoughts: of the failed response (the seed of the resets).
        step, source: its first error, 1-based, and how the answer that named it was read.
        chains, suffixes: rows (label, trained tokens, tokens, reward, reason, credit per trained token, thoughts).
    """

    problem: str
    answer: str
    thoughts: list[str]
    step: int
    source: str
    chains: list[tuple[str, int, int, float, str, float, list[str]]]
    suffixes: list[tuple[str, int, int, float, str, float, list[str]]]

    @staticmethod
    def of(outputs: dict[str, dict[str, Any]]) -> Story:
        """The first problem whose resets ended differently; the first problem when there is none."""
        prompts: Prompts = outputs["prompts"]["batch"]
        base: Trajectories = outputs["sampler"]["trajectories"]
        seeds: Trajectories = outputs["sampler"]["seeds"]
        suffixes: Trajectories = outputs["expander"]["trajectories"]
        errors: StepErrors = outputs["localizer"]["errors"]
        rewards: Rewards = outputs["rewards"]["rewards"]
        credit: Credit = outputs["advantage"]["credit"]

        def row(label: str, batch: Trajectories, i: int) -> tuple[str, int, int, float, str, float, list[str]]:
            at = int(rewards.index_of(batch.uid[i : i + 1]))
            trained = credit.mask.row(int(credit.index_of(batch.uid[i : i + 1])))
            values = credit.advantage.row(int(credit.index_of(batch.uid[i : i + 1])))[trained]
            mean = float(values.mean()) if len(values) else 0.0
            return label, len(values), len(trained), float(rewards.value[at]), visible(rewards.detail[at]), mean, _thoughts(batch.text[i])

        family = [[i for i, p in enumerate(suffixes.parent.tolist()) if p == uid] for uid in seeds.uid.tolist()]
        mixed = [
            k for k, rows in enumerate(family) if len({float(rewards.value[int(rewards.index_of(suffixes.uid[[i]]))]) for i in rows}) > 1
        ]
        k = mixed[0] if mixed else 0
        prompt = int(seeds.prompt_uid[k])
        place = prompts.uid.tolist().index(prompt)
        error = int(errors.index_of(seeds.uid[k : k + 1]))
        chains = [i for i, p in enumerate(base.prompt_uid.tolist()) if p == prompt][:MOST_CHAINS]
        return Story(
            problem=visible(prompts.text[place]),
            answer=visible(prompts.answer[place]),
            thoughts=_thoughts(seeds.text[k]),
            step=int(errors.step[error]),
            source=visible(errors.source[error]),
            chains=[row(f"chain {n}", base, i) for n, i in enumerate(chains, 1)],
            suffixes=[row(f"suffix {n}", suffixes, i) for n, i in enumerate(family[k], 1)],
        )


def sample(story: Story) -> list[RenderableType]:
    """The problem and a response."""
    return [
        Text(f"A problem, modulo 13:\n\n  {story.problem}\n\nA response of the policy, one thought a line:\n"),
        *(Text(f"    {k}  {t}") for k, t in enumerate(story.thoughts, 1)),
    ]


def verify(story: Story) -> list[RenderableType]:
    """Outcomes."""
    return [
        Text(f"The answer is {story.answer}, so the response above is wrong: reward 0. Other chains:\n"),
        *(Text(f"    {label}  reward {reward:g}  {reason}") for label, _, _, reward, reason, _, _ in story.chains),
        Text("\nAll that is known of each is one number, at its end."),
    ]


def localise(story: Story) -> list[RenderableType]:
    """The policy's own verdict."""
    return [
        Text(f"The same policy is asked which step went wrong. It says: thought {story.step} ({story.source}).\n"),
        *(
            Text(f"  {'→' if k == story.step else ' '} {k}  {t}", "bold" if k == story.step else "")
            for k, t in enumerate(story.thoughts, 1)
        ),
    ]


def reset(story: Story) -> list[RenderableType]:
    """Fresh suffixes."""
    shown = slice(max(story.step - 1, 0), story.step + 2)
    right = sum(s[3] > 0 for s in story.suffixes)
    return [
        Text(f"What stands before thought {story.step} is kept; the rest is sampled {len(story.suffixes)} times anew:\n"),
        *(
            Text(f"    {label}  reward {reward:g}  {' | '.join(thoughts[shown])} …")
            for label, _, _, reward, _, _, thoughts in story.suffixes
        ),
        Text(f"\n{right} of {len(story.suffixes)} end right from there; the response above did not."),
    ]


def credit(story: Story) -> list[RenderableType]:
    """Credit of whole chains beside that of suffixes."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "trained tokens", "reward", "credit per token"):
        table.add_column(name)
    for label, trained, tokens, reward, _, value, _ in (*story.chains, *story.suffixes):
        style = "bold blue" if value > 0 else "bold yellow" if value < 0 else "dim"
        table.add_row(Text(label), f"{trained} of {tokens}", f"{reward:g}", Text(f"{value:+.2f}", style))
    return [
        Text("Rewards are compared within a group. Chains share only the prompt, so credit goes to\nevery token of a chain."),
        Text("Suffixes share a prefix too, so credit goes to what came after it:\n"),
        table,
    ]


def go_on(story: Story) -> list[RenderableType]:
    """What to type next."""
    lines = (
        ("creditgraph train recipe=toy_srpo run.record.every=1", "train with this"),
        ("creditgraph report runs/toy_srpo-s0", "every rollout and its credit, in a browser"),
        ("creditgraph credit recipe=toy_grpo,toy_srpo runs/toy_srpo-s0", "methods side by side"),
        ("creditgraph graph recipe=toy_srpo", "the graph you have walked through"),
    )
    return [Text(f"  {command}\n      {what}") for command, what in lines]


def _thoughts(text: str) -> list[str]:
    parts = (t.strip() for t in text.split("</thought>"))
    return [visible(t) for t in parts if t]
