"""Programs verified by tests, and the comparison of outputs."""

import datetime
import itertools
import json
import re
import shutil
import time

import pytest

from creditgraph.components.sandbox import pool
from creditgraph.components.sandbox.isolation import INSTALL
from creditgraph.components.sandbox.limits import Limits
from creditgraph.components.text import code_tests
from creditgraph.components.text.code_tests import extract_code, read_tests, same_output, same_value
from creditgraph.components.verifier.code import Code


@pytest.fixture(scope="module")
def node(toolbox):
    if shutil.which("bwrap") is None:
        pytest.skip(f"bubblewrap is not installed. {INSTALL}")
    return toolbox.start(Code, workers=1, limits=Limits(seconds=5.0, memory_mb=192, processes=8))


UIDS = itertools.count(1_000_000)


def verify(toolbox, node, program, tests, **metadata):
    prompts = toolbox.prompts(
        ["p"], answers=[""], first_uid=next(UIDS), metadata=[{"template": "plain", "tests": tests, **metadata}]
    )
    rewards = node.run().verifier.verify(
        prompts, toolbox.trajectories([f"So:\n```python\n{program}\n```"], prompt_uid=prompts.uid)
    )
    return rewards.value.item(), rewards.correct.item(), rewards.valid.item(), rewards.detail[0]


SQUARES = [
    {"input": "2\n", "output": "4\n", "public": True},
    {"input": "3", "output": "9"},
    {"input": "-4", "output": "16"},
]


def test_share_of_tests(toolbox, node):
    assert verify(toolbox, node, "print(int(input()) ** 2)", SQUARES) == (1.0, True, True, "")
    value, correct, valid, detail = verify(toolbox, node, "x = int(input())\nprint(x * x if x > 0 else 0)", SQUARES)
    assert (round(value, 6), correct, valid) == (round(2 / 3, 6), False, True)
    assert detail == "2 of 3 tests passed; test 3: wrong output '0'"
    assert (
        verify(toolbox, node, "1 / 0", SQUARES)[3]
        == "0 of 3 tests passed; test 1: exit code 1: ZeroDivisionError: division by zero"
    )


def test_all_or_nothing_and_hidden_tests(toolbox):
    program = "print(4)"
    one = toolbox.start(Code, workers=1, reward="all")
    assert verify(toolbox, one, program, SQUARES)[:2] == (0.0, False)
    public = toolbox.start(Code, workers=1, tests="public")
    assert verify(toolbox, public, program, SQUARES)[:2] == (1.0, True)
    private = toolbox.start(Code, workers=1, tests="private")
    assert verify(toolbox, private, program, SQUARES)[3].startswith("0 of 2 tests passed")
    assert verify(toolbox, private, program, SQUARES[:1])[2:] == (False, "the prompt has no private tests")


def test_functions_in_the_columns_of_livecodebench(toolbox, node):
    tests = json.dumps({"inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[1, 2, 3]", "[0]"], "fn_name": "join"})
    program = "class Solution:\n    def join(self, values, last):\n        return values + [last]"
    assert verify(toolbox, node, program, tests)[:2] == (1.0, True)
    assert (
        verify(toolbox, node, "def join(a, b): return a", tests)[3] == "0 of 2 tests passed; test 1: wrong value [1, 2]"
    )
    listed = [{"input": [[1], 2], "output": [1, 2]}]
    assert verify(toolbox, node, program, listed, fn_name="join")[:2] == (1.0, True)


