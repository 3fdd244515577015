"""Failures and their records by hand: where they were reset, where they went wrong, how their suffixes ended."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from creditgraph.components.models.load import load_tokenizer
from creditgraph.components.tasks import TASKS
from creditgraph.lab.localization.records import Failure
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Payload, Prompts, Rewards, StepErrors, Trajectories
from creditgraph.pipeline.run.recording import write_payload

CHAINS = TASKS["chains"]

PROMPT = 1000


@dataclass(frozen=True)
class Reset:
    """A failure by hand: its true first error, where it was reset, and the outcomes of its suffixes (None: invalid)."""

    first_error: int
    step: int
    suffixes: tuple[bool | None, ...]


def failure(uid: int, steps: int = 6, step: int = 1, **changes: Any) -> Failure:
    values: dict[str, Any] = {
        "uid": uid,
        "iteration": 0,
        "problem": f"Problem {uid}?",
        "answer": "7",
        "solution": "",
        "steps": [f"Step of problem {uid}, number {i} </thought>" for i in range(1, steps + 1)],
        "step": step,
        "source": "boxed",
        "oracle": None,
        "suffixes": 0,
        "correct": 0,
    }
    return Failure(**values | changes)


def _put(run: Path, output: str, iteration: int, payload: Payload) -> None:
    file = run / "record" / output / f"{iteration:06d}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_payload(file, payload)


def _rows(tokenizer: Any, uid: list[int], texts: list[list[str]], prompt: str, **changes: Any) -> Trajectories:
    """Trajectories of these thoughts."""
    # A word of the vocabulary includes the space before it.
    rows = [[tokenizer.encode(f" {thought}", add_special_tokens=False) for thought in thoughts] for thoughts in texts]
    tokens = Jagged.from_rows([[*chain.from_iterable(row)] for row in rows], torch.int32)
    ends = [torch.tensor([len(thought) for thought in row]).cumsum(0).int() for row in rows]
    values: dict[str, Any] = {
        "uid": torch.tensor(uid),
        "prompt_uid": torch.full((len(uid),), PROMPT),
        "group": torch.zeros(len(uid), dtype=torch.int64),
        "parent": torch.full((len(uid),), -1),
        "prompt_tokens": Jagged.from_rows([tokenizer.encode(prompt)] * len(uid), torch.int32),
        "response_tokens": tokens,
        "inherited": torch.zeros(len(uid), dtype=torch.int64),
        "engine_logprobs": tokens.with_values(torch.full((len(tokens.values),), -0.5)),
        "entropies": tokens.with_values(torch.ones(len(tokens.values))),
        "thought_ends": Jagged.from_rows(ends, torch.int32),
        "policy_version": torch.zeros(len(uid), dtype=torch.int64),
        "finish_reason": ["final"] * len(uid),
        "text": ["".join(thoughts) for thoughts in texts],
    }
    return Trajectories(**values | changes)


def record(run: Path, iteration: int, resets: list[Reset], oracle: bool) -> None:
    tokenizer = load_tokenizer(ModelSpec(path="tiny"))
    problem = CHAINS.generate(seed=0, index=0)
    question = problem["question"]
    metadata = problem if oracle else {"question": question, "template": "thought"}
    right = CHAINS.solution(problem)
    base = 100 * (iteration + 1)
    uid = [base + i for i in range(len(resets))]
    texts = []
    for reset in resets:
        wrong = list(right)
        wrong[reset.first_error - 1] = f"s{reset.first_error} </thought>"
        texts.append(wrong)
    failures = _rows(tokenizer, uid, texts, question)
    outcomes = [(u, outcome) for u, reset in zip(uid, resets, strict=True) for outcome in reset.suffixes]
    parents = torch.tensor([u for u, _ in outcomes])
    suffixes = _rows(
        tokenizer, [base + 50 + i for i in range(len(outcomes))], [right] * len(outcomes), question, parent=parents
    )
    fresh = _rows(tokenizer, [base + 40], [right], question)
    trained = Trajectories.concat([fresh, suffixes])
    correct = torch.tensor([True, *(outcome is True for _, outcome in outcomes)])
    valid = torch.tensor([True, *(outcome is not None for _, outcome in outcomes)])
    prompts = Prompts(
        uid=torch.tensor([PROMPT]),
        tokens=Jagged.from_rows([tokenizer.encode(question)], torch.int32),
        text=[question],
        answer=["7"],
        metadata=[metadata],
    )
    tokens = trained.response_tokens
    credit = Credit(
        uid=trained.uid,
        advantage=tokens.spread(torch.tensor([0.0] + [2.0] * len(outcomes))),
        mask=tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool)),
    )
    _put(run, "prompts.batch", iteration, prompts)
    _put(run, "sampler.failures", iteration, failures)
    steps = torch.tensor([reset.step for reset in resets])
    _put(run, "localizer.errors", iteration, StepErrors(uid=failures.uid, step=steps, source=["boxed"] * len(uid)))
    # As in a real run, the suffixes are recorded twice: by their own node and in the merged batch.
    _put(run, "expander.trajectories", iteration, suffixes)
    _put(run, "buffer.trajectories", iteration, trained)
    rewards = Rewards(uid=trained.uid, value=correct.float(), correct=correct, valid=valid, detail=[""] * len(trained))
    _put(run, "rewards.rewards", iteration, rewards)
    _put(run, "advantage.credit", iteration, credit)
