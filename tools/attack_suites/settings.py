"""Mistaken settings and files of settings: one sentence within two seconds of CPU, and nothing on the disk."""

import contextlib
import io
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from attack_suites.settings_cases import FILES, MISTAKES, STARTS

SECONDS = 2.0  # of CPU; composing takes .2, and a test machine may be slow
SMALL = ["prompts.batch=2", "evaluator.num_problems=2", "sampler.group_size=2", "run.iterations=0"]
FOLDER = Path()

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project


@dataclass(frozen=True)
class Case:
    """A mistake in an override or in a file's text, and its sentence.

    Attributes:
        mistake: override, or name of the file.
        sentence: expected sentence, "…" in it stands for any text.
        text: the file; "" for an override.
        starts: whether only the start of a run can notice it.
    """

    mistake: str
    sentence: str
    text: str = ""
    starts: bool = False

    def __str__(self) -> str:
        return f"file {self.mistake}" if self.text else self.mistake


def use(folder: Path) -> None:
    """Names the folder of all files, and imports the components, which is not part of the time of a mistake."""
    global FOLDER
    FOLDER = folder
    _refusal(["recipe=toy_grpo"])


def cases() -> list[Case]:
    return [
        *(Case(mistake, sentence) for mistake, sentence in MISTAKES),
        *(Case(name, sentence, text=text) for name, (text, sentence) in FILES.items()),
        *(Case(mistake, sentence, starts=True) for mistake, sentence in STARTS),
    ]


def quick() -> list[Case]:
    return cases()[::16]


def run(case: Case) -> tuple[bool, str]:
    """The mistake is refused when it is composed; `creditgraph train` says the same and leaves no file."""
    settings = [] if case.starts else _settings(case)
    seconds = 0.0
    if settings:
        began = time.process_time()
        problems = _refusal(settings, (str(_folder(case)),) if case.text else ())
        seconds = time.process_time() - began
        if len(problems) != 1:
            return False, f"{len(problems)} problems: {'; '.join(problems) or 'it is accepted'}"
        if not fits(problems[0], case.sentence):
            return False, problems[0]
    if not case.text:
        returned, said, left = _trained(settings or ["recipe=toy_grpo", *SMALL, "run.name=r", case.mistake])
        lines = said.partition("creditgraph train: ")[2].splitlines()
        sentence = re.sub(r"^ +1\. ", "", lines[-1]) if lines else ""
        # A second line is a heading, "…: 1 problem", and the sentence with its number.
        one = len(lines) == 1 or (len(lines) == 2 and lines[0].endswith(": 1 problem"))
        if returned != 2 or left or not one or not fits(sentence, case.sentence):
            return False, f"train returned {returned}, left {left} and said {said[:300]}"
    return seconds < SECONDS, f"one sentence after {seconds:.2f} s of CPU, no file left"


def fits(sentence: str, expected: str) -> bool:
    """Whether a sentence is the expected one, in which "…" stands for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, sentence) is not None  # "." is no line break


def _settings(case: Case) -> list[str]:
    if not case.text:
        return ["recipe=toy_grpo", case.mistake]
    (_folder(case) / "recipe").mkdir(parents=True, exist_ok=True)
    (_folder(case) / "recipe" / f"{case.mistake}.yaml").write_text(f"# @package _global_\n{case.text}")
    return [f"recipe={case.mistake}"]


def _folder(case: Case) -> Path:
    """A folder of its own for each file: all files of a folder are checked, whichever is chosen."""
    return FOLDER / f"file {case.mistake}"


def _refusal(settings: list[str], folders: tuple[str, ...] = ()) -> list[str]:
    """The problems with which the settings are refused; empty if they are accepted."""
    from pipeline.app.sweep import build_all
    from pipeline.core.errors import CreditgraphError

    try:
        build_all([settings], folders)
    except CreditgraphError as error:
        return getattr(error, "problems", [str(error)])
    return []


def _trained(settings: list[str]) -> tuple[int, str, list[str]]:
    """What `creditgraph train` returns, what it says, and which files it leaves in an empty working directory."""
    from pipeline.app.cli import main

    place = FOLDER / "empty"
    place.mkdir(exist_ok=True)
    said = io.StringIO()
    before = os.getcwd()
    os.chdir(place)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            returned = main(["train", *settings])
    except SystemExit as ended:
        returned = int(ended.code or 0)
    finally:
        os.chdir(before)
    return returned, said.getvalue(), [str(path.relative_to(place)) for path in place.rglob("*")]
