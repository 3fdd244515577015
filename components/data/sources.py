"""The settings of one data section: the source of the problems, and the columns to read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from creditgraph.components.tasks import TASKS
from creditgraph.components.text.templates import PLACEHOLDER, TEMPLATES, AnswerKind
from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.settings import SettingsError, build_config

JOINED = "joined."
LIVECODEBENCH = ("public_test_cases", "private_test_cases", "metadata")


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A dataset of the Hugging Face hub, or a local copy of it."""

    name: str = ""
    """hub: dataset name, 'owner/name'"""
    subset: str = ""
    """hub: configuration of the dataset, empty for its default"""
    revision: str | None = None
    """hub: branch, tag or commit; a commit makes a run reproducible, and `creditgraph data check` prints it"""
    split: str = "train"
    """hub: split, optionally a slice such as train[:90%]; folders: split; task families: train, validation or eval (no
    problem is in two of them)"""
    files: tuple[str, ...] = ()
    """hub: files of the repository to read instead of a split, for repositories with a loading script, which is not
    run"""
    path: str = ""
    """file: .jsonl, .json, .csv (each also .gz or .zst), .parquet, .arrow, or a folder; hub: a local copy to read
    instead"""


@dataclass(frozen=True, kw_only=True)
class Join(HubDataset):
    """A second dataset whose columns are added to each row, under names that begin with "joined."."""

    row: str = ""
    """column of the first dataset that holds the number of the row (from 0) in this one"""

    def __post_init__(self) -> None:
        if not self.row or not (self.name or self.path):
            raise ValueError("expected {name: OWNER/NAME, row: COLUMN}, got no row, or neither name nor path.")