def test_prompts_without_tests_are_invalid_and_responses_without_code_wrong(toolbox, node):
    assert verify(toolbox, node, "pass", None)[2:] == (False, "the prompt has no tests")
    assert verify(toolbox, node, "pass", "[")[3].startswith("the prompt's tests are not JSON")
    assert (
        verify(toolbox, node, "pass", {"inputs": ["1"], "outputs": []})[3]
        == "the prompt's tests need as many inputs as outputs"
    )
    assert verify(toolbox, node, "pass", [{"input": 1}])[3] == "each of the prompt's tests needs an input and an output"
    prompts = toolbox.prompts(["p"], metadata=[{"template": "plain", "tests": SQUARES}])
    rewards = node.run().verifier.verify(
        prompts, toolbox.trajectories(["no code", "```python\n" + "#" * 300_000 + "\n```"])
    )
    assert rewards.valid.tolist() == [True, True]
    assert rewards.detail == ["no code block in the response", "a program of 300001 characters; at most 200000 are run"]


def test_code_blocks():
    assert extract_code("```python\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert extract_code("```python\na\n```\n```bash\nls\n```") == "a\n"
    assert extract_code("```\na\n```") == "a\n"
    assert extract_code("```python\nunfinished") == "unfinished"
    assert extract_code("````python\n```\nx\n````") == "```\nx\n"
    assert extract_code("~~~python\na\r\n~~~") == "a\n"
    assert extract_code("print(1)") is None


def test_fences_end_as_in_markdown():
    assert extract_code("```python\na\n`````\nb") == "a\n"
    assert extract_code("```python\na\n~~~\nb") == "a\n~~~\nb"
    assert extract_code("```python\n```") == ""
    assert extract_code("```python\na\n```\n```js\nb") == "a\n"
    assert extract_code("```python\na\u2028\x0bb\n```") == "a\u2028\x0bb\n"
    assert extract_code("inline ```print(1)```\n```print(1)```\n") is None
    assert extract_code("  ``` python title\na\n  ```  ") == "a\n"
    assert extract_code("```python") is None


LONG = {
    "one fence": "`" * 1_000_000,
    "spaces after a fence": "```" + " " * 1_000_000,
    "a language": "```" + "a" * 1_000_000,
    "fences": "```\n" * 250_000,
    "fences in a line": "~~~ " * 250_000,
    "spaces before a fence": " " * 1_000_000 + "```",
    "long fences": ("`" * 500 + "\n") * 2000,
    "a long fence in a block": "```python\n" + "`" * 500_000 + " x\n" * 200_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_code_is_found_in_linear_time(text):
    started = time.process_time()
    extract_code(text)
    assert time.process_time() - started < 2


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (nested(100_000), "the prompt's tests are nested deeper than 100"),
        ({"inputs": [nested(100_000)], "outputs": ["1"], "fn_name": "f"}, "a test of the prompt cannot be read"),
        ({"inputs": [nested(102)], "outputs": ["1"], "fn_name": "f"}, "cannot be read .nested deeper than 100"),
        ({"inputs": [[1]], "outputs": [json.loads(nested(102))], "fn_name": "f"}, "nested deeper than 100"),
        ({"inputs": [json.loads(nested(500))], "outputs": [""]}, "nested deeper than 100"),
        ({"inputs": [[datetime.date(2020, 1, 1)]], "outputs": [1], "fn_name": "f"}, "date is not JSON serializable"),
        ({"inputs": [[1]], "outputs": [b"1"], "fn_name": "f"}, "bytes is not JSON serializable"),
        ({"inputs": ["9" * 5000], "outputs": ["1"], "fn_name": "f"}, "cannot be read .Exceeds the limit"),
        ([{"input": "1", "output": "1"}] * 10_001, "the prompt has 10001 tests; at most 10000 are run"),
    ],
    ids=range(9),
)
def test_tests_that_exceed_a_limit_decide_nothing_and_hold_up_nobody(toolbox, node, tests, reason):
    with pytest.raises(ValueError, match=reason):
        read_tests({"tests": tests}, "all")
    value, correct, valid, detail = verify(toolbox, node, "print(1)", tests)
    assert (value, correct, valid) == (0.0, False, False)
    assert re.search(reason, detail)


def test_inputs_and_outputs_have_a_size(monkeypatch):
    monkeypatch.setattr(code_tests, "MAX_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="the prompt's tests have 1001 characters; at most 1000 are read"):
        read_tests({"tests": [{"input": "x" * 1000, "output": "y"}]}, "all")


def test_a_sandbox_that_cannot_start_decides_nothing(toolbox, node, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool.subprocess, "Popen", refuse)
    assert verify(toolbox, node, "print(4)", SQUARES)[1:] == (
        False,
        False,
        "the sandbox did not start ([Errno 11] Resource temporarily unavailable)",
    )


def test_outputs_are_compared_by_line_and_number():
    assert same_output("1\n2 \n\n", "1\n2", 0.0)
    assert same_output("0.30000000000000004", "0.3", 1e-6)
    assert not same_output("0.30000000000000004", "0.3", 0.0)
    assert same_output("1e3 YES", "1000 YES", 0.0)
    for value in ("1 2", "2\n1", "", "1", "1\n2\n3", "１\n2", "1_0", "nan", "inf", "sNaN", "1\n2" + "0" * 5000):
        assert not same_output(value, "1\n2", 1e-6)
    assert not same_output("nan", "nan ", 0.0) or same_output("nan", "nan", 0.0)
    assert not same_output("1" * 5000, "2", 1e-6)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("1000000006", "1000000007"),
        ("1000001", "1000000"),
        (str(2**64 - 1), str(2**64)),
        ("1000000007.0000001", "1000000007"),
        ("0", "1" + "0" * 309),
        ("0", "-" + "9" * 400),
        ("0.0", "1" + "0" * 309 + ".5"),
        ("0", "inf"),
        ("inf", "1e400"),
        ("inf", "1.5"),
        ("nan", "1.5"),
        ("1e999999999", "1.5"),
        ("1.5", "1.5e999999999"),
        ("1000000001", "1e9"),
        ("0.5000011", "0.5"),
    ],
)
def test_outputs_that_are_wrong(output, expected):
    assert not same_output(output, expected, 1e-6)
    assert not same_output(f"YES {output}", f"YES {expected}", 1e-6)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("1000000007", "1000000007"),
        ("1000000007.0", "1000000007"),
        ("3", "3.0"),
        ("0.5000004", "0.5"),
        ("1234567.9", "1234567.8"),
        ("1.00000001e-05", "1e-05"),
        ("9" * 400, "9" * 400),
        ("inf", "inf"),
    ],
)
def test_outputs_that_are_right(output, expected):
    assert same_output(output, expected, 1e-6)


def test_the_tolerance_is_a_setting(toolbox):
    tests = [{"input": "1", "output": "0.25"}]
    assert verify(toolbox, toolbox.start(Code, workers=1, tolerance=0.02), "print(0.26)", tests)[:2] == (1.0, True)
    assert verify(toolbox, toolbox.start(Code, workers=1), "print(0.26)", tests)[:2] == (0.0, False)


def test_values_are_compared_by_type():
    assert same_value("[1, 2.0000000001]", [1, 2.0], 1e-6)
    assert same_value('{"a": [1]}', {"a": (1,)}, 0.0)
    for value, expected in (
        ("true", 1),
        ("1", True),
        ("1.0000001", 1),
        ('"1"', 1),
        ("null", 0),
        ("[1]", [1, 2]),
        ("NaN", 1.0),
        ("0", float("inf")),
        ("1e308", float("inf")),
        ("Infinity", 1e308),
        ("1000000006", 1000000007),
        ("1" + "0" * 400, 1.5),
        ("x", 1),
    ):
        assert not same_value(value, expected, 1e-6)


def test_tests_as_lines_of_a_list():
    value = read_tests({"tests": [{"input": ["1", "2"], "output": ["3"]}]}, "all")
    assert value.tests[0].input == "1\n2"


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="expected 0 ≤ workers ≤ 64, got 65"):
        Code.Config(workers=65)
    with pytest.raises(ValueError, match="expected 0 ≤ tolerance < 1, got 2"):
        Code.Config(tolerance=2)
