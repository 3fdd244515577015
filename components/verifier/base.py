"""What verifiers share: looking up prompts, extracting answers, remembering verdicts."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from components.text.templates import extract_answer, response_text
from pipeline.core.payloads import Prompts, Rewards, Trajectories, Verifier

MEMORY = 200_000


@dataclass(frozen=True, kw_only=True)
class Item:
    """One response to judge.

    Attributes:
        text: the response.
        answer: reference answer, "" when there is none.
        metadata: of the prompt.
    """

    text: str
    answer: str
    metadata: dict[str, Any]

    def extracted(self) -> str | None:
        """The answer the response gives, by the template named in the metadata; None when it gives none."""
        return extract_answer(str(self.metadata.get("template", "plain")), self.text)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one item: reward, whether it is right, and why.

    Attributes:
        valid: False when it could not be judged.
        keep: False when another try may judge it, as after a network failure: it is not remembered.
    """

    value: float
    correct: bool
    valid: bool = True
    detail: str = ""
    keep: bool = True


RIGHT = Verdict(value=1.0, correct=True)
WRONG = Verdict(value=0.0, correct=False)


def wrong(detail: str) -> Verdict:
    """Incorrect, with a reason."""
    return Verdict(value=0.0, correct=False, detail=detail)


def unjudged(detail: str) -> Verdict:
    """Could not be judged, with a reason."""
    return Verdict(value=0.0, correct=False, valid=False, detail=detail)


class MemoVerifier(Verifier):
    """Remembers verdicts by (prompt uid, text), so a row judged twice costs once. Subclasses decide on batches of new items."""

    def __init__(self) -> None:
        self._memory: OrderedDict[tuple[int, bytes], Verdict] = OrderedDict()

    @abstractmethod
    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item. May raise for a single item's sake only if it has no way to go on."""

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory, aligned with it."""
        rows = prompts.index_of(trajectories.prompt_uid).tolist()
        # Digests: some responses are a megabyte long.
        digests = [
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in trajectories.text
        ]
        keys = list(zip(trajectories.prompt_uid.tolist(), digests, strict=True))
        new: dict[tuple[int, bytes], Item] = {}
        for key, row, text in zip(keys, rows, trajectories.text, strict=True):
            if key not in self._memory and key not in new:
                new[key] = Item(text=response_text(text), answer=prompts.answer[row], metadata=prompts.metadata[row])
        known = {key: self._memory[key] for key in keys if key in self._memory}
        known.update(zip(new, self.verdicts(list(new.values())) if new else [], strict=True))
        self._remember({key: known[key] for key in new})
        found = [known[key] for key in keys]
        return Rewards(
            uid=trajectories.uid,
            value=torch.tensor([v.value for v in found], dtype=torch.float32),
            correct=torch.tensor([v.correct for v in found], dtype=torch.bool),
            valid=torch.tensor([v.valid for v in found], dtype=torch.bool),
            detail=[v.detail for v in found],
        )

    def _remember(self, new: dict[tuple[int, bytes], Verdict]) -> None:
        # A verdict that failed is kept as well: the same text would hang or raise again.
        self._memory.update({key: verdict for key, verdict in new.items() if verdict.keep})
        while len(self._memory) > MEMORY:
            self._memory.popitem(last=False)