@dataclass(frozen=True, kw_only=True)
class Source(HubDataset):
    """One entry of the data section, such as data.train. Columns may be dotted: details.level is a field of details."""

    source: str = "file"
    """file: a local file or a folder written by save_to_disk; hub: a Hugging Face dataset; or the name of a task
    family, whose problems are generated"""
    streaming: bool = False
    """hub: read rows over the network as they are needed instead of downloading the dataset first"""
    question: str = "question"
    """column with the problem: text, or a list of chat messages {role, content} (template chat)"""
    choices: str = ""
    """column with the choices of a multiple-choice question: they are listed under it by letter"""
    open_answer: str = ""
    """column with the reference answer of rows without choices, which are asked for a value; empty: every row has
    choices"""
    starter_code: str = ""
    """column with code that a program must begin with, shown under the question; may be empty in some rows"""
    answer: str = "answer"
    """column with the reference answer; empty: no reference answer (programs, verified by their tests)"""
    answer_boxed: bool = False
    """the answer column holds a worked solution; the answer is the content of its last \\boxed{}"""
    answer_after: str = ""
    """the answer column holds a worked solution; the answer is the rest of the line after the last occurrence of this
    text"""
    solution: str = ""
    """column with a worked reference solution, for credit that reads it; it may be empty in some rows. Without this
    setting it is the answer column where that holds a worked solution"""
    answer_kind: AnswerKind = "value"
    """kind of answer that the prompt requests: a value, the letter of a choice, yes or no, or a program; steps: many
    responses are right, and a simulator judges their steps"""
    tests: Literal["", "livecodebench"] = ""
    """livecodebench: tests from public_test_cases, private_test_cases (packed) and metadata, as that dataset stores
    them"""
    private_tests: Literal["", "first_half", "second_half"] = ""
    """half of each problem's private tests, in a random order of `seed` and without the public ones; empty: all
    tests"""
    verifier: str = ""
    """component that verifies these answers; a run uses it where the graph's cannot read them, unless verifier.use is
    set"""
    template: str = ""
    """prompt template: thought, plain, chat or the name of a task family; empty: the family's own, otherwise thought"""
    system_prompt: str = ""
    """chat: text of a system turn before the problem; messages that begin with a system turn keep theirs"""
    user_prompt: str = ""
    """chat and plain: text with {question} where the problem goes, in place of the template's own words"""
    metadata: dict[str, str] = field(default_factory=dict)
    """further columns (right) that verifiers read under a name (left), such as tests of programs"""
    join: Join | None = None
    """a second dataset with further columns"""
    keep: dict[str, str | list[str]] = field(default_factory=dict)
    """keeps only rows whose column (left) has this value, or one of these values (right), compared as text"""
    max_answer: int = 10000
    """characters of the longest accepted answer; longer ones are rejected; 0 accepts all"""
    short_answer: bool = False
    """accept only answers that are one of A to E, or have a digit and neither words, units nor text commands"""
    shuffle: bool = False
    """put the usable rows, repeated questions dropped, into a random order of `seed` before `skip` and `size` apply"""
    skip: int = 0
    """number of usable rows left out at the front"""
    size: int = 0
    """largest number of rows, from the front; 0 uses all (task families: 2000)"""
    seed: int = 0
    """random seed of `shuffle` and `private_tests`; task families: which endless list of problems to draw from"""
    difficulty: Any = field(default_factory=dict)
    """task families: how hard the problems are, see the family's settings"""

    def __post_init__(self) -> None:
        if self.source in TASKS:
            self._check_task()
        elif self.source not in ("file", "hub"):
            known = ("file", "hub", *TASKS)
            raise SettingsError(
                [f"source: expected {' or '.join(known)}, got '{self.source}'.{did_you_mean(self.source, known)}"]
            )
        elif self.difficulty:
            raise ValueError(f"difficulty is for task families ({', '.join(TASKS)}), got source '{self.source}'.")
        if self.source == "file" and not self.path:
            raise ValueError("source 'file' has no path; set path: FILE.")
        if self.source == "hub" and not self.name:
            raise ValueError("source 'hub' has no name; set name: OWNER/NAME.")
        if min(self.size, self.skip, self.max_answer) < 0:
            raise ValueError(
                f"expected size, skip and max_answer ≥ 0, got {self.size}, {self.skip} and {self.max_answer}."
            )
        if self.answer_kind == "code" and not (self.tests or "tests" in self.metadata):
            raise ValueError("answer_kind 'code' has no tests; set tests: livecodebench, or metadata: {tests: COLUMN}.")
        if self.open_answer and not self.choices:
            raise ValueError("open_answer is for rows without choices; set choices: COLUMN, or answer instead.")
        if self.answer_boxed and self.answer_after:
            raise ValueError("expected answer_boxed or answer_after, got both.")
        if self.template and self.template not in TEMPLATES:
            raise ValueError(f"unknown template '{self.template}'.{did_you_mean(self.template, TEMPLATES)}")
        if self.user_prompt and (PLACEHOLDER not in self.user_prompt or self.template not in ("chat", "plain")):
            raise ValueError(
                f"user_prompt: expected a text with {PLACEHOLDER} where the problem goes, and template chat or plain, "
                f"got '{self.user_prompt[:60]}' and template '{self.template}'."
            )
        if self.system_prompt and self.template != "chat":
            raise ValueError(f"system_prompt: expected template chat, got '{self.template}'; set template: chat.")

    def _check_task(self) -> None:
        """Replaces `difficulty` by the family's own settings; refuses where data would come from."""
        task = TASKS[self.source]
        for name in ("path", "name", "subset", "revision", "files", "streaming"):
            if given := getattr(self, name):
                raise ValueError(
                    f"{name} {given!r} would be ignored: source '{self.source}' makes its own problems. Remove it, or "
                    f"set source: {'file' if name == 'path' else 'hub'}."
                )
        config, problems = build_config(task.difficulty, self.difficulty, "difficulty")
        if problems:
            raise SettingsError(problems)
        object.__setattr__(self, "difficulty", config)
        if self.answer_kind != task.answer_kind:
            verifier = " and verifier: verifier.steps" if task.answer_kind == "steps" else ""
            raise ValueError(
                f"the answers of task '{self.source}' are of kind {task.answer_kind}, got {self.answer_kind}; set "
                f"answer_kind: {task.answer_kind}{verifier}."
            )

    @property
    def place(self) -> str:
        """Name of the source in error texts."""
        if self.source in TASKS:
            return f"task '{self.source}'"
        return self.path or f"dataset '{self.name}'"

    @property
    def solution_column(self) -> str:
        """The column with worked solutions; "" without one."""
        return self.solution or (self.answer if self.answer_boxed or self.answer_after else "")

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of reference answers of its rows; empty without any."""
        if not self.answer and self.source not in TASKS:
            return frozenset({"code"} if self.tests or "tests" in self.metadata else ())
        return frozenset({self.answer_kind, "value"} if self.open_answer else {self.answer_kind})

    @property
    def by_template(self) -> str:
        """The template of its prompts."""
        return self.template or (self.source if self.source in TASKS else "thought")

    @property
    def columns(self) -> list[str]:
        """Columns of the source that are read, without those of the joined dataset; dotted names as written."""
        columns = [self.question, self.answer, *self.metadata.values(), *self.keep, self.choices, self.starter_code]
        columns += [self.solution, self.open_answer]
        if self.tests:
            columns += LIVECODEBENCH
        if self.join:
            columns.append(self.join.row)
        return list(dict.fromkeys(c for c in columns if c and not c.startswith(JOINED)))

    @property
    def joined_columns(self) -> list[str]:
        """Columns of the joined dataset that are read, by their names there."""
        columns = [self.question, self.answer, self.solution, self.choices, self.starter_code, *self.metadata.values()]
        return list(dict.fromkeys(c.removeprefix(JOINED) for c in columns if c.startswith(JOINED)))


def parse_source(entry: dict[str, Any], place: str) -> Source:
    """Checks a data section; raises one ConfigError with all its mistakes."""
    source, problems = read_source(entry, place)
    if source is None:
        raise ConfigError("\n".join(problems))
    return source


def read_source(entry: Mapping[str, Any], place: str) -> tuple[Source | None, list[str]]:
    """(a checked data section, []), or (None, one sentence per mistake)."""
    source, problems = build_config(Source, entry, place)
    if source is None and entry.get("source") in TASKS:
        # `__post_init__`, which checks the difficulty, did not run where another setting is wrong.
        _, wrong = build_config(TASKS[entry["source"]].difficulty, entry.get("difficulty"), f"{place}.difficulty")
        problems += [sentence for sentence in wrong if sentence not in problems]
    return source, problems
