"""slime: the samples that `--save-debug-rollout-data` saves."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from creditgraph.adapters.imports.row import Format, Options, Part, Row, number_in, one_outcome
from creditgraph.pipeline.core.errors import DataError


class Samples(Format):
    """A .pt file per rollout, read without running anything in it (`torch.load(weights_only=True)`).

    Token ids, loss mask and log-probs of the rollout engine are those of the response; `group_index` is the group. A
    reward of several numbers needs one name in `rewards`. Samples that share a `rollout_id` and a reward are the steps
    of an episode.
    """

    name = "slime"
    source = "slime at 624b824a, from its source; not run with it"
    patterns = ("*.pt",)
    patches = {
        "advantage": "slime computes them after this file is written, and no file has them beside the samples; "
        "--graph grpo computes them again",
    }

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The samples."""
        import torch

        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            samples = saved["samples"]
        except (OSError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{file}: not read ({reason}); expected a file of --save-debug-rollout-data with tensors, numbers and "
                "texts only, because any other object in it could run code. slime at a terminal: remove NumPy arrays "
                "and objects from its samples."
            ) from error
        step = saved.get("rollout_id")
        for number, sample in enumerate(samples):
            yield f"sample {number}", sample | {"": step}

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """One row."""
        tokens = _list(entry["tokens"])
        size = int(entry["response_length"])
        if not 0 < size <= len(tokens):
            raise DataError(f"a response of {size} tokens in {len(tokens)}: {entry.get('status') or 'no status'}")
        step = entry[""]
        mask = entry.get("loss_mask")
        if entry.get("remove_sample"):
            mask = [0] * size
        return [
            Row(
                step=number_in(file.stem) if step is None else int(step),
                group=str(entry["group_index"]),
                episode=None if entry.get("rollout_id") is None else str(entry["rollout_id"]),
                prompt=entry.get("prompt") or "",
                prompt_ids=tokens[:-size],
                parts=[Part(str(entry.get("response") or ""))],
                tokens=tokens[-size:],
                mask=None if mask is None else _list(mask),
                reward=_reward(entry.get("reward"), options),
                logprobs=None if entry.get("rollout_log_probs") is None else _list(entry["rollout_log_probs"]),
                answer=str(entry.get("label") or ""),
                finish=str(entry.get("status") or ""),
            )
        ]

    def joined(self, rows: Sequence[Row]) -> list[Row]:
        """Samples of a rollout as steps."""
        return one_outcome(rows, copies=True)


def _reward(reward: Any, options: Options) -> float:
    if not isinstance(reward, dict):
        return float("nan") if reward is None else float(reward)
    if not options.rewards:
        raise DataError(f"its reward has several numbers; expected --rewards with one of {', '.join(map(str, reward))}")
    return float(sum(reward[name] * weight for name, weight in options.rewards.items()))


def _list(values: Any) -> list[Any]:
    return list(values.tolist() if hasattr(values, "tolist") else values)
