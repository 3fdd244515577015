"""The rows of a step as the payloads of an imported graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from creditgraph.adapters.imports.row import Message, Part, Row, text_of
from creditgraph.adapters.rows import (
    Rollouts,
    places_of_groups,
    prompts_of,
    rewards_of,
    trajectories_of,
    turn_rows,
    turns_of,
    whole_rows,
)
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.payloads import Credit, Payload, ReferenceLogprobs, TokenLogprobs

UNKNOWN, UNKNOWN_VERSION = "not recorded", -1
# A uid has 24 bits of iteration from bit 39 and 7 of node from bit 32; prompts and rollouts are two nodes here.
_ITERATION, _NODE = 39, 32


@dataclass
class Texts:
    """Makes token ids of texts, and texts of token ids.

    Attributes:
        tokenizer: of transformers; None where the user named none.
        made: rows whose ids were made of their texts.
    """

    tokenizer: Any = None
    made: int = 0

    def with_tokens(self, row: Row) -> Row:
        """The row with token ids, and with a text where the tokenizer knows one.

        Ids of a text are those of the tokenizer, which need not be those that were sampled.

        Raises:
            DataError: it has no ids, and there is no tokenizer.
        """
        if row.tokens is not None:
            ids = row.prompt_ids if row.prompt_ids is not None else self._prompt(row.prompt)
            prompt, parts = row.prompt, row.parts
            if self.tokenizer is not None:
                prompt = prompt or self.tokenizer.decode(list(ids), skip_special_tokens=False)
                parts = parts or [Part(self.tokenizer.decode(list(row.tokens), skip_special_tokens=False))]
            return replace(row, prompt_ids=ids, prompt=prompt, parts=parts)
        if self.tokenizer is None:
            raise DataError("it has texts and no token ids; name the model's tokenizer with --tokenizer FOLDER")
        self.made += 1
        pieces = [self._ids(part.text) for part in row.parts]
        mask = [part.trained for part, ids in zip(row.parts, pieces, strict=True) for _ in ids]
        tokens = [token for ids in pieces for token in ids]
        return replace(row, prompt_ids=self._prompt(row.prompt), tokens=tokens, mask=None if all(mask) else mask)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            return []
        if not isinstance(prompt, str) and self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
            return self._ids(text)
        return self._ids(prompt_text(prompt))


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """A prompt as one text; of messages their contents."""
    return prompt if isinstance(prompt, str) else "\n".join(text_of(message.get("content")) for message in prompt)


def rollouts_of(rows: Sequence[Row]) -> Rollouts:
    """The rows as padded tensors; all have token ids."""
    lengths = [len(row.tokens or ()) for row in rows]
    width = max(lengths, default=0)

    def padded(values: Callable[[Row], Any], empty: float, dtype: torch.dtype) -> Tensor:
        out = torch.full((len(rows), width), empty, dtype=dtype)
        for i, row in enumerate(rows):
            found = values(row)
            if found is not None:
                numbers = [empty if x is None else x for x in found]
                out[i, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
        return out

    def numbers(name: str) -> Tensor | None:
        if all(getattr(row, name) is None for row in rows):
            return None
        return padded(lambda row: getattr(row, name), torch.nan, torch.float32)

    def given(name: str) -> list[Any] | None:
        found = [getattr(row, name) for row in rows]
        return None if any(value is None for value in found) else found

    return Rollouts(
        mask=padded(lambda row: row.mask if row.mask is not None else [1] * len(row.tokens or ()), 0, torch.bool),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        group=[row.group for row in rows],
        episode=[(i,) if row.episode is None else row.episode for i, row in enumerate(rows)],
        tokens=padded(lambda row: row.tokens, 0, torch.int64),
        prompts=[list(row.prompt_ids or ()) for row in rows],
        turn_rewards=given("turn_rewards"),
        states=given("states"),
        values=numbers("values"),
        logprobs=numbers("logprobs"),
        entropies=numbers("entropies"),
        texts=[prompt_text(row.prompt) for row in rows],
        answers=[row.answer for row in rows],
        responses=[row.text for row in rows],
    )


def payloads(rows: Sequence[Row], iteration: int, turns: bool) -> dict[str, Payload]:
    """Output of an imported graph ("node.output") → its value; what all rows lack is left out.

    Args:
        rows: of one step, with token ids.
        iteration: number of the step.
        turns: whether a row of the result is a turn, a run of tokens that are trained on, instead of a whole response.
    """
    rollouts = rollouts_of(rows)
    lengths = torch.tensor([len(row.tokens or ()) for row in rows])
    inside = torch.arange(rollouts.mask.shape[1])[None, :] < lengths[:, None]
    spans = turns_of(rollouts.trained) if turns else whole_rows(inside, gaps=False)
    group = places_of_groups(rollouts.group) + (iteration << _ITERATION)
    uid = torch.arange(len(spans.row)) + (iteration << _ITERATION) + (1 << _NODE)
    trajectories = trajectories_of(rollouts, spans, group, uid)
    finish = [rows[i].finish or UNKNOWN for i in spans.row.tolist()]
    out: dict[str, Payload] = {
        "rollouts.prompts": prompts_of(rollouts, group),
        "rollouts.trajectories": trajectories.replace(
            finish_reason=finish, policy_version=torch.full_like(uid, UNKNOWN_VERSION)
        ),
        "rollouts.rewards": rewards_of(rollouts, spans.row, uid),
    }
    if turns:
        out["rollouts.turns"] = turn_rows(rollouts, spans, uid)
    if any(row.advantage is not None for row in rows):
        advantage = torch.zeros(rollouts.mask.shape)
        for i, row in enumerate(rows):
            if row.advantage is not None:
                numbers = (
                    row.advantage if isinstance(row.advantage, Sequence) else [row.advantage] * len(row.tokens or ())
                )
                advantage[i, : len(numbers)] = torch.tensor([float(x or 0.0) for x in numbers])
        mask = spans.gather(rollouts.trained)
        kept = spans.gather(advantage)
        out["rollouts.credit"] = Credit(
            uid=uid, advantage=kept.with_values(kept.values.where(mask.values, 0.0)), mask=mask
        )
    for name, output, kind in (
        ("old_logprobs", "trainer.logprobs", TokenLogprobs),
        ("reference_logprobs", "trainer.reference", ReferenceLogprobs),
    ):
        if any(getattr(row, name) is not None for row in rows):
            out[output] = kind(uid=uid, logprobs=spans.gather(_numbers(rows, name, rollouts.mask.shape)))
    return out


def _numbers(rows: Sequence[Row], name: str, shape: Sequence[int]) -> Tensor:
    out = torch.full(tuple(shape), torch.nan)
    for i, row in enumerate(rows):
        found = getattr(row, name) or ()
        out[i, : len(found)] = torch.tensor([torch.nan if x is None else float(x) for x in found])
    return out
