"""Evaluation sets: data files of the configuration, read as the problems of a task."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from creditgraph.components.data.fit import mode_misfits
from creditgraph.components.data.loading import load_data, make_prompts
from creditgraph.components.data.sources import parse_source
from creditgraph.components.models.load import context_length
from creditgraph.components.verifier.base import verifier_of
from creditgraph.lab.evaluate.items import short_hash
from creditgraph.lab.evaluate.suite import Suite, SuiteTask
from creditgraph.pipeline.core.component import Context, ModelSpec, set_up
from creditgraph.pipeline.core.errors import ConfigError, CreditgraphError, DataError, did_you_mean
from creditgraph.pipeline.core.handles import Verifier
from creditgraph.pipeline.core.payloads import Prompts
from creditgraph.pipeline.core.registry import build_component, load_class
from creditgraph.pipeline.core.sockets import sockets_of
from creditgraph.pipeline.run.compose.experiment import compose
from creditgraph.pipeline.run.compose.overrides import deep_merge


@dataclass(frozen=True, kw_only=True)
class Problems:
    """The problems of a task.

    Attributes:
        name: name of the task.
        task: settings of the task.
        source: the entry of the data file.
        prompts: the model input.
        ids: per problem, a hash of question and reference answer (and of how many equal ones came before it).
        questions: per problem, its text.
        rejected: rows that could not be used, with the reason; of very many only the first.
        num_rejected: how many there were.
        verifier: component (use) and its settings.
        notes: notes for the user.
    """

    name: str
    task: SuiteTask
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
        """Hash of problems, answers and prompts."""
        return short_hash(*self.ids, *[short_hash(row.numpy().tobytes()) for row in self.prompts.tokens.rows()])

    @property
    def keys(self) -> torch.Tensor:
        """int64 [P]: addresses of random streams, the same for a problem whatever set or order it is in."""
        return torch.tensor(
            [int.from_bytes(bytes.fromhex(i), "little", signed=True) for i in self.ids], dtype=torch.int64
        )


def data_entry(data: str, split: str, place: str, config_dirs: Sequence[str | Path] = ()) -> dict[str, Any]:
    """One entry of a file of configs/data: `split`, or eval, or the only one; `place` is named in the error."""
    sections: dict[str, Any] = compose([f"data={data}"], config_dirs).get("data") or {}
    name = split or (next(iter(sections)) if len(sections) == 1 else "eval")
    if name not in sections:
        raise ConfigError(f"{place}: data/{data}.yaml has no entry '{name}'.{did_you_mean(name, sections)} Set split.")
    return dict(sections[name])


def load_problems(
    suite: Suite,
    spec: ModelSpec,
    tokenizer: Any,
    changes: Mapping[str, Mapping[str, Any]],
    config_dirs: Sequence[str | Path],
) -> list[Problems]:
    """Loads the problems of every task; raises one error with all mistakes, before a model is loaded.

    Args:
        suite: the tasks.
        spec, tokenizer: spec and tokenizer of the model.
        changes: task → settings merged over its data entry, such as a local path.
        config_dirs: further config folders.
    """
    unknown = [name for name in changes if name not in suite.tasks]
    if unknown:
        raise ConfigError(
            f"data.{unknown[0]}: no such task in suite {suite.name}.{did_you_mean(unknown[0], suite.tasks)}"
        )
    problems: list[Problems] = []
    mistakes: list[str] = []
    for number, (name, task) in enumerate(suite.tasks.items()):
        try:
            entry = data_entry(task.data, task.split, f"tasks.{name}", config_dirs)
            entry = deep_merge(entry, dict(changes.get(name) or {}))
            problems.append(_load(number, name, task, entry, spec, tokenizer))
        except CreditgraphError as error:
            mistakes.append(_with_override(name, error))
    if mistakes:
        raise DataError(
            f"suite {suite.name}: {len(mistakes)} of {len(suite.tasks)} sets cannot be loaded:\n"
            + "\n".join(f"  {m}" for m in mistakes)
        )
    return problems


def _with_override(name: str, error: CreditgraphError) -> str:
    override = f"data.{name}.path="
    step = f" For a local copy: {override}FILE." if isinstance(error, DataError) and override not in str(error) else ""
    return f"{name}: {error}{step}"


def _load(number: int, name: str, task: SuiteTask, entry: dict[str, Any], spec: ModelSpec, tokenizer: Any) -> Problems:
    if task.template:
        entry["template"] = task.template
    if task.problems:
        entry["size"] = min(int(entry.get("size") or task.problems), task.problems)
    if task.shuffle:
        entry["shuffle"] = True
    source = parse_source(entry, f"data.{name}")
    misfits = mode_misfits(source, task.mode, f"tasks.{name}", f"tasks.{name}")
    if misfits:
        raise ConfigError(misfits[0])
    context = Context(node=name, model=spec)
    rows = load_data(entry, context, tokenizer, place=f"data.{name}").rows
    # A verifier caches verdicts by prompt, so no two tasks share a uid.
    uids = torch.arange(len(rows)) + (number << 32)
    seen: Counter[str] = Counter()
    ids = []
    for row in rows:
        first = short_hash(str(row.metadata["question"]), row.answer)
        ids.append(short_hash(first, str(seen[first])) if seen[first] else first)
        seen[first] += 1
    named = task.verifier or entry.get("verifier") or {}
    verifier = {"use": named} if isinstance(named, str) else dict(named)
    if not verifier.get("use"):
        raise ConfigError(
            f"tasks.{name}: neither the suite nor data/{task.data}.yaml names a verifier; set "
            f"tasks.{name}.verifier.use."
        )
    # Chat templates belong to the model, so prompts differ between models and are part of the fingerprint.
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


class SuiteVerifiers:
    """Verifiers by component and settings; equal ones are started once."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._started: dict[str, tuple[Any, Verifier]] = {}

    def check(self, problems: Problems) -> None:
        """Raises ConfigError for an unknown component or setting."""
        self._build(problems)

    def of(self, problems: Problems) -> Verifier:
        """The verifier of a task."""
        key = json.dumps(problems.verifier, sort_keys=True)
        if key not in self._started:
            component = set_up(self._build(problems), Context(node="verifier", model=self._spec))
            self._started[key] = component, verifier_of(component, f"tasks.{problems.name}: {problems.verifier['use']}")
        return self._started[key][1]

    def close(self) -> None:
        """Ends worker processes."""
        for component, _ in self._started.values():
            component.close()

    def _build(self, problems: Problems) -> Any:
        place = f"tasks.{problems.name}.verifier"
        settings = dict(problems.verifier)
        use = str(settings.pop("use"))
        if not output_of(load_class(use), Verifier):
            raise ConfigError(f"{place}: {use} has no verifier output; choose one (creditgraph components verifier).")
        return build_component(use, settings, place)


def output_of(cls: type, kind: type) -> str:
    """The first output of a component class that carries this kind, "" without any."""
    return next((name for name, socket in sockets_of(cls).outputs.items() if socket.carries(kind)), "")
