"""References whose probability estimates a state's value: answers after an exit text, or solutions of the problem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from creditgraph.components.text.templates import exit_after, extract_answer, response_text
from creditgraph.components.value.states import States
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

# Parts of a reference text: not scored; scored and required; scored where there are tokens for it.
Part = Literal["given", "scored", "closing"]


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """The reference answers, and how the policy is prompted for one."""

    exit_text: str = "</think>\n\nThe final answer is \\boxed{"
    """text appended to a state to prompt for the answer at once; its own probability does not count. A </think> at its
    begin is left out where thinking is over"""
    answer_end: str = "}"
    """text after the answer, whose probability counts, so that 1 is not a prefix of 12"""
    solution_lead: str = "\n"
    """text between a state that does not end in white space and a reference solution; its probability does not count"""
    length_normalise: bool = True
    """mean over references of the geometric mean of token probabilities; false: sum over references of their product"""
    bank: Literal["auto", "reference", "group"] = "auto"
    """the dataset's references, those of the problem's correct trajectories, or (auto) the second without the first"""
    references: int = 4
    """N, most references per trajectory"""

    def __post_init__(self) -> None:
        if self.references < 1:
            raise ValueError(f"expected references ≥ 1, got {self.references}.")
        if not self.exit_text or not self.answer_end:
            raise ValueError(
                f"expected a non-empty exit_text and answer_end, got '{self.exit_text}' and '{self.answer_end}'."
            )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A reference of a problem: an answer, maybe with a worked solution, and its reward ζ (below 0 counts as 0)."""

    answer: str
    solution: str = ""
    reward: float = 1.0


References = list[list[Reference]]  # of each trajectory


@dataclass(frozen=True, eq=False, kw_only=True)
class Bank:
    """References as token sequences.

    Attributes:
        tokens: Jagged int32 [E rows], the distinct ones.
        scored: Jagged bool [E rows], tokens whose probability counts.
        entries: Jagged int64 [S rows], rows of `tokens` that are the references of each state.
        reward: float64, ζ of each of `entries.values`.
        proposal: float64, log q of each of `entries.values`, with which it was drawn [nats]; None if they are distinct.
        draws: int64 [S], how many were drawn for each state, those with ζ = 0 too, which `entries` lacks; or None.
    """

    tokens: Jagged
    scored: Jagged
    entries: Jagged
    reward: Tensor
    proposal: Tensor | None = None
    draws: Tensor | None = None


def references_of(
    prompts: Prompts, trajectories: Trajectories, rewards: Rewards | None, settings: AnswerSettings, solutions: bool
) -> References:
    """References of each trajectory: those of the dataset, or of its problem's correct trajectories.

    With `solutions`, a reference has a solution too: the dataset's, or the whole correct response.
    """
    rows = prompts.index_of(trajectories.prompt_uid).tolist()
    own = correct_rows(trajectories, rewards) if settings.bank != "reference" else {}
    by_prompt: dict[int, list[Reference]] = {}
    for row in dict.fromkeys(rows):
        answer = prompts.answer[row].strip()
        solution = prompts.solution[row].strip() if solutions else ""
        if settings.bank != "group" and answer and (solution or not solutions):
            by_prompt[row] = [Reference(answer=answer, solution=solution)]
        else:
            by_prompt[row] = _of_group(trajectories, own.get(int(prompts.uid[row]), []), solutions, settings.references)
    return [by_prompt[row] for row in rows]


def _of_group(
    trajectories: Trajectories, members: list[tuple[int, float]], solutions: bool, most: int
) -> list[Reference]:
    """Distinct references from correct trajectories; of equal ones the first one's reward counts."""
    distinct: dict[tuple[str, str], Reference] = {}
    for i, reward in members:
        answer = extract_answer(trajectories.text[i]) or ""
        solution = response_text(trajectories.text[i]).strip() if solutions else ""
        if answer and len(distinct) < most:
            distinct.setdefault((answer, solution), Reference(answer=answer, solution=solution, reward=reward))
    return list(distinct.values())


def encode_parts(tokenizer: Any, parts: Sequence[tuple[str, Part]]) -> tuple[list[int], list[bool]]:
    """Tokens of the joined parts, and whether each one's probability counts: that of "scored" and "closing" parts.

    A token that holds a piece of both kinds counts. ([], []) when no token carries some part that is "scored".
    """
    encoded = tokenizer("".join(text for text, _ in parts), add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]  # characters that each token covers, as (first, last + 1)
    scored = [False] * len(offsets)
    begin = 0
    for text, part in parts:
        end = begin + len(text)
        touched = [first < end and last > begin for first, last in offsets]
        if part == "scored" and not any(touched):
            return [], []
        if part != "given":
            scored = [a or b for a, b in zip(scored, touched, strict=True)]
        begin = end
    return list(encoded["input_ids"]), scored


