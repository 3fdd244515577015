"""What a graph credits inside another trainer, as JSON lines that `creditgraph import --from jsonl` reads."""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditgraph.adapters.rows import Rollouts, places_of_groups, turn_rows, turns_of
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.run.run_directory import make_folder, writing

OPTION = "--record="
ROWS = 64
"""Of each batch the first groups that have as many rows: a batch of a large run is some 100 MB of text"""


class Record:
    """Appends rows with their credit to a file, whose steps count on where it ends.

    Args:
        path: of the file, in a folder that need not exist.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent, OPTION)
        with writing(path, OPTION), path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            last = list(deque(file, maxlen=2))
        # A process that was killed may have left a part of a line.
        self._begin = "\n" if last and not last[-1].endswith("\n") else ""
        whole = [line for line in last if line.endswith("\n")]
        try:
            self.step = int(json.loads(whole[-1])["step"]) + 1 if whole else 0
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{OPTION}{path}: the file has other lines than rows of a graph; name another.") from None

    def write(self, rollouts: Rollouts, advantages: Tensor, turns: bool) -> None:
        """Appends the rows of a batch, in the first of several processes that all have it.

        Args:
            advantages: [N, T].
            turns: whether the graph reads rewards and states of turns.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        with writing(self.path, OPTION), self.path.open("a", encoding="utf-8") as file:
            for row in rows_of(rollouts, advantages, turns):
                # Groups of different steps have different names, for readers that know no steps.
                named = {"step": self.step, "group": f"{self.step}.{row['group']}"}
                file.write(self._begin + json.dumps(row | named, default=str) + "\n")  # a prompt may hold an image
                self._begin = ""
        self.step += 1


def rows_of(rollouts: Rollouts, advantages: Tensor, turns: bool) -> Iterator[dict[str, Any]]:
    """The rows that are written, as fields of `creditgraph.adapters.imports.row.Row`."""
    group = places_of_groups(rollouts.group)
    kept = group <= int((torch.bincount(group).cumsum(0) < ROWS).sum())
    # Of a row that is not trained on one token stays, with its reward.
    lengths = (rollouts.trained * torch.arange(1, rollouts.mask.shape[1] + 1)).amax(1).clamp(min=1)
    tensors = {"advantage": advantages} | {
        name: getattr(rollouts, name) for name in ("logprobs", "entropies", "values")
    }
    lists = {
        "prompt_ids": "prompts",
        "prompt": "texts",
        "answer": "answers",
        "response": "responses",
        "states": "states",
    }
    spans = turns_of(rollouts.trained)
    rewards = rollouts.rewards if rollouts.rewards.dim() == 1 else rollouts.rewards.sum(1)
    of_turns = turn_rows(rollouts, spans, spans.row).reward if turns else None
    for i in kept.nonzero()[:, 0].tolist():
        end = int(lengths[i])
        row = {
            "group": int(group[i]),
            "reward": _numbers(rewards[i : i + 1])[0],
            "mask": rollouts.trained[i, :end].int(),
        }
        row |= {"tokens": rollouts.tokens[i, :end]} if rollouts.tokens is not None else {}
        row |= {} if rollouts.episode is None else {"episode": int(rollouts.first[i])}
        row |= {name: value[i, :end] for name, value in tensors.items() if value is not None}
        row |= {name: getattr(rollouts, of)[i] for name, of in lists.items() if getattr(rollouts, of) is not None}
        row |= {} if of_turns is None else {"turn_rewards": of_turns[spans.row == i]}
        yield {name: _numbers(value) if isinstance(value, Tensor) else value for name, value in row.items()}


def _numbers(values: Tensor) -> list[float | int | None]:
    """As few digits as float32 has; None for what is not a number."""
    if not values.is_floating_point():
        return values.tolist()
    return [float(str(x)) if np.isfinite(x) else None for x in values.detach().cpu().float().numpy()]
