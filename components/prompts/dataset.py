"""`prompts.dataset`: problems from the embedded task, a local file or the Hugging Face hub, a batch per iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from components.models.load import context_length, load_tokenizer
from components.prompts import chains
from components.prompts.sources import Source, parse_source, read_rows
from components.prompts.templates import extract_answer, solve_prompt
from pipeline.component import Component, Context
from pipeline.errors import ConfigError, DataError, RunError, did_you_mean
from pipeline.jagged import Jagged
from pipeline.payloads import Prompts
from pipeline.streams import Stream

DEFAULT_SIZE = 2000
_SHOWN = 200  # characters of a rejected row that are kept


@dataclass(frozen=True, kw_only=True)
class Row:
    """One usable problem.

    Attributes:
        text: what the model sees.
        answer: reference answer.
        metadata: JSON values; always "template", "question" and "source_row", for the embedded task the whole problem.
    """

    text: str
    answer: str
    metadata: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Problems of this iteration."""

    batch: Prompts


class DatasetPrompts(Component):
    """The next `batch` problems of a data section, in an order shuffled anew, by key, in every epoch.

    A batch may span two epochs, so every batch is full. The place in the data survives a restart. With several replicas each takes
    its share of the same batch, prompts having the same ids whatever the number of replicas. Rows that cannot be used
    (no answer, not UTF-8, wrong type, longer than the context) are skipped, counted and written to rejected.jsonl.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """What to read and how much of it."""

        split: str = "train"
        """entry of the data section to draw from"""
        batch: int = 8
        """problems per iteration, of all replicas together"""
        shuffle: bool = True
        """a new keyed order in every epoch; off: the order of the source"""
        drop_duplicates: bool = True
        """keep only the first of several rows with the same question"""
        reserve: int = 0
        """tokens of the context kept free for the response; longer prompts are skipped"""

        def __post_init__(self) -> None:
            if self.batch < 1:
                raise ValueError(f"batch: found {self.batch}; wanted at least 1 problem per iteration.")
            if self.reserve < 0:
                raise ValueError(f"reserve: found {self.reserve}; wanted 0 or more tokens.")

    config: Config

    def setup(self, context: Context) -> None:
        """Reads and checks the whole source."""
        super().setup(context)
        if self.config.batch < context.ranks.num_replicas:
            count = context.ranks.num_replicas
            raise ConfigError(
                f"node '{context.node}': batch is {self.config.batch}, but there are {count} replicas; wanted at least a problem per "
                "replica. Raise batch (it is the number of all replicas together) or start fewer processes."
            )
        if self.config.split not in context.data:
            known = did_you_mean(self.config.split, context.data) or " The data section is empty."
            raise ConfigError(f"node '{context.node}': split '{self.config.split}' is not in the data section.{known}")
        self.tokenizer = load_tokenizer(context.model)
        entry = context.data[self.config.split]
        self.rows = load_rows(
            entry,
            context,
            self.tokenizer,
            place=f"data.{self.config.split}",
            reserve=self.config.reserve,
            drop_duplicates=self.config.drop_duplicates,
        )
        self.epoch, self.position = 0, 0
        self._order = self._order_of(0)

    def run(self) -> Outputs:
        """Takes the next problems."""
        chosen: list[Row] = []
        while len(chosen) < self.config.batch:
            if self.position == len(self.rows):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            taken = self._order[self.position : self.position + self.config.batch - len(chosen)]
            chosen += [self.rows[i] for i in taken]
            self.position += len(taken)
        self.context.log(epoch=self.epoch + self.position / len(self.rows), rows=len(self.rows))
        mine = self.context.ranks.share(len(chosen))
        return Outputs(batch=make_prompts(chosen[mine], self.tokenizer, self.context.common_uids(len(chosen))[mine]))

    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""
        return {"epoch": self.epoch, "position": self.position, "rows": len(self.rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken."""
        if int(state["rows"]) != len(self.rows):
            raise RunError(
                f"node '{self.context.node}': the checkpoint was made with {state['rows']} problems, the data now has {len(self.rows)}; "
                "wanted the same data. Restore it or start a new run."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self.config.shuffle:
            return list(range(len(self.rows)))
        stream = Stream(self.context.seed, self.context.node, "order")
        return [int(i) for i in stream.generator(epoch).permutation(len(self.rows))]


def make_prompts(rows: Sequence[Row], tokenizer: Any, uids: Tensor) -> Prompts:
    """Rows as a batch, with these uids (int64, one per row)."""
    tokens = [tokenizer(row.text, add_special_tokens=False)["input_ids"] for row in rows]
    return Prompts(
        uid=uids,
        tokens=Jagged.from_rows(tokens, torch.int32),
        text=[row.text for row in rows],
        answer=[row.answer for row in rows],
        metadata=[row.metadata for row in rows],
    )


def load_rows(
    entry: dict[str, Any],
    context: Context,
    tokenizer: Any = None,
    *,
    place: str = "data",
    reserve: int = 0,
    drop_duplicates: bool = False,
) -> list[Row]:
    """All usable rows of a data section, in the order of the source.

    Args:
        entry: the section, see `components.prompts.sources.Source`.
        context: its model gives tokenizer and context length; unusable rows go to its `reject`.
        tokenizer: the model's, loaded when None.
        place: what error texts call the section.
        reserve: tokens of the context kept free for the response.
        drop_duplicates: keep only the first row of each question.
    """
    source = parse_source(entry, place)
    tokenizer = load_tokenizer(context.model) if tokenizer is None else tokenizer
    limit = context_length(context.model) - reserve
    rows: list[Row] = []
    seen: set[str] = set()
    rejected: dict[str, int] = {}
    for number, found in _candidates(source, tokenizer, place):
        row, reason = (None, found) if isinstance(found, str) else (found, "")
        if row is not None:
            if drop_duplicates and row.metadata["question"] in seen:
                continue
            seen.add(row.metadata["question"])
            length = len(tokenizer(row.text, add_special_tokens=False, verbose=False)["input_ids"])
            if length == 0:
                reason = "no word of the prompt is in the model's vocabulary"
            elif length >= limit:
                reason = f"prompt of {length} tokens; the context leaves {max(limit - 1, 0)} for it"
            else:
                rows.append(row)
        if reason:
            rejected[reason] = rejected.get(reason, 0) + 1
            if context.ranks.replica == 0:  # every replica reads the whole source
                context.reject({"source": source.place, "row": number}, reason)
        if source.size and len(rows) >= source.size:
            break
    if not rows:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in sorted(rejected.items(), key=lambda x: -x[1])[:3])
        why = f"all {sum(rejected.values())} rows were rejected ({reasons})" if rejected else "it has no rows"
        raise DataError(f"{place}: {source.place}: {why}; wanted rows with a question and an answer that fit the context.")
    context.log(rejected=sum(rejected.values()))
    return rows


