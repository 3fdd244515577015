"""References whose probability estimates a state's value: answers after an exit text, or solutions of the problem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from components.models.load import context_length
from components.text.templates import extract_answer
from components.value.boundaries import COST_METRICS, Boundaries, Outputs, boundaries_of
from pipeline.core.component import Component, Context, same_rows
from pipeline.core.handles import Policy
from pipeline.core.jagged import Jagged
from pipeline.core.metric import Metric
from pipeline.core.payloads import Prompts, Rewards, Segments, SegmentValues, Trajectories


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """The reference answers, and how the policy is prompted for one."""

    exit_text: str = "</think>\n\nThe final answer is \\boxed{"
    """text appended to a state to prompt for the answer at once; its own probability does not count"""
    answer_end: str = "}"
    """text after the answer, whose probability counts, so that 1 is not a prefix of 12"""
    length_normalise: bool = True
    """mean over references of the geometric mean of token probabilities; false: sum over references of their product"""
    bank: Literal["auto", "reference", "group"] = "auto"
    """the dataset's answer, those of the problem's correct trajectories, or (auto) the second if there is no first"""
    references: int = 4
    """N, most references per trajectory"""

    def __post_init__(self) -> None:
        if self.references < 1:
            raise ValueError(f"expected references ≥ 1, got {self.references}.")
        if not self.exit_text or not self.answer_end:
            raise ValueError(
                f"expected a non-empty exit_text and answer_end, got '{self.exit_text}' and '{self.answer_end}'."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Bank:
    """References as token sequences.

    Attributes:
        tokens: Jagged int32 [E rows], the distinct ones.
        scored: int64 [E], number of last tokens of each whose probability counts.
        entries: Jagged int64 [N rows], rows of `tokens` that are the references of each trajectory (or boundary).
        reward: float64, ζ of each of `entries.values`.
    """

    tokens: Jagged
    scored: Tensor
    entries: Jagged
    reward: Tensor

    def select(self, rows: Tensor) -> Bank:
        """The references of rows [M] of `entries`; the table of tokens is unchanged."""
        reward = self.entries.with_values(self.reward).select(rows).values
        return dataclasses.replace(self, entries=self.entries.select(rows), reward=reward)


def encode_answer(tokenizer: Any, exit_text: str, answer: str, answer_end: str) -> tuple[list[int], int]:
    """Tokens of exit text, answer and its end as one text, and how many of the last ones carry the answer and its end.

    A token that holds a piece of both exit text and answer counts as answer. ([], 0) when no token carries the answer.
    """
    encoded = tokenizer(exit_text + answer + answer_end, add_special_tokens=False, return_offsets_mapping=True)
    begin = len(exit_text)
    end = begin + len(answer)
    # Characters that each token covers, as (first, last + 1).
    offsets = encoded["offset_mapping"]
    if not any(first < end and last > begin for first, last in offsets):
        return [], 0
    return list(encoded["input_ids"]), sum(last > begin for _, last in offsets)


def answer_bank(
    tokenizer: Any, prompts: Prompts, trajectories: Trajectories, rewards: Rewards | None, settings: AnswerSettings
) -> Bank:
    """Reference answers of each trajectory, with exit text: the dataset's, or those of its own correct trajectories."""
    rows = prompts.index_of(trajectories.prompt_uid).tolist()
    own = correct_rows(trajectories, rewards) if settings.bank != "reference" else {}
    references = {row: _answers(prompts, row, trajectories, own, settings) for row in dict.fromkeys(rows)}
    encoded: dict[str, tuple[list[int], int]] = {}
    for answer in dict.fromkeys(answer for answers in references.values() for answer in answers):
        tokens, scored = encode_answer(tokenizer, settings.exit_text, answer, settings.answer_end)
        if tokens:
            encoded[answer] = (tokens, scored)
    place = {answer: i for i, answer in enumerate(encoded)}
    usable = [[(place[a], reward) for a, reward in references[row].items() if a in place] for row in rows]
    return Bank(
        tokens=Jagged.from_rows([tokens for tokens, _ in encoded.values()], torch.int32),
        scored=torch.tensor([scored for _, scored in encoded.values()], dtype=torch.int64),
        entries=Jagged.from_rows([[entry for entry, _ in row] for row in usable], torch.int64),
        reward=torch.tensor([reward for row in usable for _, reward in row], dtype=torch.float64),
    )


def _answers(
    prompts: Prompts,
    row: int,
    trajectories: Trajectories,
    own: dict[int, list[tuple[int, float]]],
    settings: AnswerSettings,
) -> dict[str, float]:
    """Answer → ζ of one prompt's references, in order."""
    reference = prompts.answer[row].strip()
    if reference and settings.bank != "group":
        return {reference: 1.0}
    members = own.get(int(prompts.uid[row]), [])
    # From the last member to the first, so that of equal answers the first one's reward counts.
    answers = {extract_answer(trajectories.text[i]) or "": reward for i, reward in reversed(members)}
    kept = [answer for answer in reversed(answers) if answer][: settings.references]
    return {answer: answers[answer] for answer in kept}


