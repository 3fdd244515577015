"""Malformed data files: usable rows are used, every other row is counted with a reason, or one sentence refuses all."""

import re
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project

from attack_suites.data_cases import CASES, Case

SECONDS = 5.0  # of CPU
ROOM = 400  # tokens of a prompt
FOLDER = Path()


def use(folder: Path) -> None:
    """Names the folder of all files."""
    global FOLDER
    FOLDER = folder
    _tokenizer()


def cases() -> list[Case]:
    return CASES


@dataclass(frozen=True)
class Outcome:
    """What became of a file: answers of the used rows, reasons with their counts, the sentence that refused it."""

    used: tuple[str, ...] = ()
    rejected: tuple[tuple[str, int], ...] = ()
    others: int = 0
    sentence: str = ""
    mistake: str = ""


def run(case: Case) -> tuple[bool, str]:
    path = FOLDER / f"{case.name} {Path(case.file).suffix}" / case.file
    path.parent.mkdir(parents=True)
    if isinstance(case.content, bytes):
        path.write_bytes(case.content)
    else:
        case.content(path)
    began = time.process_time()
    outcome = _loaded(path, case)
    seconds = time.process_time() - began
    if outcome.mistake or seconds > SECONDS:
        return False, outcome.mistake or f"{seconds:.1f} s of CPU"
    if case.sentence:
        held = "\n" not in outcome.sentence and re.search(case.sentence, outcome.sentence) is not None
        return held, outcome.sentence or f"used {outcome.used}; expected a refusal: {case.sentence}"
    counted = sum(count for _, count in outcome.rejected)
    named = all(re.search(case.reason, reason) for reason, _ in outcome.rejected)
    held = (outcome.used, counted, outcome.others) == (case.used, case.rejected, case.others) and named
    return held, outcome.sentence or f"used {str(outcome.used)[:100]}, rejected {outcome.rejected}, {outcome.others}"


def _loaded(path: Path, case: Case) -> Outcome:
    from creditgraph.components.data.loading import load_data
    from creditgraph.pipeline.core.component import Context
    from creditgraph.pipeline.core.errors import CreditgraphError

    context = Context()
    entry = {"source": "file", "path": str(path), "template": "plain", **case.settings}
    try:
        loaded = load_data(entry, context, _tokenizer(), room=ROOM, drop_duplicates=True)
    except CreditgraphError as error:
        return Outcome(sentence=str(error))
    counts = loaded.counts
    others = counts.filtered.total() + counts.duplicates + counts.not_chosen
    mistake = ""
    if counts.read != counts.used + counts.rejected.total() + others or counts.used != len(loaded.rows):
        mistake = f"read {counts.read}, used {counts.used}, rejected {counts.rejected.total()}, others {others}"
    if len(context.rejected) != counts.rejected.total():
        mistake = f"{len(context.rejected)} of {counts.rejected.total()} rejected rows are listed"
    return Outcome(tuple(row.answer for row in loaded.rows), tuple(counts.rejected.items()), others, "", mistake)


@cache
def _tokenizer() -> object:
    from creditgraph.components.models.load import load_tokenizer
    from creditgraph.pipeline.core.component import ModelSpec

    tokenizer = load_tokenizer(ModelSpec(path="tiny"))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer
