"""verl: the JSON lines of `trainer.rollout_data_dir`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from creditgraph.adapters.imports.row import Format, Options, Part, Row, lines, number_in, one_outcome

_KEY = re.compile(r"^(?P<session>(?P<prompt>.+)_\d+)_\d+$")  # prompt_session_output, of the V1 trainer


class Dump(Format):
    """STEP.jsonl: texts, score and reference answer of each response; both trainers of verl.

    The V1 trainer writes the response's key, `prompt_session_output`, as its uid, whose first part is the group; the
    outputs of a session are the steps of an episode, with the score of the last. Of the legacy trainer, which writes
    no uid, responses to the same input are a group. Further columns are read under the names that verl's batches have
    them.
    """

    name = "verl"
    source = "verl 0.9.1"
    patterns = ("*.jsonl",)
    patches = {
        **dict.fromkeys(
            ("tokens", "mask", "advantage", "logprobs", "old_logprobs"),
            "the ten lines of docs/trainers.md add what verl's batch has to its dump",
        ),
        "reference_logprobs": "add ref_log_prob to the names in those lines",
    }

    def entries(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The lines."""
        return lines(file)

    def rows(self, entry: Any, file: Path, options: Options) -> list[Row]:
        """One row."""
        uid = str(entry.get("uid") or "")
        key = _KEY.match(uid)
        answer = entry.get("gts")
        return [
            Row(
                step=entry.get("step", number_in(file.stem)),
                group=key["prompt"] if key else uid or str(entry["input"]),
                episode=key["session"] if key else None,
                prompt=str(entry["input"]),
                prompt_ids=entry.get("prompts"),
                parts=[Part(str(entry["output"]))],
                tokens=entry.get("responses"),
                mask=entry.get("response_mask"),
                reward=float(entry["score"]),
                advantage=entry.get("advantages"),
                logprobs=entry.get("rollout_log_probs"),
                old_logprobs=entry.get("old_log_probs"),
                reference_logprobs=entry.get("ref_log_prob"),
                entropies=entry.get("entropy"),
                values=entry.get("values"),
                answer="" if answer is None else str(answer),
            )
        ]

    def joined(self, rows: Sequence[Row]) -> list[Row]:
        """Outputs of a session as steps."""
        return one_outcome(rows)
