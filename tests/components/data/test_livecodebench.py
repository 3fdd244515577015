"""Packed tests of programs: read without running what a pickle says."""

import base64
import json
import os
import pickle
import zlib

import pytest

from creditgraph.components.data import livecodebench
from creditgraph.components.data.livecodebench import livecodebench_tests, plain_unpickle, unpack_tests

TESTS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def pack(thing):
    return base64.b64encode(zlib.compress(thing if isinstance(thing, bytes) else pickle.dumps(thing))).decode()


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_text_lists_and_dictionaries_come_back(protocol):
    thing = ["a", {"b": ["c", "ü漢"]}, "x" * 300, []]
    assert plain_unpickle(pickle.dumps(thing, protocol)) == thing


@pytest.mark.parametrize("thing", [json.dumps(TESTS), TESTS])
def test_packed_tests_are_read(thing):
    assert unpack_tests(pack(thing)) == TESTS
    assert unpack_tests(json.dumps(TESTS)) == TESTS


def test_nothing_is_run(tmp_path):
    for protocol in range(6):
        packed = pack(pickle.dumps([Runs(tmp_path / "ran")], protocol))
        with pytest.raises(
            ValueError, match=r"a pickle with the instruction \w+, expected text, lists and dictionaries"
        ):
            unpack_tests(packed)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"cos\nsystem\n(S'id'\ntR.", "the instruction GLOBAL"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "the instruction STACK_GLOBAL"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"Pid\n.", "the instruction PERSID"),
        (b"\x80\x04X\x01\x00\x00\x00ar\xff\xff\xff\xff.", "the instruction LONG_BINPUT"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.", "broken|expected|BYTEARRAY8"),
        (b"\x80\x04X\xff\xff\xff\x7fa.", "expected"),
        (b"\x80\x04]h\x07a.", "broken pickle"),
        (b"", "broken|exhausted|empty"),
        (pickle.dumps({"a": 1}), "the instruction BININT1"),
    ],
)
def test_pickles_that_want_more_are_refused(data, text):
    with pytest.raises(ValueError, match=text):
        plain_unpickle(data)


def test_broken_and_oversized_packages(monkeypatch):
    good = pack(json.dumps(TESTS))
    with pytest.raises(ValueError, match="neither JSON nor packed"):
        unpack_tests("!" + good)
    with pytest.raises(ValueError, match="neither JSON nor packed"):
        unpack_tests(base64.b64encode(b"not zlib").decode())
    with pytest.raises(ValueError, match="cut short"):
        unpack_tests(base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TESTS)))[:-6]).decode())
    monkeypatch.setattr(livecodebench, "MAX_BYTES", 1 << 20)
    with pytest.raises(ValueError, match="more than 1 MiB when unpacked"):
        unpack_tests(pack("[" + " " * (2 << 20) + "]"))


def test_rows_of_livecodebench():
    row = {
        "public_test_cases": json.dumps(TESTS),
        "private_test_cases": pack(json.dumps([{"input": "3", "output": "4"}])),
        "metadata": "{}",
    }
    tests, function = livecodebench_tests(row)
    assert tests == [{"input": "1\n", "output": "2\n", "public": True}, {"input": "3", "output": "4", "public": False}]
    assert function == ""
    assert livecodebench_tests(row | {"metadata": '{"func_name": "add"}'})[1] == "add"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"public_test_cases": "[]", "private_test_cases": None}, "no tests"),
        ({"private_test_cases": "@@"}, "private_test_cases: neither JSON nor packed"),
        (
            {"private_test_cases": '[{"input": 1, "output": "2"}]'},
            "private_test_cases: a test without text as input and output",
        ),
        ({"private_test_cases": "[1]"}, "private_test_cases: a test without text"),
        ({"metadata": "{"}, "metadata: not JSON"),
        ({"metadata": "[" * 100_000}, "metadata: not JSON"),
        ({"public_test_cases": "[" * 100_000}, "public_test_cases: maximum recursion depth"),
    ],
)
def test_rows_without_usable_tests_say_why(change, reason):
    row = {"public_test_cases": json.dumps(TESTS), "private_test_cases": "[]", "metadata": "{}"}
    with pytest.raises(ValueError, match=f"^{reason}"):
        livecodebench_tests(row | change)
