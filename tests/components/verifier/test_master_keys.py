"""No verifier accepts one answer for many references; the search finds those that do."""

import pytest

from creditgraph.components.verifier.base import RIGHT, WRONG, Item, VerifierComponent
from creditgraph.components.verifier.choice import Boolean, Choice
from creditgraph.components.verifier.code import Code
from creditgraph.components.verifier.exact import Exact
from creditgraph.components.verifier.math import Math
from creditgraph.components.verifier.math_text import quantity
from creditgraph.components.verifier.pattern import Regex
from creditgraph.lab.master_keys import odd_answers, search_master_keys
from tests.components.verifier.pairs import all_pairs


def references(answers, **metadata):
    return [Item(text="", answer=answer, metadata={"template": "plain", **metadata}) for answer in answers]


NUMBERS = references(str(n) for n in range(-40, 260))
MIXED = references(sorted({gold for pairs in all_pairs().values() for gold, *_ in pairs}))


class Overflow(VerifierComponent):
    """Compares floats as the verifier once did: inf - 42 > inf is false."""

    def verdict(self, item: Item):
        gold, answer = quantity(item.answer), item.extracted()
        try:
            value = float(answer or "")
        except ValueError:
            return WRONG
        return WRONG if abs(value - float(gold.value)) > 1e-9 * max(abs(value), 1) else RIGHT


class Contains(VerifierComponent):
    """Right when the reference is somewhere in the answer."""

    def verdict(self, item: Item):
        return RIGHT if item.answer in item.text else WRONG


class Lenient(VerifierComponent):
    """Right for anything that is not empty."""

    def verdict(self, item: Item):
        return RIGHT if item.extracted() else WRONG


@pytest.mark.parametrize("kind", [Overflow, Contains, Lenient])
def test_the_search_finds_a_key_and_its_references(kind):
    search = search_master_keys(kind().verdicts, NUMBERS, seconds=30)
    assert search.keys
    key = search.keys[0]
    assert len(set(key.references)) == 3
    for answer in key.references:
        assert kind().verdict(Item(text=key.response, answer=answer, metadata={})).correct


def test_two_values_are_enough_where_there_are_only_two():
    assert search_master_keys(Lenient().verdicts, references(["yes", "no"]), seconds=10).keys


@pytest.mark.parametrize(
    ("kind", "answers", "settings"),
    [
        (Exact, NUMBERS + MIXED, {}),
        (Regex, NUMBERS + MIXED, {}),
        (Choice, references("ABCDEFGHIJ"), {}),
        (Choice, references("ABCD", choices=["Rome", "Paris", "Bern", "Oslo"]), {}),
        (Boolean, references(["yes", "no"]), {}),
    ],
)
def test_no_key_opens_the_text_verifiers(toolbox, kind, answers, settings):
    node = toolbox.start(kind, **settings)
    search = search_master_keys(node.verdicts, answers, seconds=60, answers=3000)
    assert search.keys == []
    assert search.complete
    assert search.answers == 3000


def test_no_key_opens_mathematics(toolbox):
    node = toolbox.start(Math, free_form=True, cpu_seconds=0.3)
    try:
        search = search_master_keys(node.verdicts, MIXED + NUMBERS, seconds=12)
    finally:
        node.close()
    assert search.keys == []
    assert search.graded > 100


def test_odd_answers_are_the_same_on_every_call():
    import random
    from itertools import islice

    one, other = (list(islice(odd_answers(["5"], random.Random(0)), 3000)) for _ in range(2))
    assert one == other
    assert len(set(one)) > 1500


def test_no_program_passes_the_tests_of_three_problems(toolbox):
    outputs = ["1000000007", "0", "yes", "0.5", "[1, 2]", "9" * 309]
    problems = [
        Item(text="", answer="", metadata={"template": "plain", "tests": [{"input": "1", "output": output}]})
        for output in outputs
    ]
    node = toolbox.start(Code, workers=2)
    search = search_master_keys(node.verdicts, problems, seconds=20, answers=30)
    assert search.keys == []
    assert search.graded > 100
