"""Rows that a graph makes itself, by resets, trees or revisions, as the responses of a batch of TRL."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.loss import padded
from creditgraph.components.text.templates import FINAL_ANSWERS, TEMPLATES
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Prompts, Trajectories

COLUMNS = {"template": TEMPLATES, "answer_kind": tuple(FINAL_ANSWERS)}
"""columns of a dataset that templates read, and their values; others may mean something else"""


class GraphRows:
    """A rollout function of TRL that returns the rows of a graph.

    A prompt has as many places in TRL's batch as `num_generations` says. Places that the graph leaves are filled with
    an end of text that is not trained on.

    Attributes:
        problems: rows of the dataset, one per prompt of all processes.
        advantages: [N, T] of the last batch, over all processes; 0 where a token is not trained on.
        columns: further columns of their credit, alike.
    """

    problems: list[dict[str, Any]]
    advantages: Tensor
    columns: dict[str, Tensor]

    def __init__(self, credit: CreditGraph) -> None:
        self.credit = credit

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """The rows of this process, by prompt; "env_mask" is 1 where a token is trained on."""
        size = trainer.num_generations
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            self.credit.refuse_images()
        tokens: list[list[int]] = gather_object(ids)[::size]
        trajectories, credit = self.credit.rows(_prompts(self.problems, tokens))
        places = self._places(trajectories, len(tokens), size)
        end = [trainer._policy.tokenizer.eos_token_id]
        kept = credit.advantage.with_values(credit.advantage.values.where(credit.mask.values, 0.0))
        self.advantages = _placed(kept, places)
        self.columns = {name: _placed(column, places) for name, column in credit.columns.items()}
        mine = range(trainer.accelerator.process_index * len(prompts), len(places))[: len(prompts)]
        rows: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": []}
        for i in mine:
            row = places[i]
            rows["prompt_ids"].append(tokens[i // size] if row < 0 else trajectories.prompt_tokens.row(row).tolist())
            rows["completion_ids"].append(end if row < 0 else trajectories.response_tokens.row(row).tolist())
            rows["env_mask"].append([0] if row < 0 else credit.mask.row(row).int().tolist())
            rows["logprobs"].append([0.0] if row < 0 else trajectories.engine_logprobs.row(row).tolist())
        return rows if trainer.use_vllm else rows | {"logprobs": None}

    def _places(self, trajectories: Trajectories, prompts: int, size: int) -> list[int]:
        """The row at each place of the batch; −1 where there is none."""
        by_prompt: list[list[int]] = [[] for _ in range(prompts)]
        lengths = trajectories.response_tokens.lengths.tolist()
        for row, prompt in enumerate(trajectories.prompt_uid.tolist()):
            if lengths[row]:
                by_prompt[prompt].append(row)
        most = max(map(len, by_prompt))
        if most > size:
            raise ConfigError(
                f"graph '{self.credit.name}': it makes {most} rows for a prompt, but num_generations={size}, the "
                "places that a prompt has in the batch. Raise num_generations, or lower the group size of the sampler."
            )
        return [row for rows in by_prompt for row in [*rows, *[-1] * (size - len(rows))]]


def _prompts(rows: list[dict[str, Any]], tokens: list[list[int]]) -> Prompts:
    """Rows of a dataset as prompts, with what templates read of them."""
    return Prompts(
        uid=torch.arange(len(rows)),
        tokens=Jagged.from_rows(tokens, torch.int32),
        text=[row["prompt"] if isinstance(row["prompt"], str) else _last_message(row["prompt"]) for row in rows],
        answer=[str(row.get("answer", "")) for row in rows],
        metadata=[_metadata(row) for row in rows],
        solution=[str(row.get("solution") or "") for row in rows],
    )


def _metadata(row: dict[str, Any]) -> dict[str, Any]:
    known = {name: row[name] for name, values in COLUMNS.items() if row.get(name) in values}
    return known | ({"question": str(row["question"])} if row.get("question") else {})


def _last_message(messages: list[dict[str, Any]]) -> str:
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def as_wide(column: Tensor, width: int) -> Tensor:
    """[N, width] of [N, T]: cut, or filled with 0."""
    return torch.nn.functional.pad(column, (0, max(0, width - column.shape[1])))[:, :width]


def _placed(column: Jagged, places: list[int]) -> Tensor:
    """[N, T] of rows at places; 0 where there is none."""
    wide = padded(column, max(1, int(column.lengths.max())))
    rows = torch.tensor(places)
    out = wide[rows.clamp(min=0)]
    out[rows < 0] = 0
    return out
