"""Looks at one data section as a user would: does it load, is it what the section says, does the verifier accept its own answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from components.prompts.loading import Loaded, load_problems
from components.prompts.sources import parse_source
from components.prompts.store import Row
from components.verifier.code_tests import CodeTests, read_tests
from pipeline.core.component import Component, Context, ModelSpec
from pipeline.core.jagged import Jagged
from pipeline.core.payloads import Prompts, Trajectories, Verifier
from pipeline.core.registry import load_class

_ROOM = 1 << 40


class Words:
    """A stand-in for a tokenizer where no model is named: counts words and knows no chat template."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """One id per word."""
        return {"input_ids": [0] * len(text.split())}


@dataclass(kw_only=True)
class Checked:
    """What was found.

    Attributes:
        loaded: problems, counts, revision.
        judged: reference answers put to the verifier.
        refused: (row, answer, reason) of those that it did not accept.
        verdict: on the verifier, in words.
        shown_as: template of the first prompt, where it is not the section's own because no model is named.
        unit: in which prompts are counted, words or tokens.
    """

    loaded: Loaded
    judged: int = 0
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    verdict: str = ""
    shown_as: str = ""
    unit: str = "tokens"


def check_entry(entry: dict[str, Any], place: str, model: str | None, rows: int) -> Checked:
    """Loads a section and asks its verifier.

    Args:
        entry: the data section.
        place: what error texts call it.
        model: folder or hub name whose tokenizer makes the prompts; None counts words and shows chat prompts as plain
            text.
        rows: most raw rows to look at; 0 looks at all.

    Raises:
        DataError: it cannot be loaded.
    """
    source, shown_as = parse_source(entry, place), ""
    counted = model is None and source.source != "chains"
    context = Context(node="check", model=ModelSpec(path=model or "tiny"))
    if counted:
        if source.template == "chat":
            shown_as = "plain"
            entry = {**entry, "template": "plain"}
        loaded = load_problems(entry, context, Words(), place=place, drop_duplicates=True, most=rows, room=_ROOM)
    else:
        loaded = load_problems(entry, context, place=place, drop_duplicates=True, most=rows)
    checked = Checked(loaded=loaded, shown_as=shown_as, unit="words" if counted else "tokens")
    if source.answer_kind == "code":
        checked.verdict = _tests_of(loaded)
    elif source.verifier:
        _ask(checked, source.verifier, context)
    else:
        checked.verdict = "no verifier named; a run's own verifier judges"
    return checked


def _tests_of(loaded: Loaded) -> str:
    calls = total = public = 0
    for row in loaded.rows:
        tests = read_tests(row.metadata, "all")
        assert isinstance(tests, CodeTests)  # rows without tests were rejected
        calls, total, public = (
            calls + bool(tests.function),
            total + len(tests.tests),
            public + sum(t.public for t in tests.tests),
        )
    count = len(loaded.rows)
    return (
        f"{total} tests, {public} of them public; {calls} problems call a function, {count - calls} read standard input"
    )


def _ask(checked: Checked, use: str, context: Context) -> None:
    component: Component = load_class(use)()
    component.setup(context)
    try:
        verifier: Verifier = component.run().verifier
        rows = checked.loaded.rows
        for start in range(0, len(rows), 1000):
            part = rows[start : start + 1000]
            uid = torch.arange(start, start + len(part))
            rewards = verifier.verify(_prompts(part, uid), _answers(part, uid))
            for i, row in enumerate(part):
                if not bool(rewards.correct[i]):
                    checked.refused.append(
                        (int(row.metadata["source_row"]), row.answer, rewards.detail[i] or "judged wrong")
                    )
            checked.judged += len(part)
    finally:
        component.close()
    checked.verdict = f"{use} accepts {checked.judged - len(checked.refused)} of {checked.judged} reference answers"


def _prompts(rows: list[Row], uid: torch.Tensor) -> Prompts:
    nothing = Jagged.from_rows([[0]] * len(rows), torch.int32)
    metadata, text, answer = ([getattr(r, name) for r in rows] for name in ("metadata", "text", "answer"))
    return Prompts(uid=uid, tokens=nothing, text=text, answer=answer, metadata=metadata)


def _answers(rows: list[Row], uid: torch.Tensor) -> Trajectories:
    """A response per problem that boxes the reference answer."""
    count = len(rows)
    tokens, numbers = Jagged.from_rows([[0]] * count, torch.int32), Jagged.from_rows([[0.0]] * count, torch.float32)
    return Trajectories(
        uid=uid,
        prompt_uid=uid,
        group=uid,
        parent=torch.full((count,), -1),
        prompt_tokens=tokens,
        response_tokens=tokens,
        inherited=torch.zeros(count, dtype=torch.int64),
        engine_logprobs=numbers,
        entropies=numbers,
        thought_ends=Jagged.from_rows([[1]] * count, torch.int32),
        policy_version=torch.zeros(count, dtype=torch.int64),
        finish_reason=["eos"] * count,
        text=[f"The answer is \\boxed{{{row.answer}}}." for row in rows],
    )
