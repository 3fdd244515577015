"""TRL: the tables of completions that GRPOTrainer writes with `log_completions=True`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from creditgraph.adapters.imports.row import Format, Options, Part, Row, number_in, parquet_rows, said_by
from creditgraph.pipeline.core.errors import DataError, did_you_mean

_OWN = ("step", "prompt", "completion", "advantage", "completion_ids", "prompt_ids", "answer", "images")


class Completions(Format):
    """completions/completions_STEP.parquet: texts, a column per reward function, and one advantage per response.

    Rows with the same prompt are a group. The reward is the sum of the columns, or what `rewards` weighs; columns of
    `log_extra` that hold numbers must be left out with it, except `completion_ids` and `answer`, which are read.
    """

    name = "trl"
    source = "TRL 1.16"
    patterns = ("**/completions_*.parquet",)
    patches = {
        "tokens": "have a reward function log them: def reward(completions, completion_ids, log_extra, **_): "
        'log_extra("completion_ids", completion_ids)',
    }

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The rows of the table."""
        return parquet_rows(file)

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """One row."""
        completion = entry["completion"]
        plain = isinstance(completion, str)
        prompt = entry["prompt"]
        advantage = entry.get("advantage")
        return [
            Row(
                step=entry.get("step", number_in(file.stem)),
                group=str(prompt),
                prompt=prompt,
                prompt_ids=entry.get("prompt_ids"),
                parts=[Part(completion)] if plain else [said_by(message) for message in completion],
                tokens=entry.get("completion_ids"),
                reward=_reward(entry, options.rewards),
                answer="" if entry.get("answer") is None else str(entry["answer"]),
                advantage=None if advantage is None else float(advantage),
            )
        ]


def _reward(entry: Mapping[str, Any], weights: Mapping[str, float]) -> float:
    columns = [name for name, value in entry.items() if name not in _OWN and _number(value)]
    for name in weights:
        if name not in entry:
            raise DataError(f"no column '{name}' for --rewards.{did_you_mean(name, columns)}")
    # As TRL: functions that returned None for a row are left out, and a row without any is without a reward.
    found = [
        entry[name] * weight
        for name, weight in (weights or dict.fromkeys(columns, 1.0)).items()
        if _number(entry[name])
    ]
    found = [value for value in found if not math.isnan(value)]
    return sum(found) if found else math.nan


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
