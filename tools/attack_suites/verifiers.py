"""Answers that might be right for every question, graded by the text, mathematics and program verifiers.

One case is one odd answer and one verifier. It holds if the answer is right for at most two references of different
value; what counts as different is decided by `creditgraph.lab.master_keys`, as for `creditgraph data check --keys`.
"""

import atexit
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from creditgraph.components.verifier.base import Item, VerifierComponent
from creditgraph.lab.master_keys import odd_answers, search_master_keys
from creditgraph.pipeline.core.component import Context, set_up
from creditgraph.pipeline.core.registry import build_component

NUMBERS = [str(n) for n in range(-40, 260, 5)]
EXPRESSIONS = [
    *(
        "1/2",
        "-1/3",
        "0.5",
        "2.75",
        "1e6",
        "12,345",
        "25%",
        "\\sqrt{2}",
        "2\\sqrt{3}",
        "\\pi",
        "2\\pi",
        "e^{2}",
        "x^2+1",
    ),
    *("(x-1)(x+2)", "\\{1, 2\\}", "\\{1, 2, 3\\}", "[0, 1)", "(0, \\infty)", "x=5", "y=5", "x>3", "3+4i", "(1, 2)"),
    *("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "5\\text{ cm}", "\\text{Tuesday}", "\\emptyset", "2^{100}", "20!"),
]
OUTPUTS = ["1000000007", "0", "yes", "0.5", "[1, 2]", "9" * 309]
ANSWERS = {"exact": 600, "regex": 600, "choice": 600, "boolean": 600, "math": 120, "code": 40}
QUICK = {"exact": 20, "regex": 20, "choice": 20, "boolean": 20, "math": 8, "code": 4}


@dataclass(frozen=True)
class Case:
    """An answer to a verifier, by number in the stream of odd answers."""

    verifier: str
    number: int
    answer: str

    def __str__(self) -> str:
        return f"verifier.{self.verifier}: {self.answer[:60]!r} ({self.number})"


def references(verifier: str) -> list[Item]:
    """Problems of different value."""
    if verifier == "code":
        tests = [{"template": "plain", "tests": [{"input": "1", "output": output}]} for output in OUTPUTS]
        return [Item(text="", answer="", metadata=metadata) for metadata in tests]
    texts = {"choice": list("ABCDEFGHIJ"), "boolean": ["yes", "no"]}.get(verifier, NUMBERS + EXPRESSIONS)
    return [Item(text="", answer=text, metadata={"template": "plain"}) for text in texts]


def cases(counts: dict[str, int] = ANSWERS) -> Iterator[Case]:
    """The first odd answers for each verifier; programs are slow, so there are fewer of them."""
    for verifier, count in counts.items():
        stream = odd_answers([item.answer for item in references(verifier) if item.answer], random.Random(0))
        for number, answer in enumerate(itertools.islice(stream, count)):
            yield Case(verifier, number, answer)


def quick() -> Iterator[Case]:
    """A few for each."""
    return cases(QUICK)


@cache
def _started(verifier: str) -> VerifierComponent:
    settings: dict[str, Any] = {"math": {"free_form": True}, "code": {"workers": 2}}.get(verifier, {})
    component = build_component(f"verifier.{verifier}", settings, "verifier")
    set_up(component, Context(node="verifier"))
    atexit.register(component.close)
    return component


def run(case: Case) -> tuple[bool, str]:
    """Grades one answer, boxed and free, against all references."""
    search = search_master_keys(_started(case.verifier).verdicts, references(case.verifier), given=[case.answer])
    right = search.keys[0].references if search.keys else []
    return not right, f"right for {', '.join(right)}" if right else f"{search.graded} verdicts"
