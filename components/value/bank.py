"""Reference continuations whose probability tells a state's value: answers behind an exit text, and solutions of the same problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from components.text.templates import extract_answer
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Rewards, Trajectories

EMPTY_BANK_SHARE = Metric(
    "empty_bank_share", "share", "trajectories without a reference answer to score; their values are 0"
)


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How answers are asked for and which ones."""

    exit_text: str = "</think>\n\nThe final answer is \\boxed{"
    """put behind a state to ask for the answer at once; its own probability does not count"""
    answer_end: str = "}"
    """closes the answer and counts, so that 1 is not a part of 12"""
    length_normalise: bool = True
    """geometric mean of the token probabilities, averaged over references; false: their product, summed over
    references"""
    bank: Literal["auto", "reference", "group"] = "auto"
    """the dataset's answer, the answers of the problem's own correct trajectories, or (auto) the second where the first
    is missing"""
    references: int = 4
    """N, most references per trajectory"""

    def __post_init__(self) -> None:
        if self.references < 1:
            raise ValueError(f"references is {self.references}; wanted at least 1.")
        if not self.exit_text or not self.answer_end:
            raise ValueError(
                "exit_text and answer_end must not be empty: the answer needs a place that asks for it and one that "
                "ends it."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Bank:
    """References as token sequences.

    Attributes:
        tokens: Jagged int32 [E rows], the distinct ones.
        scored: int64 [E], number of last tokens of each whose probability counts.
        entries: Jagged int64 [N rows], rows of `tokens` that are the references of each trajectory.
        reward: float64, ζ of each of `entries.values`.
    """

    tokens: Jagged
    scored: Tensor
    entries: Jagged
    reward: Tensor


def encode_answer(tokenizer: Any, exit_text: str, answer: str, answer_end: str) -> tuple[list[int], int]:
    """Tokens of exit text, answer and its end as one text, and how many of the last ones carry the answer and its end.

    A token that holds a piece of both exit text and answer counts as answer. ([], 0) when no token carries the answer.
    """
    encoded = tokenizer(exit_text + answer + answer_end, add_special_tokens=False, return_offsets_mapping=True)
    begin, end = len(exit_text), len(exit_text) + len(answer)
    offsets = encoded["offset_mapping"]
    if not any(first < end and last > begin for first, last in offsets):
        return [], 0
    return list(encoded["input_ids"]), sum(last > begin for _, last in offsets)


def answer_bank(
    tokenizer: Any, prompts: Prompts, trajectories: Trajectories, rewards: Rewards | None, settings: AnswerSettings
) -> Bank:
    """The answers each trajectory is held against, with exit text; none where neither dataset nor correct trajectories give one."""
    rows = prompts.index_of(trajectories.prompt_uid).tolist()
    own = correct_rows(trajectories, rewards) if settings.bank != "reference" else {}
    found: dict[int, list[tuple[str, float]]] = {}
    for row in dict.fromkeys(rows):
        reference = prompts.answer[row].strip()
        if reference and settings.bank != "group":
            found[row] = [(reference, 1.0)]
            continue
        members = own.get(int(prompts.uid[row]), [])
        answers = {extract_answer(trajectories.text[i]) or "": reward for i, reward in reversed(members)}
        found[row] = [(a, answers[a]) for a in reversed(answers) if a][: settings.references]
    encoded: dict[str, tuple[list[int], int]] = {}
    for answer in dict.fromkeys(a for refs in found.values() for a, _ in refs):
        tokens, scored = encode_answer(tokenizer, settings.exit_text, answer, settings.answer_end)
        if tokens:
            encoded[answer] = (tokens, scored)
    place = {answer: i for i, answer in enumerate(encoded)}
    usable = [[(place[a], reward) for a, reward in found[row] if a in place] for row in rows]
    return Bank(
        tokens=Jagged.from_rows([t for t, _ in encoded.values()], torch.int32),
        scored=torch.tensor([n for _, n in encoded.values()], dtype=torch.int64),
        entries=Jagged.from_rows([[e for e, _ in refs] for refs in usable], torch.int64),
        reward=torch.tensor([reward for refs in usable for _, reward in refs], dtype=torch.float64),
    )


def correct_rows(trajectories: Trajectories, rewards: Rewards | None) -> dict[int, list[tuple[int, float]]]:
    """Prompt uid → (row, reward) of its correct trajectories, in order."""
    found: dict[int, list[tuple[int, float]]] = {}
    if rewards is None:
        return found
    good = (rewards.correct & rewards.valid).nonzero(as_tuple=True)[0]
    for row, uid, reward in zip(
        good.tolist(), trajectories.prompt_uid[good].tolist(), rewards.value[good].tolist(), strict=True
    ):
        found.setdefault(uid, []).append((row, reward))
    return found


def continuation_bank(trajectories: Trajectories, rewards: Rewards, boundary: Jagged, references: int) -> Bank:
    """What correct trajectories of the same problem write behind as many thoughts as each boundary's state holds.

    Distinct continuations only, because equal ones are one event; nothing behind the end of a response. `entries` has
    one row per boundary (`boundary.values`, response tokens before it).
    """
    good, thoughts = correct_rows(trajectories, rewards), trajectories.thought_ends.to_lists()
    responses = trajectories.response_tokens
    held = boundary.to_lists()
    kept: dict[tuple[int, int], list[tuple[int, float]]] = {}
    place: dict[tuple[int, ...], int] = {}
    entries: list[list[int]] = []
    reward: list[float] = []
    for i, uid in enumerate(trajectories.prompt_uid.tolist()):
        for bound in held[i]:
            count = sum(end <= bound for end in thoughts[i])
            if bound == held[i][-1]:
                entries.append([])
                continue
            if (uid, count) not in kept:
                kept[uid, count] = _suffixes(responses, thoughts, good.get(uid, []), count, references, place)
            entries.append([e for e, _ in kept[uid, count]])
            reward += [r for _, r in kept[uid, count]]
    tokens = Jagged.from_rows([list(t) for t in place], torch.int32)
    return Bank(
        tokens=tokens,
        scored=tokens.lengths,
        entries=Jagged.from_rows(entries, torch.int64),
        reward=torch.tensor(reward, dtype=torch.float64),
    )


def _suffixes(
    responses: Jagged,
    thoughts: list[list[int]],
    members: list[tuple[int, float]],
    count: int,
    references: int,
    place: dict[tuple[int, ...], int],
) -> list[tuple[int, float]]:
    """Distinct responses of `members` behind their first `count` thoughts, as rows of a growing table, with their rewards."""
    found: dict[tuple[int, ...], float] = {}
    for row, reward in members:
        if count > len(thoughts[row]):
            continue
        begin = thoughts[row][count - 1] if count else 0
        suffix = tuple(responses.row(row)[begin:].tolist())
        if suffix and len(found) < references:
            found.setdefault(suffix, reward)
    return [(place.setdefault(suffix, len(place)), reward) for suffix, reward in found.items()]
