"""The protocol of a task family: problems drawn by a key, thoughts, and the truth about every thought.

A family is one file with one subclass of `Task`, and its line in `creditgraph.components.tasks.BUILTIN`. It states

- `name`, `model`, `difficulty` (a dataclass of settings with defaults, validated by `__post_init__`) and `words`;
- `draw`: one problem from a stream of uniform numbers;
- `solution`: one right list of thoughts; `answer`: what its last thought boxes;
- `first_error`: the first wrong thought of any response;
- where several solutions are right: ``answer_kind = "steps"`` and `accepts`;
- `attempt`: a flawed response, as the teacher of the family's small model writes it (`tools/make_tiny_model`).

Everything else has a default: disjoint splits, and the prompts in the words of the small model's vocabulary. All text
is words with single spaces; a thought ends with `THOUGHT_END`, and the last one holds ``\\boxed{ … }``, which ends
the response.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from creditgraph.pipeline.core.errors import DataError, did_you_mean
from creditgraph.pipeline.core.streams import key_of

THOUGHT_END = "</thought>"
MAX_DRAWS = 20_000
# Share of all problems, in eighths, of each split; a problem's question determines its split, so splits are disjoint.
SPLITS: dict[str, range] = {"train": range(6), "validation": range(6, 7), "eval": range(7, 8)}
# Words of every small model besides its task's own; <pad>, <eos> and <unk> come first in a vocabulary.
SPECIAL_WORDS = ("<pad>", "<eos>", "<unk>")
COMMON_WORDS = (
    THOUGHT_END, "\\boxed{", "}", "<solve>", "<localize>", "<revise>", "</problem>", "</steps>", "ref", "ok", "bad",
)  # fmt: skip

Problem = dict[str, Any]
Draw = Callable[[], float]  # the next uniform number in [0, 1)


class Task(ABC):
    """One family of problems.

    A problem is a JSON-able dict with "task" (the family's name), "question" (all that the policy is shown), and
    whatever the family's own functions need. Thoughts are strings, stop string included; `first_error` and `accepts`
    take any text, since a policy may write anything.

    Class attributes:
        name: name in `TASKS`, in ``source:`` of data sections and in "task" of a problem's metadata.
        model: name of the small model that reads its words (`components/models/NAME`).
        answer_kind: "value" if the boxed answer decides, so that verifiers that compare answers can judge it; "steps"
            if a simulator has to judge the response (`verifier.steps`).
        recoverable: whether a policy can undo a wrong or useless step and still solve the problem.
        difficulty: frozen keyword-only dataclass of settings; its `__post_init__` raises ValueError.
        warm_up: difficulties of the problems that the small model is taught, one after the other in equal parts of its
            training; None: the defaults.
        sure: chance that the teacher decides rightly where it may err, which sets how often the small model does; None
            if the family has other rates.
    """

    name: ClassVar[str]
    model: ClassVar[str]
    answer_kind: ClassVar[Literal["value", "steps"]] = "value"
    recoverable: ClassVar[bool] = False
    difficulty: ClassVar[type]
    warm_up: ClassVar[tuple[Any, ...]] = (None,)
    sure: float | None = None

    @abstractmethod
    def draw(self, draw: Draw, difficulty: Any) -> Problem | None:
        """A problem drawn from uniform numbers alone; None if this draw gives none, then the next numbers are tried."""

    @abstractmethod
    def solution(self, problem: Problem) -> list[str]:
        """The thoughts of one right response; joined by spaces they are the reference solution."""

    @abstractmethod
    def answer(self, problem: Problem) -> str:
        """The content of the box of that response."""

    @abstractmethod
    def first_error(self, problem: Problem, thoughts: Sequence[str]) -> int:
        """1-based index of the first wrong thought, 0 for a right and complete response.

        A malformed thought is wrong; a missing one is too, so that the result may be ``len(thoughts) + 1``. A family
        whose steps can be undone says in its own docstring what counts as wrong. ``first_error(problem, thoughts) ==
        0`` must imply that `accepts` holds.
        """

    @abstractmethod
    def words(self) -> list[str]:
        """The words of questions, thoughts and answers, in the order of the vocabulary, besides `COMMON_WORDS`."""

    @abstractmethod
    def attempt(self, problem: Problem, draw: Draw) -> list[str]:
        """A flawed response of the teacher that small models learn from: how often it is right sets where they start.

        Args:
            problem: a drawn problem.
            draw: uniform numbers.
        """

    def remark(self, problem: Problem, thoughts: Sequence[str]) -> str:
        """What the small model learns to say of the last of these thoughts before its verdict; nothing by default."""
        return ""

    def generate(self, seed: int, index: int, difficulty: Any = None, split: str = "train") -> Problem:
        """Draws problem `index` of a split: a JSON-able dict, the same for the same arguments everywhere.

        Args:
            seed: names an endless list of problems.
            index: position in that list, from 0.
            difficulty: settings of the class `Task.difficulty`; its defaults when None.
            split: "train", "validation" or "eval"; no question belongs to two of them.

        Raises:
            DataError: no such split, or no problem of this difficulty in `MAX_DRAWS` draws.
        """
        difficulty = self.difficulty() if difficulty is None else difficulty
        check_split(self.name, split)
        # random() is the one method whose sequence Python guarantees across versions.
        draw = random.Random(key_of(self.name, seed, split, index)).random
        for _ in range(MAX_DRAWS):
            problem = self.draw(draw, difficulty)
            if problem is not None and in_split(problem["question"], split):
                return problem
        raise DataError(f"{self.name}: no problem of {difficulty} in {MAX_DRAWS} draws. Widen the difficulty.")

    def lesson(self, seed: int, index: int, progress: float = 0.0) -> Problem:
        """Problem `index` of those that the small model is taught, none of them of a held-out split.

        `progress`, from 0 to below 1, is the share of its training that is over; it chooses among `warm_up`.
        """
        return self.generate(seed, index, self.warm_up[int(progress * len(self.warm_up))])

    def accepts(self, problem: Problem, thoughts: Sequence[str], boxed: str | None) -> bool:
        """Whether a response is right; by default, whether it boxes the answer.

        Args:
            problem: the problem.
            thoughts: the response, cut by `split_thoughts`.
            boxed: content of its last box; None without one.
        """
        return boxed is not None and boxed.split() == self.answer(problem).split()

    def state(self, thoughts: Sequence[str]) -> str:
        """What the next thought starts from, as a key; equal ones are equal states if as many thoughts led to them."""
        return " ".join(words_of(thoughts[-1])) if thoughts else ""

    def solve_prompt(self, question: str) -> str:
        """Prompt for a solution."""
        return f"<solve> {question} </problem>"

    def localize_prompt(self, question: str, steps: Sequence[str]) -> str:
        """Prompt for the first wrong step of a failed attempt, whose number the response boxes."""
        return f"<localize> {question} </problem> {labelled(steps)} </steps>"

    def revise_prompt(self, question: str, wrong_steps: Sequence[str], reference_steps: Sequence[str]) -> str:
        """Prompt for a repaired attempt; the first half of the reference is shown, so that repairing is not copying."""
        shown = reference_steps[: (len(reference_steps) + 1) // 2]
        reference = " ".join(f"ref {step_body(step)}" for step in shown)
        return " ".join(f"<revise> {question} </problem> {labelled(wrong_steps)} {reference} </steps>".split())


def check_split(name: str, split: str) -> None:
    """Raises DataError for a split that does not exist; `name` is the family's."""
    if split not in SPLITS:
        raise DataError(f"{name}: split '{split}' does not exist.{did_you_mean(split, SPLITS)}")


def in_split(question: str, split: str) -> bool:
    """Whether the question belongs to this split."""
    return key_of("split", question) % 8 in SPLITS[split]


def split_thoughts(text: str) -> list[str]:
    """Cuts a response after each `</thought>`; end-of-text tokens and white space alone are no thought."""
    parts = text.replace("<eos>", " ").replace("<pad>", " ").split(THOUGHT_END)
    closed = [f"{part.strip()} {THOUGHT_END}" for part in parts[:-1]]
    return closed + ([parts[-1].strip()] if parts[-1].strip() else [])


def words_of(text: str) -> list[str]:
    """The words of a thought, its stop string included; two thoughts say the same if these are equal."""
    return text.replace("<eos>", " ").replace(THOUGHT_END, f" {THOUGHT_END}").split()


def bare_step(step: str) -> str:
    """A step without its stop string; white space is collapsed where it is a single line."""
    if "\n" in step.strip():
        return step.replace(THOUGHT_END, "").strip()
    return " ".join(step.replace(THOUGHT_END, " ").split())


def step_body(step: str) -> str:
    """A step without stop string, box and end of text."""
    return " ".join(re.sub(r"\\boxed\{[^}]*\}?|<eos>", " ", bare_step(step)).split())


def labelled(steps: Sequence[str]) -> str:
    """Steps as they are shown to a small model: each behind its label c1, c2, …"""
    return " ".join(f"c{i} {step_body(step)}".strip() for i, step in enumerate(steps, 1))


def step_labels(count: int) -> list[str]:
    """The words 1 … `count` and c1 … c`count`, by which a small model names steps; part of a family's `words`.

    A family whose words hold some of them already may repeat them.
    """
    return [f"{label}{i}" for label in ("", "c") for i in range(1, count + 1)]


def compare_with(solution: Sequence[str], thoughts: Sequence[str]) -> int:
    """`Task.first_error` for families with one right solution: the first thought in other words than the solution's."""
    for i, (said, expected) in enumerate(zip(thoughts, solution, strict=False), 1):
        if words_of(said) != words_of(expected):
            return i
    return 0 if len(thoughts) == len(solution) else min(len(thoughts), len(solution)) + 1
