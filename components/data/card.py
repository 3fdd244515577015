"""The outcome of loading a data section: counts, rejected rows, and the data card of a run."""

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from creditgraph.components.data.sources import Source
from creditgraph.components.data.store import RowStore
from creditgraph.components.tasks import TASKS
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.metric import Metric
from creditgraph.pipeline.run.run_directory import write_json

CARD = "data_card.json"
MAX_REJECTED = 1000  # of one section in rejected.jsonl; all are counted, by reason

LOADING_METRICS = (
    Metric("rejected", "rows", "rows of the data section that cannot be used, reported once when it is read"),
    Metric("duplicates", "rows", "rows of the data section that repeat a question, reported once when it is read"),
)


@dataclass(kw_only=True)
class Counts:
    """Counts of the rows of one section.

    Attributes:
        read: rows that were read.
        filtered: rows that `keep` filtered out, by column.
        rejected: rows that cannot be used, by reason with numbers replaced by N.
        duplicates: rows that repeat a question.
        not_chosen: usable rows that `shuffle`, `skip` and `size` leave out.
        used: rows that remain.
        solved: used rows with a reference solution.
        min_tokens, max_tokens, all_tokens: smallest, largest and total number of tokens of the used rows' prompts.
    """

    read: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    not_chosen: int = 0
    used: int = 0
    solved: int = 0
    min_tokens: int = 0
    max_tokens: int = 0
    all_tokens: int = 0

    def use(self, length: int, solved: bool) -> None:
        """Counts one prompt of this many tokens, and whether it has a reference solution."""
        self.min_tokens = min(self.min_tokens, length) if self.used else length
        self.max_tokens = max(self.max_tokens, length)
        self.all_tokens += length
        self.used += 1
        self.solved += solved


@dataclass(kw_only=True)
class LoadedData:
    """The problems of a section, and the counts of their rows."""

    rows: RowStore
    counts: Counts
    source: Source
    revision: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)

    def card(self) -> dict[str, Any]:
        """Source, revision, filters, counts and hash as JSON values."""
        # Only settings that differ from the defaults, so that a card shows the user's choices.
        # What a source cannot be without stays.
        needed: dict[str, Any] = {"path": "x", "name": "x"}
        if self.source.source in TASKS:
            needed = {"answer_kind": self.source.answer_kind}
        default = asdict(Source(source=self.source.source, **needed))
        settings = {
            name: value
            for name, value in asdict(self.source).items()
            if (value != default[name] or name in ("name", "path", "split")) and value not in ("", None)
        }
        counts = self.counts
        return {
            "source": self.source.place,
            "settings": json.loads(json.dumps(settings, default=str)),
            "revision_requested": self.source.revision,
            "revision": self.revision or None,
            "files": self.files,
            "rows": {
                "read": counts.read,
                "filtered": dict(counts.filtered.most_common()),
                "rejected": dict(counts.rejected.most_common(100)),
                "duplicates": counts.duplicates,
                "not_chosen": counts.not_chosen,
                "used": counts.used,
                "with_solution": counts.solved,
            },
            "prompt_tokens": {
                "min": counts.min_tokens,
                "max": counts.max_tokens,
                "mean": round(counts.all_tokens / max(counts.used, 1), 1),
            },
            "hash": f"blake2b:{self.rows.digest}",
        }


class RejectedRows:
    """Counts rejected rows by reason, and writes the first of them to the run's rejected.jsonl."""

    def __init__(self, context: Context, source: Source, counts: Counter[str]) -> None:
        self._context = context
        self._source = source
        self._counts = counts

    def add(self, number: int, reason: str) -> None:
        """Counts one row; the first replica writes it, because every replica reads the whole source."""
        self._counts[re.sub(r"(?<![\w-])\d+", "N", reason)] += 1
        first = not (self._context.ranks.replica or self._context.ranks.position)
        if first and self._counts.total() <= MAX_REJECTED:
            self._context.reject({"source": self._source.place, "row": number}, reason)


def write_card(folder: Path, place: str, loaded: LoadedData) -> None:
    """Adds a section to the run's data card."""
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        card = {}
    card[place] = loaded.card()
    write_json(path, dict(sorted(card.items())))


def why_empty(counts: Counts) -> str:
    """Returns the reason why a section has no usable row."""
    if not counts.read:
        return "it has no rows"
    if counts.not_chosen:
        return f"skip left out all of its {counts.not_chosen} usable rows"
    if not counts.rejected:
        return "keep left out all of its " + ", ".join(f"{n} rows by {column}" for column, n in counts.filtered.items())
    reasons = "; ".join(f"{n} × {reason}" for reason, n in counts.rejected.most_common(3))
    return f"all {counts.rejected.total()} rows were rejected ({reasons})"