def correct_rows(trajectories: Trajectories, rewards: Rewards | None) -> dict[int, list[tuple[int, float]]]:
    """Prompt uid → (row, reward) of its correct trajectories, in order."""
    rows: dict[int, list[tuple[int, float]]] = {}
    if rewards is not None:
        for row in (rewards.correct & rewards.valid).nonzero(as_tuple=True)[0].tolist():
            rows.setdefault(int(trajectories.prompt_uid[row]), []).append((row, float(rewards.value[row])))
    return rows


def continuation_bank(trajectories: Trajectories, rewards: Rewards, boundary: Jagged, references: int) -> Bank:
    """The rest of correct trajectories of the same problem, after as many thoughts as each boundary's state has.

    Distinct continuations only, because equal ones are one event; nothing after the end of a response. `entries` has
    one row per boundary (`boundary.values`, response tokens before it).
    """
    correct = correct_rows(trajectories, rewards)
    thoughts = trajectories.thought_ends.to_lists()
    boundaries = boundary.to_lists()
    cached: dict[tuple[int, int], list[tuple[int, float]]] = {}
    place: dict[tuple[int, ...], int] = {}  # continuation → its row in the table of tokens
    entries: list[list[tuple[int, float]]] = []
    for i, uid in enumerate(trajectories.prompt_uid.tolist()):
        for bound in boundaries[i]:
            count = sum(end <= bound for end in thoughts[i])
            if bound == boundaries[i][-1]:
                entries.append([])
                continue
            if (uid, count) not in cached:
                suffixes = _suffixes(trajectories.response_tokens, thoughts, correct.get(uid, []), count, references)
                cached[uid, count] = [(place.setdefault(s, len(place)), reward) for s, reward in suffixes.items()]
            entries.append(cached[uid, count])
    tokens = Jagged.from_rows([list(t) for t in place], torch.int32)
    return Bank(
        tokens=tokens,
        scored=tokens.lengths,
        entries=Jagged.from_rows([[entry for entry, _ in row] for row in entries], torch.int64),
        reward=torch.tensor([reward for row in entries for _, reward in row], dtype=torch.float64),
    )


def _suffixes(
    responses: Jagged, thoughts: list[list[int]], members: list[tuple[int, float]], count: int, references: int
) -> dict[tuple[int, ...], float]:
    """Distinct responses of `members` after their first `count` thoughts, and their rewards."""
    suffixes: dict[tuple[int, ...], float] = {}
    for row, reward in members:
        if count > len(thoughts[row]):
            continue
        begin = thoughts[row][count - 1] if count else 0
        suffix = tuple(responses.row(row)[begin:].tolist())
        if suffix and len(suffixes) < references:
            suffixes.setdefault(suffix, reward)
    return suffixes


class AnswerEstimator(Component):
    """Base of estimators that score reference answers with the policy; subclasses define `estimate` or `run`."""

    paper = "2606.06475"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *COST_METRICS,
        Metric("empty_bank_share", "share", "trajectories without a reference answer to score; their values are 0"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(AnswerSettings):
        """The bank."""

    config: AnswerSettings

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Answers of a few tokens; any where it scores the rest of a solution instead (value: continuation)."""
        return None if getattr(config, "value", "") == "continuation" else frozenset({"value", "choice", "boolean"})

    def setup(self, context: Context) -> None:
        """Reads the model's context length."""
        super().setup(context)
        self.room = context_length(context.model)

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
        policy: Policy,
        rewards: Annotated[Rewards, same_rows("trajectories")] | None = None,
    ) -> Outputs:
        """Estimates the values at all boundaries from the references of each trajectory."""
        bounds = boundaries_of(trajectories, segments, rewards)
        bank = answer_bank(policy.tokenizer, prompts, trajectories, rewards, self.config)
        values, scored_tokens = self.estimate(policy, trajectories, bounds, bank)
        self.log_cost(scored_tokens, bank.entries.lengths == 0)
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values))

    def estimate(
        self, policy: Policy, trajectories: Trajectories, bounds: Boundaries, bank: Bank
    ) -> tuple[Jagged, int]:
        """Values at the boundaries, Jagged float32, and the number of tokens that went through the model."""
        raise NotImplementedError

    def log_cost(self, scored_tokens: int, empty: Tensor) -> None:
        """Logs the tokens that went through the model, and the share of trajectories, bool [N], without a reference."""
        self.context.log(
            scored_tokens=scored_tokens, generated_tokens=0, empty_bank_share=float(empty.sum()) / max(len(empty), 1)
        )
