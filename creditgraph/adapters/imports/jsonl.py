"""Any trainer: JSON lines, or Parquet, whose columns are the fields of a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from creditgraph.adapters.imports.row import Format, Options, Part, Row, lines, number_in, parquet_rows, said_by
from creditgraph.pipeline.core.errors import DataError, did_you_mean

# Other names that trainers give to a field.
_ALIASES = {
    "response": ("completion", "output"),
    "tokens": ("response_ids", "completion_ids", "token_ids"),
    "mask": ("response_mask", "loss_mask", "completion_mask"),
    "reward": ("score",),
    "advantage": ("advantages", "token_advantages"),
    "group": ("group_id", "prompt_id", "example_id", "uid"),
    "logprobs": ("rollout_logprobs", "sampling_logprobs"),
}
NAMES = (*(f.name for f in fields(Row) if f.name != "parts"), "response")


class Lines(Format):
    """One response per line (or row of a .parquet file) under the names of `Row`'s fields; `response` is its text.

    A response, or a prompt, is a text or a list of messages. Responses without a group are compared if their prompts
    are equal.
    """

    name = "jsonl"
    source = "this page"
    patterns = ("*.jsonl", "*.parquet")

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The lines, or rows."""
        return parquet_rows(file) if file.suffix == ".parquet" else lines(file)

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """One row."""
        for name in options.columns:
            if name not in NAMES:
                raise DataError(f"--columns {name}=…: expected one of {', '.join(NAMES)}.{did_you_mean(name, NAMES)}")
        found = {name: _value(entry, name, options) for name in NAMES}
        given = {name: value for name, value in found.items() if value is not None}
        response = given.pop("response", "")
        given.setdefault("step", number_in(file.stem))
        given["group"] = str(given.get("group", given.get("prompt_ids", given.get("prompt"))))
        if "episode" in given:
            given["episode"] = str(given["episode"])
        given["answer"] = str(given.get("answer", ""))
        if not isinstance(response, str | list):
            raise DataError(f"response: expected a text or messages, got {type(response).__name__}")
        parts = [Part(response)] if isinstance(response, str) else [said_by(message) for message in response]
        return [Row(**given, parts=[part for part in parts if part.text])]


def _value(entry: Any, name: str, options: Options) -> Any:
    if name in options.columns:
        return entry[options.columns[name]]
    return next((entry[k] for k in (name, *_ALIASES.get(name, ())) if entry.get(k) is not None), None)
