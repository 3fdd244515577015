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
        beside: whether a sound recipe of the same folder is composed, which the file must not hinder.
    """

    mistake: str
    sentence: str
    text: str = ""
    starts: bool = False
    beside: bool = False

    def __str__(self) -> str:
        beside = "a sound recipe beside " if self.beside else ""
        return f"{beside}file {self.mistake}" if self.text else self.mistake


def use(folder: Path) -> None:
    """Names the folder of all files, and imports the components, which is not part of the time of a mistake."""
    global FOLDER
    FOLDER = folder
    _trained(["recipe=toy_grpo", "--check"])


def cases() -> list[Case]:
    return [
        *(Case(mistake, sentence) for mistake, sentence in MISTAKES),
        *(Case(name, sentence, text=text) for name, (text, sentence) in FILES.items()),
        *(Case(name, "", text=text, beside=True) for name, (text, _) in FILES.items()),
        *(Case(mistake, sentence, starts=True) for mistake, sentence in STARTS),
    ]


def quick() -> list[Case]:
    return cases()[::16]


def run(case: Case) -> tuple[bool, str]:
    """`creditgraph train` refuses the mistake in one sentence and leaves no file; a file's text is only composed."""
    began = time.process_time()
    if case.text:
        problems = _refusal(case)
        if case.beside:
            return not problems, "; ".join(problems)[-300:] or "composed"
        sentence, one, left = "; ".join(problems), len(problems) == 1, []
    else:
        small = [*SMALL, "run.name=r"] if case.starts else SMALL[-1:]
        recipe = [] if case.mistake.startswith("recipe=") else ["recipe=toy_grpo"]
        returned, said, left = _trained([*recipe, *small, case.mistake])
        lines = said.partition("creditgraph train: ")[2].splitlines()
        sentence = re.sub(r"^ +1\. ", "", lines[-1]) if lines else said
        # A second line is a heading, "…: 1 problem", and the sentence with its number.
        one = returned == 2 and (len(lines) == 1 or (len(lines) == 2 and lines[0].endswith(": 1 problem")))
    if not one or left or not fits(sentence, case.sentence):
        return False, f"{'refused' if one else 'not refused in one sentence'}, left {left} and said {sentence[-300:]}"
    seconds = time.process_time() - began
    return case.starts or seconds < SECONDS, f"one sentence after {seconds:.2f} s of CPU, no file left"


def fits(sentence: str, expected: str) -> bool:
    """Whether a sentence is the expected one, in which "…" stands for any text."""
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, sentence) is not None  # "." is no line break


def _refusal(case: Case) -> list[str]:
    """The problems with which a recipe is refused; empty if it is accepted."""
    from creditgraph.pipeline.app.sweep import build_all
    from creditgraph.pipeline.core.errors import CreditgraphError

    folder = FOLDER / f"file {case.mistake}"
    (folder / "recipe").mkdir(parents=True, exist_ok=True)
    (folder / "recipe" / f"{case.mistake}.yaml").write_text(f"# @package _global_\n{case.text}")
    (folder / "recipe" / "sound.yaml").write_text("# @package _global_\ndefaults: [toy_grpo]\n")
    try:
        build_all([[f"recipe={'sound' if case.beside else case.mistake}"]], [str(folder)])
    except CreditgraphError as error:
        return getattr(error, "problems", [str(error)])
    return []


def _trained(settings: list[str]) -> tuple[int, str, list[str]]:
    """What `creditgraph train` returns, what it says, and which files it leaves in an empty working directory."""
    from creditgraph.pipeline.app.cli import main

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