def answer_bank(tokenizer: Any, references: References, states: States, settings: AnswerSettings) -> Bank:
    """The answers of each state's trajectory, after the exit text as it continues the state."""

    def parts(reference: Reference, s: int) -> list[tuple[str, Part]]:
        exit_text = exit_after(states.tails[s], settings.exit_text)
        return [(exit_text, "given"), (reference.answer, "scored"), (settings.answer_end, "closing")]

    return _bank(tokenizer, references, states, parts)


def solution_bank(tokenizer: Any, references: References, states: States, settings: AnswerSettings) -> Bank:
    """Solutions and, after them and the exit text, answers; the same ones at every state of a trajectory."""

    def parts(reference: Reference, s: int) -> list[tuple[str, Part]]:
        lead = "" if states.tails[s][-1:].isspace() else settings.solution_lead
        exit_text = exit_after(states.tails[s] + reference.solution, settings.exit_text)
        return [
            (lead, "given"),
            (reference.solution, "scored"),
            (exit_text, "given"),
            (reference.answer, "scored"),
            (settings.answer_end, "closing"),
        ]

    return _bank(tokenizer, references, states, parts)


def _bank(
    tokenizer: Any,
    references: References,
    states: States,
    parts: Callable[[Reference, int], list[tuple[str, Part]]],
) -> Bank:
    encoded: dict[tuple[tuple[str, Part], ...], int] = {}  # parts → row of the table, −1 for unusable ones
    tokens: list[list[int]] = []
    scored: list[list[bool]] = []
    entries: list[list[int]] = []
    rewards: list[float] = []
    for s, owner in enumerate(states.row.tolist()):
        entries.append([])
        for reference in references[owner]:
            key = tuple(parts(reference, s))
            if key not in encoded:
                ids, flags = encode_parts(tokenizer, key)
                encoded[key] = len(tokens) if ids else -1
                if ids:
                    tokens.append(ids)
                    scored.append(flags)
            if encoded[key] >= 0:
                entries[-1].append(encoded[key])
                rewards.append(reference.reward)
    return Bank(
        tokens=Jagged.from_rows(tokens, torch.int32),
        scored=Jagged.from_rows(scored, torch.bool),
        entries=Jagged.from_rows(entries, torch.int64),
        reward=torch.tensor(rewards, dtype=torch.float64),
    )


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
        scored=tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool)),
        entries=Jagged.from_rows([[entry for entry, _ in row] for row in entries], torch.int64),
        reward=torch.tensor([reward for row in entries for _, reward in row], dtype=torch.float64),
    )


def drawn_bank(trajectories: Trajectories, rewards: Rewards, boundary: Jagged, references: int) -> Bank:
    """As `continuation_bank`, with every draw: the rests of the first `references` trajectories that have one.

    What follows the first k thoughts of a trajectory that goes on was drawn with the probability q that its sampler
    gave it. Right and wrong trajectories are draws, or the estimate would be too large; the wrong ones need no score.
    """
    tokens, logprobs = trajectories.response_tokens.to_lists(), trajectories.engine_logprobs.to(torch.float64)
    thoughts = trajectories.thought_ends.to_lists()
    right = (rewards.correct & rewards.valid).tolist()
    members: dict[int, list[int]] = {}
    for i, (uid, valid) in enumerate(zip(trajectories.prompt_uid.tolist(), rewards.valid.tolist(), strict=True)):
        if valid:
            members.setdefault(uid, []).append(i)
    place: dict[tuple[int, ...], int] = {}
    entries: list[list[int]] = []
    found: list[tuple[float, float]] = []  # ζ and log q
    draws: list[int] = []
    for i, uid in enumerate(trajectories.prompt_uid.tolist()):
        bounds = boundary.row(i).tolist()
        for bound in bounds:
            count = sum(end <= bound for end in thoughts[i])
            going = [j for j in members.get(uid, []) if count <= len(thoughts[j])]
            begins = {j: thoughts[j][count - 1] if count else 0 for j in going}
            going = [j for j in going if begins[j] < len(tokens[j])][:references] if bound < bounds[-1] else []
            draws.append(len(going))
            entries.append([])
            for j in filter(right.__getitem__, going):
                entries[-1].append(place.setdefault(tuple(tokens[j][begins[j] :]), len(place)))
                found.append((float(rewards.value[j]), float(logprobs.row(j)[begins[j] :].sum())))
    rows = Jagged.from_rows([list(t) for t in place], torch.int32)
    table = torch.tensor(found, dtype=torch.float64).view(-1, 2)
    return Bank(
        tokens=rows,
        scored=rows.with_values(torch.ones(len(rows.values), dtype=torch.bool)),
        entries=Jagged.from_rows(entries, torch.int64),
        reward=table[:, 0],
        proposal=table[:, 1],
        draws=torch.tensor(draws, dtype=torch.int64),
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
