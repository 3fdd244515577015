"""Evaluation sets: data files of the configuration, read as the problems of a task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from components.data.loading import load_data, make_prompts
from components.models.load import context_length
from pipeline.app.evaluate.items import short_hash
from pipeline.app.evaluate.suite import Suite, Task
from pipeline.core.component import Component, Context, ModelSpec
from pipeline.core.errors import ConfigError, CreditgraphError, DataError, did_you_mean
from pipeline.core.payloads import Prompts, Verifier
from pipeline.core.registry import load_class
from pipeline.core.settings import build_config
from pipeline.run.compose import compose, deep_merge


@dataclass(frozen=True, kw_only=True)
class Problems:
    """The problems of a task.

    Attributes:
        name: of the task.
        task: its settings.
        source: the entry of the data file.
        prompts: what the model sees.
        ids: per problem, a hash of question and reference answer (and of how many equal ones came before it).
        questions: per problem, its text.
        rejected: rows that could not be used, with the reason; of very many only the first.
        num_rejected: how many there were.
        verifier: component and settings that judge.
        notes: what a user should know.
    """

    name: str
    task: Task
    source: dict[str, Any]
    prompts: Prompts
    ids: list[str]
    questions: list[str]
    rejected: list[dict[str, Any]]
    num_rejected: int
    verifier: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Of problems, answers and prompts."""
        return short_hash(*self.ids, *[short_hash(row.numpy().tobytes()) for row in self.prompts.tokens.rows()])

    @property
    def keys(self) -> torch.Tensor:
        """int64 [P]: addresses of random streams, the same for a problem whatever set or order it is in."""
        return torch.tensor(
            [int.from_bytes(bytes.fromhex(i), "little", signed=True) for i in self.ids], dtype=torch.int64
        )


@dataclass(frozen=True, kw_only=True)
class DataChoices:
    """Where data files are looked up, and what the command line changes in them.

    Attributes:
        config_dirs: further config folders.
        changes: task → settings merged over its data entry, such as a local path.
    """

    config_dirs: Sequence[str | Path] = ()
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def entry(self, data: str, split: str, place: str) -> dict[str, Any]:
        """One entry of a data file: `split`, or eval, or the only one."""
        sections: dict[str, Any] = compose([f"data={data}"], self.config_dirs).get("data") or {}
        name = split or ("eval" if "eval" in sections else next(iter(sections), "") if len(sections) == 1 else "eval")
        if name not in sections:
            raise ConfigError(
                f"{place}: data/{data}.yaml has no entry '{name}'.{did_you_mean(name, sections)} Set split."
            )
        return dict(sections[name])


def load_problems(suite: Suite, choices: DataChoices, spec: ModelSpec, tokenizer: Any) -> list[Problems]:
    """The problems of every task; what is wrong with any of them comes in one error, before a model is loaded."""
    unknown = [name for name in choices.changes if name not in suite.tasks]
    if unknown:
        raise ConfigError(
            f"data.{unknown[0]}: no such task in suite {suite.name}.{did_you_mean(unknown[0], suite.tasks)}"
        )
    found, mistakes = [], list[str]()
    for number, (name, task) in enumerate(suite.tasks.items()):
        try:
            found.append(_load(number, name, task, choices, spec, tokenizer))
        except CreditgraphError as error:
            mistakes.append(_with_override(name, error))
    if mistakes:
        raise DataError(
            f"suite {suite.name}: {len(mistakes)} of {len(suite.tasks)} sets cannot be had:\n"
            + "\n".join(f"  {m}" for m in mistakes)
        )
    return found


def _with_override(name: str, error: CreditgraphError) -> str:
    override = f"data.{name}.path="
    step = f" For a local copy: {override}FILE." if isinstance(error, DataError) and override not in str(error) else ""
    return f"{name}: {error}{step}"


def _load(number: int, name: str, task: Task, choices: DataChoices, spec: ModelSpec, tokenizer: Any) -> Problems:
    place = f"tasks.{name}"
    entry = deep_merge(choices.entry(task.data, task.split, place), dict(choices.changes.get(name) or {}))
    if task.template:
        entry["template"] = task.template
    if task.problems:
        entry["size"] = min(int(entry.get("size") or task.problems), task.problems)
    context = Context(node=name, model=spec)
    rows = load_data(entry, context, tokenizer, place=f"data.{name}").rows
    # A verifier remembers verdicts by prompt: no two tasks share a uid.
    uids = torch.arange(len(rows)) + (number << 32)
    seen: dict[str, int] = {}
    ids = []
    for row in rows:
        first = short_hash(str(row.metadata["question"]), row.answer)
        count = seen[first] = seen.get(first, -1) + 1
        ids.append(first if not count else short_hash(first, str(count)))
    verifier = dict(task.verifier) or _verifier(entry)
    if not verifier.get("use"):
        raise ConfigError(
            f"{place}: neither the suite nor data/{task.data}.yaml names a verifier; set tasks.{name}.verifier.use."
        )
    prompts = make_prompts(list(rows), tokenizer, uids)
    room = context_length(spec) - int(prompts.tokens.lengths.max())
    notes = (
        f"{name}: max_tokens is {task.max_tokens}, but the model's context leaves {room} after the longest prompt",
    )
    return Problems(
        name=name,
        task=task,
        source=entry,
        prompts=prompts,
        ids=ids,
        questions=[str(row.metadata["question"]) for row in rows],
        num_rejected=int(context.metrics.get("rejected", 0)),
        rejected=[{"task": name, **{k: v for k, v in r.items() if k in ("row", "reason")}} for r in context.rejected],
        verifier=verifier,
        notes=notes if room < task.max_tokens else (),
    )


def _verifier(entry: Mapping[str, Any]) -> dict[str, Any]:
    named = entry.get("verifier")
    return {"use": named} if isinstance(named, str) else dict(named or {})


class Verifiers:
    """Verifies by verifier and settings; equal ones are started once."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._started: dict[str, tuple[Component, Verifier]] = {}

    def check(self, verifier: Mapping[str, Any], place: str) -> None:
        """Raises ConfigError for an unknown component or setting."""
        self._build(verifier, place)

    def of(self, verifier: Mapping[str, Any], place: str) -> Verifier:
        """The verifier."""
        key = json.dumps(verifier, sort_keys=True)
        if key not in self._started:
            component = self._build(verifier, place)
            component.setup(Context(node="verifier", model=self._spec))
            outputs: Any = component.run()
            verifiers = [
                v for v in (getattr(outputs, f.name) for f in dataclasses.fields(outputs)) if isinstance(v, Verifier)
            ]
            if not verifiers:
                raise ConfigError(
                    f"{place}: {verifier['use']} returns no verifier; choose one (creditgraph components verifier)."
                )
            self._started[key] = component, verifiers[0]
        return self._started[key][1]

    def close(self) -> None:
        """Ends worker processes."""
        for component, _ in self._started.values():
            component.close()

    def _build(self, verifier: Mapping[str, Any], place: str) -> Component:
        cls: Any = load_class(str(verifier["use"]))
        config, problems = build_config(
            cls.Config, {k: v for k, v in verifier.items() if k != "use"}, f"{place}.verifier"
        )
        if problems:
            raise ConfigError("\n".join(problems))
        built: Component = cls(config)
        return built
