"""Scores of a process reward model at segment boundaries: a token classifier, or a judge behind HTTP."""

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from creditgraph.components.http import Server, ServerSettings, check_url, number
from creditgraph.components.models.load import load_token_classifier, load_tokenizer
from creditgraph.components.rollouts.segments import check_segments
from creditgraph.components.text.stops import token_texts
from creditgraph.components.value.boundaries import Outputs
from creditgraph.pipeline.core.component import Component, Context, Count, same_rows
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.core.payloads import Prompts, Segments, SegmentValues, Trajectories

Scores = list[float] | str  # of the steps of a row, or the reason why there are none


class Classifier:
    """A transformers token classifier that scores the last token of each step.

    A sequence is the prompt's text and then every step's, each followed by the separator and tokenised alone.

    Args:
        path: folder or hub name, with a tokenizer of its own.
        config: settings of the node.
        context: its context.
    """

    def __init__(self, path: str, config: Any, context: Context) -> None:
        spec = dataclasses.replace(context.model, path=path, chat_template_kwargs={})
        self._tokenizer = load_tokenizer(spec)
        model = load_token_classifier(spec, context.device)
        if not 0 <= config.label < model.config.num_labels:
            raise DataError(
                f"node '{context.node}': label {config.label}: expected one of the {model.config.num_labels} classes "
                f"of '{path}', numbered from 0."
            )
        self._model = model
        self._device = context.device
        self._config = config
        self._room = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)

    def __call__(self, prompts: list[str], steps: list[list[str]]) -> list[Scores]:
        """The scores of each row's steps."""
        rows = [self._encode(p, s) for p, s in zip(prompts, steps, strict=True)]
        out: list[Scores] = [[] for _ in rows]
        fitting = []
        for i, (ids, ends) in enumerate(rows):
            if self._room and len(ids) > self._room:
                out[i] = f"{len(ids)} tokens, but the classifier's context is {self._room}"
            elif ends:
                fitting.append(i)
        fitting.sort(key=lambda i: len(rows[i][0]))  # little padding
        for begin in range(0, len(fitting), self._config.server.batch):
            chosen = fitting[begin : begin + self._config.server.batch]
            scores = self._scores([rows[i][0] for i in chosen])
            for i, row in zip(chosen, scores, strict=True):
                out[i] = row[rows[i][1]].tolist()
        return out

    def _encode(self, prompt: str, steps: list[str]) -> tuple[list[int], list[int]]:
        ids = list(self._tokenizer(prompt)["input_ids"])
        ends = []
        for step in steps:
            ids += self._tokenizer(step + self._config.separator, add_special_tokens=False)["input_ids"]
            ends.append(max(len(ids) - 1, 0))
        return ids, ends

    @torch.no_grad()
    def _scores(self, rows: list[list[int]]) -> Tensor:
        tokens = Jagged.from_rows(rows, torch.int64)
        ids = tokens.to_padded(0).to(self._device)
        mask = tokens.with_values(torch.ones_like(tokens.values)).to_padded(0).to(self._device)
        logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
        good: Tensor = logits.softmax(-1)[..., self._config.label].cpu()
        return 2 * good - 1 if self._config.score == "difference" else good


class ProcessReward(Component):
    """Scores every segment of a response as a step: its value is the score, and that of the start is 0.

    A token classifier (`path`) in this process, or a judge (`url`). Request: {"items": [{"prompt", "steps"}]} with the
    steps' texts. Response, in the same order: {"results": [{"scores": [one number per step]}]}. A row without scores
    (server gone after all retries, no numbers, longer than the classifier's context) has NaN values: advantage.process
    and advantage.gae give it zero credit. It is counted, and rejected.jsonl has the reason.
    """

    paper = "2305.20050"
    metrics = (
        Metric("mean", "reward", "mean score over steps"),
        Metric("steps", "steps", "steps that got a score"),
        Metric("failures", "rows", "rows without scores, which get no credit; rejected.jsonl has the reasons"),
    )

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The model or the server."""

        path: str = ""
        """folder or hub name of a transformers token classifier; or `url`"""
        url: str = ""
        """URL of a judge, for POST requests; or `path`"""
        server: ServerSettings = field(default_factory=ServerSettings)
        """requests to the judge; `batch` is also that of the classifier"""
        separator: str = "\n"
        """text after every step, as the classifier was trained; its last token is scored"""
        label: int = 1
        """class of the classifier that means a good step"""
        score: Literal["probability", "difference"] = "probability"
        """of that class; difference: its probability minus that of the others, in [−1, 1] (PURE)"""

        def __post_init__(self) -> None:
            if bool(self.path) == bool(self.url):
                raise ValueError(
                    f"expected either path (a token classifier) or url (a judge), got path '{self.path}' and url "
                    f"'{self.url}'."
                )
            if self.url:
                check_url(self.url)

    config: Config
    _server: Server | None = None

    def setup(self, context: Context) -> None:
        """Loads the classifier, or makes the client."""
        super().setup(context)
        self._tokenizer = load_tokenizer(context.model)
        self._server = Server(self.config.url, self.config.server) if self.config.url else None
        self._classifier = Classifier(self.config.path, self.config, context) if self.config.path else None

    def close(self) -> None:
        """Closes the connections."""
        if self._server is not None:
            self._server.close()

    def run(
        self,
        *,
        prompts: Prompts,
        trajectories: Trajectories,
        segments: Annotated[Segments, same_rows("trajectories")],
    ) -> Outputs:
        """Scores all steps of all rows."""
        check_segments(trajectories, segments)
        texts = [prompts.text[row] for row in prompts.index_of(trajectories.prompt_uid).tolist()]
        pieces = token_texts(self._tokenizer, trajectories.response_tokens) if len(trajectories) else []
        steps = [
            ["".join(row[a:b]) for a, b in pairwise([0, *ends])]
            for row, ends in zip(pieces, segments.ends.to_lists(), strict=True)
        ]
        scores = self._classifier(texts, steps) if self._classifier is not None else self._judged(texts, steps)
        rows, failures = [], 0
        for uid, own, found in zip(trajectories.uid.tolist(), steps, scores, strict=True):
            if isinstance(found, str):
                failures += 1
                self.context.reject({"uid": uid}, found)
            rows.append([math.nan] * (len(own) + 1) if isinstance(found, str) else [0.0, *found])
        values = Jagged.from_rows(rows, torch.float32)
        scored = values.values[(values.positions > 0) & ~values.values.isnan()]
        self.context.log(
            mean=float(scored.mean()) if len(scored) else 0.0, steps=Count(len(scored)), failures=Count(failures)
        )
        return Outputs(values=SegmentValues(uid=trajectories.uid, values=values))

    def _judged(self, prompts: list[str], steps: list[list[str]]) -> list[Scores]:
        assert self._server is not None
        items = [{"prompt": p, "steps": s} for p, s in zip(prompts, steps, strict=True)]
        answers = self._server.results(items)
        return [reason or _read(result, len(own)) for (result, reason), own in zip(answers, steps, strict=True)]


def _read(result: Any, count: int) -> Scores:
    scores = result.get("scores") if isinstance(result, dict) else None
    if not isinstance(scores, list) or len(scores) != count or None in map(number, scores):
        return f"the judge's result has no {count} finite numbers as scores: {str(result)[:60]}"
    return [float(s) for s in scores]