def _candidates(source: Source, tokenizer: Any, place: str) -> Iterator[tuple[int, Row | str]]:
    template = source.template or ("chains" if source.source == "chains" else "thought")
    if source.source == "chains":
        for i in range(source.size or DEFAULT_SIZE):
            problem = chains.generate(source.seed, i, source.difficulty, source.split) | {"template": template, "source_row": i}
            yield i, Row(text=solve_prompt(template, problem["question"], tokenizer), answer=chains.answer(problem), metadata=problem)
        return
    for number, found in enumerate(read_rows(source)):
        if isinstance(found, str):
            yield number, found
            continue
        wanted = (source.question, source.answer or source.question, *source.metadata.values(), *source.keep)
        missing = [column for column in wanted if column not in found]
        if missing and number == 0:
            raise DataError(
                f"{place}: {source.place} has no column '{missing[0]}'; found {', '.join(found)}."
                f"{did_you_mean(missing[0], found)} Set question and answer to the columns' names."
            )
        if any(str(found.get(column)) != value for column, value in source.keep.items()):
            continue
        yield number, _row(found, source, template, tokenizer, number)


def _row(found: dict[str, Any], source: Source, template: str, tokenizer: Any, number: int) -> Row | str:
    question, answer = found.get(source.question), found.get(source.answer) if source.answer else ""
    if isinstance(answer, bool):
        answer = "yes" if answer else "no"
    if isinstance(answer, int | float):
        answer = str(answer)
    for column, value in ((source.question, question), *([(source.answer, answer)] if source.answer else [])):
        if value is None or (isinstance(value, str) and not value.strip()):
            return f"no {column}"
        if not isinstance(value, str):
            return f"{column} is a {type(value).__name__}; wanted text"
        if any("\udc80" <= c <= "\udcff" for c in value):
            return f"{column} is not UTF-8"
    assert isinstance(question, str)
    assert isinstance(answer, str)
    if source.answer_boxed:
        boxed = extract_answer(template, answer)
        if not boxed:
            return f"no \\boxed{{}} in {source.answer}"
        answer = boxed
    metadata = {"task": source.name or source.path, "template": template, "question": question.strip(), "source_row": number}
    further = {name: found.get(column) for name, column in source.metadata.items()}
    return Row(text=solve_prompt(template, question.strip(), tokenizer), answer=answer.strip(), metadata=further | metadata)
