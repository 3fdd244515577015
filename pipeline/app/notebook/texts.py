"""Texts of tokens, for what is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from creditgraph.pipeline.app.notebook.show import show_with
from creditgraph.pipeline.app.report.rollouts import load_tokenizer, piece
from creditgraph.pipeline.core.payloads import Batch, Trajectories


class Texts:
    """One string per token, by the tokenizer of a model on this machine; "⟨id⟩" without one."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: dict[int, str] = {}

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """One string per token."""
        for token in tokens:
            if token not in self._known:
                self._known[token] = piece(self._tokenizer, token)
        return [self._known[token] for token in tokens]

    def add_to_all(self, outputs: Mapping[str, Batch], *batches: Batch) -> None:
        """Lets batches be shown with the texts of the responses among the outputs of their iteration."""
        # Their columns, not the batches: what a batch is shown with must not keep it alive.
        columns = [(b.uid, b.response_tokens) for b in outputs.values() if isinstance(b, Trajectories)]

        def texts(shown: Batch) -> dict[int, list[str]]:
            wanted = set(shown.uid.tolist())
            return {
                uid: self.pieces(tokens.row(i).tolist())
                for uids, tokens in columns
                for i, uid in enumerate(uids.tolist())
                if uid in wanted
            }

        for batch in batches:
            show_with(batch, texts)
