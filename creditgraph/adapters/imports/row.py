"""The form in which every reader gives the rollouts of a trainer's files, and what the readers share."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from creditgraph.pipeline.core.errors import DataError

Message = Mapping[str, Any]
Numbers = list[float | None]
TokenId = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
Step = Annotated[int, pydantic.Field(ge=0, lt=1 << 24)]

PER_TOKEN = ("mask", "logprobs", "old_logprobs", "reference_logprobs", "entropies", "values")


@dataclass(frozen=True)
class Part:
    """A piece of a response's text.

    Attributes:
        text: as the file has it.
        trained: whether the policy wrote it; False for what a tool, a user or an environment wrote.
    """

    text: str
    trained: bool = True


@pydantic.dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One response of a trainer, of what its file has; None is what it lacks.

    A value of another type raises pydantic's ValidationError.

    Attributes:
        group: responses with equal groups in the same step are compared with each other.
        episode: of which the row is one step; those of an episode lie next to each other, in order. Every row is a
            turn then, or several.
        step: of the training; None where neither file nor row says it.
        prompt: its text, or its messages.
        prompt_ids: the prompt as token ids.
        parts: the response as text.
        tokens: the response as token ids, what tools wrote included.
        mask: per token, whether the policy sampled it and is trained on it; None is all of them.
        reward: NaN where there is none.
        advantage: per token of the response, or one number for all that are trained on.
        logprobs: per token, of the policy that sampled it [nats]; None within it is unknown.
        old_logprobs: per token, by the trainer before its step.
        reference_logprobs: per token, of the reference model.
        entropies: per token, of the distribution that it was sampled from [nats].
        values: per token, a critic's value before it.
        turn_rewards, states: of each turn its reward and a key of the state before it; turns are runs of trained
            tokens.
        answer: the reference answer.
        finish: why the response ended.
    """

    group: str
    episode: str | None = None
    step: Step | None = None
    prompt: str | list[Message] = ""
    prompt_ids: list[TokenId] | None = None
    parts: list[Part] = field(default_factory=list)
    tokens: list[TokenId] | None = None
    mask: list[bool] | None = None
    reward: float = float("nan")
    advantage: float | Numbers | None = None
    logprobs: Numbers | None = None
    old_logprobs: Numbers | None = None
    reference_logprobs: Numbers | None = None
    entropies: Numbers | None = None
    values: Numbers | None = None
    turn_rewards: list[float] | None = None
    states: list[str | int] | None = None
    answer: str = ""
    finish: str = ""

    def __post_init__(self) -> None:
        if self.tokens is None and not self.parts:
            raise DataError("it has neither token ids nor a text of the response")
        for message in () if isinstance(self.prompt, str) else self.prompt:
            text_of(message.get("content"))  # raises for one that has none
        per_token = {name: getattr(self, name) for name in PER_TOKEN}
        if isinstance(self.advantage, list):
            per_token["advantage"] = self.advantage
        for name, values in per_token.items():
            if values is None:
                continue
            if self.tokens is None:
                raise DataError(f"it has {name} per token, but no token ids")
            if len(values) != len(self.tokens):
                raise DataError(f"{len(values)} entries in {name}, but {len(self.tokens)} tokens")

    @property
    def text(self) -> str:
        """The response as text, "" where it is unknown."""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user says about files that do not say it.

    Attributes:
        rewards: reward column → weight; {} is every column that may be one, at weight 1.
        columns: name of a field of `Row` → column that has it.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)


class Format:
    """A trainer's files.

    Attributes:
        name: as `--from` takes it.
        source: what wrote the files that the tests read, with its version.
        patterns: of files in a folder, the first pattern with any file counts.
        patches: what the files lack → the smallest change that would add it, as a sentence.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    patterns: ClassVar[tuple[str, ...]]
    patches: ClassVar[Mapping[str, str]] = {}

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """(place in the file, entry) of each row; an entry that is an Exception says why there is none."""
        raise NotImplementedError

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """The rows of an entry; raises DataError, LookupError, TypeError or ValueError for one that has none."""
        raise NotImplementedError

    def joined(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a step, where what its file has of several rows says what they are."""
        return list(rows)


def one_outcome(rows: Sequence[Row], copies: bool = False) -> list[Row]:
    """Steps of episodes whose rows each have a copy of the outcome: it belongs to the last one. An episode of one row
    is a response.

    Args:
        rows: of a step.
        copies: rows whose rewards differ are responses of their own.
    """
    members: dict[str | None, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.episode, []).append(i)
    out = list(rows)
    for episode, places in members.items():
        alone = episode is None or len(places) == 1 or (copies and len({rows[i].reward for i in places}) > 1)
        for i in places:
            if alone:
                out[i] = replace(rows[i], episode=None)
            elif i != places[-1] and not math.isnan(rows[i].reward):
                out[i] = replace(rows[i], reward=0.0)
    return out


def lines(file: Path) -> Iterator[tuple[str, Any]]:
    """(line, JSON object) of each line; an Exception in place of one that is no object."""
    with file.open(encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                found = DataError(f"no JSON: {error}")
            if not isinstance(found, dict | Exception):
                found = DataError("expected a JSON object")
            yield f"line {number}", found


def parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(row, its columns) of a Parquet file; raises DataError for another file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:
            number = 0
            for batch in opened.iter_batches(1024):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a Parquet file that can be read ({str(error).splitlines()[0]}).") from error


def number_in(name: str) -> int | None:
    """The last whole number in a name; None without one.

    >>> number_in("completions_00012"), number_in("data")
    (12, None)
    """
    digits = "".join(c if c.isdecimal() else " " for c in name).split()
    return int(digits[-1]) if digits else None


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts; pictures are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple | None):
        raise DataError(f"the content of a message: expected a text or its parts, got {type(content).__name__}")
    return "".join(str(part.get("text") or "") for part in content or () if isinstance(part, Mapping))


def reason_of(error: Exception) -> str:
    """Why a row cannot be read, in words that are the same for rows with the same fault."""
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        if not first["loc"]:
            return str(first["ctx"]["error"])  # of `Row`
        return f"{first['loc'][0]}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return f"no '{error.args[0]}'" if isinstance(error, KeyError) else str(error)


def said_by(message: Message) -> Part:
    """What a message adds to a response; that of an assistant is trained on."""
    if not isinstance(message, Mapping):
        raise DataError(f"expected a text or messages, got a list of {type(message).__name__}")
    calls = message.get("tool_calls") or ()
    called = "".join(f"[{_call(call)}]" for call in calls)
    text = str(message.get("reasoning_content") or "") + text_of(message.get("content")) + called
    return Part(text, message.get("role") == "assistant")


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function") or call
    return f"{function.get('name')}({function.get('arguments')})"
