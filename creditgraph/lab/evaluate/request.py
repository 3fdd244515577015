"""The command line of an evaluation: key=value, checked."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from creditgraph.pipeline.core.errors import ConfigError, did_you_mean
from creditgraph.pipeline.core.settings import build_config
from creditgraph.pipeline.run.compose.overrides import parse_settings


@dataclass(frozen=True, kw_only=True)
class Request:
    """The command line of an evaluation, as key=value."""

    suite: str
    """a file of configs/suite"""
    run: str = ""
    """run directories, separated by commas"""
    model: str = ""
    """models of configs/model, folders or hub names, separated by commas: evaluated with their own weights"""
    checkpoint: str = "latest"
    """checkpoint of the runs: latest, initial (the untrained model), the number of an iteration, or a model folder"""
    engine: str = ""
    """a choice of the engine group; empty keeps the run's"""
    tasks: str = ""
    """tasks of the suite to evaluate, separated by commas; empty: all"""
    label: str = ""
    """name under which these records are kept in addition to others of the same checkpoint"""
    chunk: int = 256
    """responses sampled at once and written as one file; an interrupted evaluation repeats at most so many"""
    contamination: bool = True
    """search the problems in the training data"""
    train: str = ""
    """a file of configs/data whose train entry is searched for the problems; empty: what the run was trained on"""
    device: str = ""
    """cpu, cuda …; empty keeps the run's"""
    root: str = "runs"
    """folder that holds the directories of evaluated models"""
    seed: int | None = None
    """random seed, instead of the suite's"""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """dotted settings by their first part: engine, model, tasks, data, contamination"""

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: expected at least 1 response, got {self.chunk}.")
        if not self.run and not self.model:
            raise ValueError("nothing to evaluate; expected run=RUN or model=NAME (or both, to compare them).")
        if self.label.strip(".") != self.label or "/" in self.label:
            raise ValueError(f"label: expected a plain name, got '{self.label}'.")

    def changed(self, section: str) -> dict[str, Any]:
        """The dotted settings of a section."""
        return dict(self.changes.get(section) or {})

    @property
    def suite_changes(self) -> dict[str, Any]:
        """Settings merged over those of the suite's file."""
        changes: dict[str, Any] = {k: v for k, v in self.changes.items() if k in ("tasks", "contamination")}
        return changes if self.seed is None else {**changes, "seed": self.seed}


SECTIONS = ("engine", "model", "tasks", "data", "contamination")


def parse_request(arguments: Sequence[str]) -> Request:
    """Reads key=value arguments; all mistakes come in one ConfigError."""
    fields = {f.name: f.type for f in dataclasses.fields(Request) if f.name != "changes"}
    plain: dict[str, Any] = {}
    dotted: dict[str, list[str]] = {}
    problems = []
    for text in arguments:
        key, equals, value = text.partition("=")
        section, dot, _ = key.partition(".")
        if equals and dot and section in SECTIONS:
            dotted.setdefault(section, []).append(text)
        elif equals and key in fields:
            # Texts are taken as written: as YAML, a folder called 007 would be a number.
            plain[key] = value if fields[key] is str else parse_settings([text])[key]
        elif not equals:
            problems.append(f"'{text}': no '='; expected key=value")
        else:
            known = [*fields, *(f"{section}.…" for section in SECTIONS)]
            problems.append(f"'{text}': unknown.{did_you_mean(key, known)}")
    changes = {section: parse_settings(texts)[section] for section, texts in dotted.items()}
    request, mistakes = build_config(Request, {**plain, "changes": changes}, "eval")
    if problems or mistakes:
        raise ConfigError("\n".join([*problems, *mistakes]))
    assert isinstance(request, Request)
    return request


def names_in(text: str) -> list[str]:
    """The parts of a list written with commas.

    >>> names_in("a, b,")
    ['a', 'b']
    """
    return [part.strip() for part in text.split(",") if part.strip()]
