"""The command line of an evaluation: key=value, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.errors import ConfigError, did_you_mean
from pipeline.core.settings import build_config
from pipeline.run.compose import parse_settings


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
    """of the runs: latest, initial (the untrained model), the number of an iteration, or a model folder"""
    engine: str = ""
    """a choice of the engine group; empty keeps the run's"""
    tasks: str = ""
    """tasks of the suite to evaluate, separated by commas; empty: all"""
    label: str = ""
    """keeps these records beside others of the same checkpoint"""
    chunk: int = 256
    """responses asked at once and written as one file; an interrupted evaluation asks at most so many again"""
    contamination: bool = True
    """look for the problems in the training data"""
    train: str = ""
    """a file of configs/data whose train entry is searched for the problems; empty: what the run was trained on"""
    device: str = ""
    """cpu, cuda …; empty keeps the run's"""
    root: str = "runs"
    """folder that holds the directories of evaluated models"""
    seed: int | None = None
    """in place of the suite's"""
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: found {self.chunk}; wanted at least 1 response.")
        if not self.run and not self.model:
            raise ValueError("nothing to evaluate; wanted run=RUN or model=NAME (or both, side by side).")
        if self.label.strip(".") != self.label or "/" in self.label:
            raise ValueError(f"label: found '{self.label}'; wanted a plain name.")


# Dotted settings: what the first part of a name is about.
SECTIONS = ("engine", "model", "tasks", "data", "contamination")
TEXTS = ("suite", "run", "model", "checkpoint", "engine", "tasks", "label", "train", "device", "root")


def parse_request(arguments: Sequence[str]) -> Request:
    """Reads key=value arguments; all mistakes come in one ConfigError."""
    plain: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    names = [f.name for f in dataclasses.fields(Request) if f.name != "changes"]
    problems = []
    for text in arguments:
        key, equals, value = text.partition("=")
        head, dot, _ = key.partition(".")
        if equals and dot and head in SECTIONS:
            dotted.setdefault(head, []).append(text)
        elif equals and key in names:
            plain[key] = value if key in TEXTS else parse_settings([text])[key]
        else:
            what = (
                "no '='; wanted key=value"
                if not equals
                else f"unknown.{did_you_mean(key, [*names, *(f'{s}.…' for s in SECTIONS)])}"
            )
            problems.append(f"'{text}': {what}")
    changes = {head: parse_settings(texts)[head] for head, texts in dotted.items()}
    request, found = build_config(Request, {**plain, "changes": changes}, "eval")
    if problems or found:
        raise ConfigError("\n".join([*problems, *found]))
    assert isinstance(request, Request)
    return request


def names_in(text: str) -> list[str]:
    """The parts of a list written with commas.

    >>> names_in("a, b,")
    ['a', 'b']
    """
    return [part.strip() for part in text.split(",") if part.strip()]
