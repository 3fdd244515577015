"""The base of verifiers: items, verdicts, and a component that caches its verdicts."""

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

import torch

from creditgraph.components.text.templates import extract_answer, response_text
from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.payloads import Prompts, Rewards, Trajectories

# Verdicts cached per node. In an iteration several nodes verify the same rows (sampler, rewards, evaluator).
MEMORY = 200_000


@dataclass(frozen=True, kw_only=True)
class Item:
    """One response to verify.

    Attributes:
        text: the response.
        answer: reference answer, "" when there is none.
        metadata: metadata of the prompt.
        prompt: the problem as the data has it, without the template's words.
    """

    text: str
    answer: str
    metadata: dict[str, Any]
    prompt: str = ""

    def extracted(self) -> str | None:
        """The answer the response gives in its last \\boxed{}; None when it gives none."""
        return extract_answer(self.text)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one item: its reward, whether it is correct, and otherwise the reason.

    Attributes:
        valid: False if the verifier could not decide.
        keep: False if another try may decide, as after a network failure; such a verdict is not cached.
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


def undecided(detail: str) -> Verdict:
    """The verifier could not decide, with a reason."""
    return Verdict(value=0.0, correct=False, valid=False, detail=detail)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The verifier."""

    verifier: Verifier


class VerifierComponent(Component, Verifier):
    """A component that is its own verifier: `run` returns the component itself.

    Verdicts are cached by (prompt uid, text), so verifying a row again is free. Subclasses implement `verdict` for one
    item, or `verdicts` if a batch is cheaper than its items.

    Attributes:
        references: kinds of reference answers that it reads (value, choice, boolean, code); None: any, or none.
    """

    references: ClassVar[frozenset[str] | None] = None

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._memory: OrderedDict[tuple[int, bytes], Verdict] = OrderedDict()

    @classmethod
    def references_of(cls, config: Any) -> frozenset[str] | None:
        """Kinds of reference answers that it reads: `references`, unless its settings change them."""
        return cls.references

    def run(self) -> Outputs:
        """Returns the verifier, the same object in every iteration."""
        return Outputs(verifier=self)

    def verdict(self, item: Item) -> Verdict:
        """The verdict on one item."""
        raise NotImplementedError

    def verdicts(self, items: list[Item]) -> list[Verdict]:
        """One verdict per item; raises only if no item can be verified."""
        return [self.verdict(item) for item in items]

    def verify(self, prompts: Prompts, trajectories: Trajectories) -> Rewards:
        """One reward per trajectory, aligned with it."""
        rows = prompts.index_of(trajectories.prompt_uid).tolist()
        # Digests instead of texts, because some responses are a megabyte long.
        digests = [
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in trajectories.text
        ]
        keys = list(zip(trajectories.prompt_uid.tolist(), digests, strict=True))
        new: dict[tuple[int, bytes], Item] = {}
        for key, row, text in zip(keys, rows, trajectories.text, strict=True):
            if key not in self._memory and key not in new:
                metadata = prompts.metadata[row]
                new[key] = Item(
                    text=response_text(text),
                    answer=prompts.answer[row],
                    metadata=metadata,
                    prompt=str(metadata.get("question", prompts.text[row])),
                )
        known = {key: self._memory[key] for key in keys if key in self._memory}
        known.update(zip(new, self.verdicts(list(new.values())) if new else [], strict=True))
        self._remember({key: known[key] for key in new})
        verdicts = [known[key] for key in keys]
        return Rewards(
            uid=trajectories.uid,
            value=torch.tensor([v.value for v in verdicts], dtype=torch.float32),
            correct=torch.tensor([v.correct for v in verdicts], dtype=torch.bool),
            valid=torch.tensor([v.valid for v in verdicts], dtype=torch.bool),
            detail=[v.detail for v in verdicts],
        )

    def _remember(self, new: dict[tuple[int, bytes], Verdict]) -> None:
        # Failures are cached too, because the same text would hang or raise again.
        self._memory.update({key: verdict for key, verdict in new.items() if verdict.keep})
        while len(self._memory) > MEMORY:
            self._memory.popitem(last=False)


def verifier_of(component: Component, place: str) -> Verifier:
    """Runs a component without inputs, and returns its verifier.

    Raises:
        ConfigError: it returns none; `place` names it.
    """
    outputs = component.run()
    verifier = getattr(outputs, "verifier", None)
    if not isinstance(verifier, Verifier):
        raise ConfigError(f"{place} returns no verifier; choose one of `creditgraph components verifier`.")
    return verifier
