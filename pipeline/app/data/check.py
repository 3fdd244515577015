"""Checks that one data section loads, and that its verifier accepts its own reference answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from creditgraph.components.data.card import LoadedData
from creditgraph.components.data.loading import load_data
from creditgraph.components.data.sources import parse_source
from creditgraph.components.models.load import EMBEDDED
from creditgraph.components.tasks import TASKS
from creditgraph.components.text.code_tests import read_tests
from creditgraph.components.verifier.base import Item, VerifierComponent
from creditgraph.pipeline.core.component import Context, ModelSpec, set_up
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.registry import build_component

_ANY_LENGTH = 1 << 40
_BATCH = 1000  # rows verified at a time


class WordTokenizer:
    """Counts words where no model is named, and has no chat template."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """One id per word."""
        return {"input_ids": [0] * len(text.split())}


@dataclass(kw_only=True)
class DataCheck:
    """The result of a check.

    Attributes:
        loaded: problems, counts, revision.
        context: of the model whose tokenizer made the prompts.
        verifier: description of its tests, or of how many reference answers the verifier accepts.
        refused: (row, answer, reason) of the reference answers that it does not accept.
        shown_as: template of the first prompt, where it is not the section's own because no model is named.
        unit: unit of the lengths of prompts, words or tokens.
    """

    loaded: LoadedData
    context: Context
    verifier: str = "none named; a run's own verifier is used"
    refused: list[tuple[int, str, str]] = field(default_factory=list)
    shown_as: str = ""
    unit: str = "tokens"


def check_entry(entry: dict[str, Any], place: str, model: str | None, max_rows: int) -> DataCheck:
    """Loads a section, and runs its verifier on the reference answers.

    Args:
        entry: the data section.
        place: name of the section in error texts.
        model: folder or hub name whose tokenizer makes the prompts; None counts words and shows chat prompts as plain
            text.
        max_rows: most raw rows to check; 0 checks all.

    Raises:
        DataError: it cannot be loaded.
        ConfigError: the section's verifier is none.
    """
    source = parse_source(entry, place)
    if max_rows:
        entry = {**entry, "skip": 0}  # of the first rows alone, it may leave none
    # The tokenizer of a task family's model is always available.
    own = TASKS[source.source].model if source.source in TASKS else "tiny"
    own = own if own in EMBEDDED else "tiny"  # a family may have no model yet
    context = Context(node="check", model=ModelSpec(path=model or own))
    if model is None and source.source not in TASKS:
        tokenizer = WordTokenizer()
        shown_as = "plain" if source.template == "chat" else ""
        if shown_as:
            entry = {**entry, "template": shown_as}
        loaded = load_data(
            entry, context, tokenizer, place=place, drop_duplicates=True, max_rows=max_rows, room=_ANY_LENGTH
        )
        check = DataCheck(loaded=loaded, context=context, shown_as=shown_as, unit="words")
    else:
        loaded = load_data(entry, context, place=place, drop_duplicates=True, max_rows=max_rows)
        check = DataCheck(loaded=loaded, context=context)
    if source.answer_kind == "code":
        check.verifier = _describe_tests(check.loaded)
    if source.verifier and source.answer_kind != "code":
        with started(source.verifier, context) as component:
            check.refused = _refused(check.loaded, component)
        count = len(check.loaded.rows)
        check.verifier = f"{source.verifier} accepts {count - len(check.refused)} of {count} reference answers"
    return check


def _describe_tests(loaded: LoadedData) -> str:
    calls = total = public = 0
    for row in loaded.rows:
        tests = read_tests(row.metadata, "all")
        calls += bool(tests.function)
        total += len(tests.tests)
        public += sum(test.public for test in tests.tests)
    reads = len(loaded.rows) - calls
    return f"{total} tests, {public} of them public; {calls} problems call a function, {reads} read standard input"


@contextmanager
def started(use: str, context: Context) -> Iterator[VerifierComponent]:
    """The verifier with its default settings, closed afterwards."""
    component = build_component(use, {}, use)
    if not isinstance(component, VerifierComponent):
        raise ConfigError(f"data check: expected a VerifierComponent, got {use}.")
    set_up(component, context)
    try:
        yield component
    finally:
        component.close()


def _refused(loaded: LoadedData, component: VerifierComponent) -> list[tuple[int, str, str]]:
    refused = []
    for start in range(0, len(loaded.rows), _BATCH):
        rows = loaded.rows[start : start + _BATCH]
        # A response that boxes the reference answer; where the steps decide, the reference solution.
        items = [
            Item(
                text=row.solution if row.metadata.get("task") in TASKS else f"The answer is \\boxed{{{row.answer}}}.",
                answer=row.answer,
                metadata=row.metadata,
                prompt=str(row.metadata["question"]),
            )
            for row in rows
        ]
        for row, verdict in zip(rows, component.verdicts(items), strict=True):
            if not verdict.correct:
                reason = verdict.detail or "it is not correct"
                refused.append((int(row.metadata["source_row"]), row.answer, reason))
    return refused
