"""Tests of programming problems as LiveCodeBench stores them: JSON, maybe pickled, compressed and in base 64.

Loading a pickle can run any code, so pickles are never loaded directly: the opcodes are first checked against the few
that create text, lists and dictionaries, and only then executed, by an unpickler that cannot look up classes.
"""

import base64
import binascii
import io
import json
import pickle
import pickletools
import re
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from creditgraph.pipeline.core.streams import Stream

MAX_BYTES = 256 << 20  # of one problem's tests, unpacked
_MAX_MEMO = 1 << 16  # largest memo index in a pickle; a huge one would use much memory
_HARMLESS = re.compile(
    r"(PROTO|FRAME|STOP|MARK|MEMOIZE|(LONG_|BIN)?PUT|LONG_BINPUT|(LONG_BIN|BIN)?GET|(SHORT_)?BINUNICODE8?|UNICODE|"
    r"(EMPTY_)?(LIST|DICT)|APPENDS?|SETITEMS?)"
)


class _PlainUnpickler(pickle._Unpickler):  # in Python: its memo grows with use, not by request
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def plain_unpickle(data: bytes) -> Any:
    """Loads a pickle that contains only text, lists and dictionaries.

    Raises:
        ValueError: it contains anything else; nothing of it has been executed.

    >>> plain_unpickle(pickle.dumps(["a", {"b": "c"}]))
    ['a', {'b': 'c'}]
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if not _HARMLESS.fullmatch(opcode.name) or ("PUT" in opcode.name and int(argument or 0) > _MAX_MEMO):
                raise ValueError(f"a pickle with the instruction {opcode.name}, expected text, lists and dictionaries")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"a broken pickle ({error})") from None


def unpack_tests(text: str) -> Any:
    """Reads JSON text, or base 64 of zlib of a pickle of JSON text.

    Raises:
        ValueError: it is neither, unpacks to more than 256 MiB, or its pickle contains more than text.
    """
    if text.lstrip()[:1] in ("[", "{", '"'):
        return json.loads(text)
    try:
        packed = base64.b64decode(text.encode("ascii"), validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, MAX_BYTES)
    except (binascii.Error, zlib.error, UnicodeEncodeError) as error:
        raise ValueError(f"neither JSON nor packed ({error})") from None
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES >> 20} MiB when unpacked")
    if not unpacker.eof:
        raise ValueError("cut short")
    tests = plain_unpickle(data)
    return json.loads(tests) if isinstance(tests, str) else tests


def half_of_private(tests: list[dict[str, Any]], half: str, stream: Stream, number: int) -> list[dict[str, Any]]:
    """The first or second half of the private tests in a random order keyed by the row; the odd one is in the second.

    Raises:
        ValueError: it is empty.
    """
    private = [test for test in tests if not test["public"]]
    order = stream.generator(number).permutation(len(private)).tolist()
    middle = len(private) // 2
    chosen = order[:middle] if half == "first_half" else order[middle:]
    if not chosen:
        raise ValueError(f"a {half.replace('_', ' ')} without tests, of {len(private)} private ones")
    return [private[i] for i in chosen]


def livecodebench_tests(row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(tests, name of the function or "" for standard input) of a row.

    Public tests come first; each is {"input", "output", "public"}, as `verifier.code` reads them.

    Raises:
        ValueError: there are none, or they cannot be read; the text gives the reason.
    """
    tests: list[dict[str, Any]] = []
    for column, public in (("public_test_cases", True), ("private_test_cases", False)):
        cell = row.get(column)
        try:
            column_tests = unpack_tests(cell) if isinstance(cell, str) else cell
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{column}: {error}") from None
        for test in column_tests or ():
            values = (test.get("input"), test.get("output")) if isinstance(test, dict) else ()
            if not values or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{column}: a test without text as input and output")
            tests.append({"input": test["input"], "output": test["output"], "public": public})
    if not tests:
        raise ValueError("no tests")
    try:
        notes = row.get("metadata")
        notes = json.loads(notes) if isinstance(notes, str) and notes.strip() else notes
    except (ValueError, RecursionError) as error:
        raise ValueError(f"metadata: not JSON ({error})") from None
    return tests, str((notes.get("func_name") if isinstance(notes, dict) else "") or "")
