"""The malformed data files of the suite `data`, and what must become of each."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet

DEEP = 100_000


@dataclass(frozen=True)
class Case:
    """A file, and what must become of it.

    Attributes:
        name: what is wrong with it.
        file: name of the file.
        content: its bytes, or what writes it.
        used: reference answers of the rows that must be used, in order.
        rejected: number of rows that must be rejected.
        reason: regular expression that every reason must have.
        others: rows that are filtered out, repeated or not chosen.
        sentence: regular expression of the sentence that refuses the whole file; "" if rows are used.
        settings: of the data section.
    """

    name: str
    file: str
    content: bytes | Callable[[Path], None]
    used: tuple[str, ...] = ()
    rejected: int = 0
    reason: str = ""
    others: int = 0
    sentence: str = ""
    settings: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


def row(answer: object, question: object = None, **more: object) -> dict:
    return {"question": f"<solve> {answer} s1 + 2" if question is None else question, "answer": answer, **more}


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


GOOD = [row("1"), row("2"), row("3")]
LINES = b"".join(map(line, GOOD))
CSV = b"question,answer\n" + b"".join(f"{r['question']},{r['answer']}\n".encode() for r in GOOD)
ALL = ("1", "2", "3")
ENDS = ("1", "2")


def between(name: str, middle: bytes, reason: str = "", used: tuple[str, ...] | None = None, **more: object) -> Case:
    """JSON lines with one bad row between two good ones; with `used`, the row is odd but usable."""
    content = line(GOOD[0]) + middle.rstrip(b"\n") + b"\n" + line(GOOD[1])
    return Case(name, "a.jsonl", content, used or ENDS, 0 if used else 1, reason, **more)


def chat(name: str, messages: object, reason: str) -> Case:
    return between(name, line(row("9", messages)), reason, settings={"template": "chat"})


def programs(name: str, tests: object, reason: str) -> Case:
    """Programs with their tests in a column; the answers are empty."""
    sound = [{"input": "1", "output": "2"}]
    content = b"".join(line({"question": f"<solve> {i}", "t": t}) for i, t in enumerate((sound, tests, sound)))
    settings = {"answer": "", "answer_kind": "code", "metadata": {"tests": "t"}}
    return Case(name, "a.jsonl", content, ("", ""), 1, reason, settings=settings)


def choices(name: str, value: object, reason: str) -> Case:
    good = [row("A", f"<solve> {i} s1 + 2", choices=["x", "y"]) for i in range(2)]
    content = line(good[0]) + line(row("A", "<solve> 9", choices=value)) + line(good[1])
    return Case(name, "a.jsonl", content, ("A", "A"), 1, reason, settings={"choices": "choices"})


ROWS = [
    between("text", b"hello", "^not JSON"),
    between("an object cut short", b'{"question": "<solve> 5 s1 + 2", "answ', "^not JSON"),
    between("two objects in one line", line(row("5")).strip() + line(row("6")), "^not JSON"),
    between("a comma too many", b'{"question": "<solve> 5 s1 + 2", "answer": "5",}', "^not JSON"),
    between("single quotes", b"{'question': '<solve> 5 s1 + 2', 'answer': '5'}", "^not JSON"),
    between("a control character in a text", b'{"question": "<solve>\x00 5", "answer": "5"}', "^not JSON"),
    between("a byte order mark in the middle", b"\xef\xbb\xbf" + line(row("5")), "^not JSON"),
    between("lists nested 100,000 deep", b"[" * DEEP, "^not JSON"),
    between("a column nested 100,000 deep", line(row("5"))[:-2] + b', "x": ' + b"[" * DEEP, "^not JSON"),
    between("a column of objects nested 100,000 deep", line(row("5"))[:-2] + b', "x": ' + b'{"a":' * DEEP, "^not JSON"),
    between("an integer of 5,000 digits", b'{"question": "<solve> 5", "answer": ' + b"7" * 5000 + b"}", "^not JSON"),
    between("a list", b"[1, 2]", "^a JSON list, expected an object"),
    between("a text alone", b'"x"', "^a JSON str"),
    between("a number alone", b"3", "^a JSON int"),
    between("null alone", b"null", "^a JSON NoneType"),
    between("an empty object", b"{}", "^no question"),
    between("an answer of 1e999", b'{"question": "<solve> 5", "answer": 1e999}', "^answer is inf"),
    between("an answer that is NaN", b'{"question": "<solve> 5", "answer": NaN}', "^answer is nan"),
    between("an answer of -Infinity", b'{"question": "<solve> 5", "answer": -Infinity}', "^answer is -inf"),
    between("an answer of null", line(row(None, "<solve> 5")), "^no answer"),
    between("an empty answer", line(row("", "<solve> 5")), "^no answer"),
    between("an answer of white space", line(row(" \t\u00a0\u2003", "<solve> 5")), "^no answer"),
    between("no answer in one row", line({"question": "<solve> 5"}), "^no answer"),
    between("no question in one row", line({"answer": "5"}), "^no question"),
    between("a question of null", b'{"question": null, "answer": "5"}', "^no question"),
    between("a question that is a number", line(row("5", 7)), "^question is a int, expected text"),
    between("a question that is true", line(row("5", True)), "^question is a bool, expected text"),
    between("a question that is an object", line(row("5", {"text": "x"})), "^question is a dict, expected text"),
    between("an answer that is an object", line(row({"a": 1}, "<solve> 5")), "^answer is a dict, expected text"),
    between("an answer of lists in a list", line(row([["1"]], "<solve> 5")), "^answer is a list, expected text"),
    between("an answer that is an empty list", line(row([], "<solve> 5")), "^answer is a list, expected text"),
    between("a lone surrogate in a question", line(row("5", "<solve> 5 \ud800")), "^question is not UTF-8"),
    between("a lone surrogate in an answer", line(row("5\udfff", "<solve> 5")), "^answer is not UTF-8"),
    between("a byte that is no UTF-8 in a question", line(row("5")).replace(b"s1", b"\xff"), "^question is not UTF-8"),
    between("a byte that is no UTF-8 in an answer", line(row("5")).replace(b'"5"', b'"\xc3"'), "^answer is not UTF-8"),
    between("a byte that is no UTF-8 in a name", line(row("5")).replace(b"answer", b"answ\xe9"), "^no answer"),
    between("an answer of a megabyte", line(row("7" * 1_000_000, "<solve> 5")), "^an answer of N characters"),
    between("a question of a megabyte", line(row("5", "<solve> 5 s1 + 2 " * 60_000)), "^prompt of N tokens"),
    between("a question without a known word", line(row("5", "\u200b\u200b")), "^no word of the prompt"),
    between("a lone surrogate in another column", line(row("5", x="\ud800")), used=("1", "5", "2")),
    between("an escaped NUL in a question", line(row("5", "<solve> 5\x00 s1 + 2")), used=("1", "5", "2")),
    between("a line separator in a question", line(row("5")).replace(b"s1", b"\xe2\x80\xa8s1"), used=("1", "5", "2")),
    between("a name twice", b'{"question": "<solve> 5", "answer": "4", "answer": "5"}', used=("1", "5", "2")),
    between("an answer of 4,000 digits", line(row(10**3999, "<solve> 5")), used=("1", str(10**3999), "2")),
    between("an answer that is true", line(row(True, "<solve> 5")), used=("1", "yes", "2")),
    between("empty lines", b"\n \n\t\n", used=ENDS),
    Case("a repeated question", "a.jsonl", LINES + line(row("9", "<SOLVE>  １ s1 + 2")), ALL, others=1),
    Case("a column to keep of other types", "a.jsonl", line(row("1", k=1)) + line(row("2", k=None)) + line(row("3")),
         ("1",), others=2, settings={"keep": {"k": "1"}}),
    Case("no box", "a.jsonl", line(row("\\boxed{1}", "<solve> 1")) + line(row("2")), ("1",), 1, "^no .boxed",
         settings={"answer_boxed": True}),
    Case("nothing after the mark", "a.jsonl", line(row("so #### 1", "<solve> 1")) + line(row("2 ####")), ("1",), 1,
         "^nothing after", settings={"answer_after": "####"}),
    chat("an empty list of messages", [], "^(no question|question is an empty list)"),
    chat("a message that is a text", ["<solve> 5"], "^question: message N is not"),
    chat("a message without a role", [{"content": "<solve> 5"}], "^question: message N is not"),
    chat("a message whose content is null", [{"role": "user", "content": None}], "^question: message N is not"),
    chat("a message whose content is a list", [{"role": "user", "content": [{"text": "x"}]}], "^question: message N"),
    chat("an unknown role", [{"role": "robot", "content": "<solve> 5"}], "role 'robot'"),
    chat("the assistant has the last word", [{"role": "user", "content": "<solve> 5"},
         {"role": "assistant", "content": "5"}], "the last message is of role 'assistant'"),
    chat("a late system message", [{"role": "user", "content": "5"}, {"role": "system", "content": "x"}], "system"),
    chat("a system message alone", [{"role": "system", "content": "x"}], "no message of role 'user'"),
    chat("a surrogate in a message", [{"role": "user", "content": "<solve> \ud800"}], "^question is not UTF-8"),
    programs("no tests", None, "tests"),
    programs("an empty list of tests", [], "tests"),
    programs("tests that are a number", 3, "tests"),
    programs("tests that are text", "print", "tests"),
    programs("tests nested 100,000 deep", "[" * DEEP + "]" * DEEP, "tests are nested deeper than"),
    programs("an argument nested 100,000 deep", {"inputs": ["[" * DEEP], "outputs": ["1"], "fn_name": "f"}, "test"),
    programs("a test without an output", [{"input": "1"}], "test"),
    programs("tests of numbers", [1, 2], "test"),
    programs("more inputs than outputs", {"inputs": ["1", "2"], "outputs": ["1"]}, "inputs"),
    programs("10,001 tests", [{"input": "1", "output": "2"}] * 10_001, "tests; at most"),
    choices("choices that are null", None, "^choices: expected N to N texts"),
    choices("a single choice", ["x"], "^choices: expected N to N texts"),
    choices("27 choices", [str(i) for i in range(27)], "^choices: expected N to N texts"),
    choices("choices of numbers", [1, 2], "^choices: expected N to N texts"),
    choices("choices that are text", "x, y", "^choices is text that is not JSON"),
    choices("choices nested 100,000 deep", "[" * DEEP, "^choices is text that is not JSON"),
    choices("choices that are an object of null", {"text": None, "label": 3}, "^choices: expected N to N texts"),
]  # fmt: skip


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


MANY = b"".join(line(row(str(i))) for i in range(2000))
PACKED = gzip.compress(MANY, mtime=0)
FLIPPED = PACKED[:-6] + bytes([PACKED[-6] ^ 1]) + PACKED[-5:]  # the checksum at the end
TEXTS = [
    Case("empty", "a.jsonl", b"", sentence="is empty, expected one problem per row"),
    Case("only line ends", "a.jsonl", b"\n\r\n\n", sentence="it has no rows"),
    Case("only a byte order mark", "a.jsonl", b"\xef\xbb\xbf", sentence="it has no rows"),
    Case("only NUL bytes", "a.jsonl", bytes(4096), sentence="all 1 rows were rejected .1 × not JSON"),
    Case("UTF-16", "a.jsonl", LINES.decode().encode("utf-16"), sentence="rows were rejected .* not JSON"),
    Case("Windows line ends", "a.jsonl", LINES.replace(b"\n", b"\r\n"), ALL),
    Case("old Macintosh line ends", "a.jsonl", LINES.replace(b"\n", b"\r"), ALL),
    Case("a byte order mark", "a.jsonl", b"\xef\xbb\xbf" + LINES, ALL),
    Case("no line end at the end", "a.jsonl", LINES[:-1], ALL),
    Case("cut short", "a.jsonl", LINES[:-4], ENDS, 1, "^not JSON"),
    Case("no such column", "a.jsonl", line({"q": "x", "answer": "1"}), sentence="has no column 'question'; it has q"),
    Case("cut short", "a.jsonl.gz", PACKED[: len(PACKED) // 2], sentence="cannot be decompressed after .* Copy it"),
    Case("a wrong checksum", "a.jsonl.gz", FLIPPED, sentence="cannot be decompressed after .* Copy it again"),
    Case("not compressed", "a.jsonl.gz", LINES, sentence="cannot be decompressed after 0 lines"),
    Case("nothing compressed", "a.jsonl.gz", gzip.compress(b""), sentence="it has no rows"),
    Case("compressed twice", "a.jsonl.gz", gzip.compress(PACKED), sentence="rows were rejected .* not JSON"),
    Case("garbage behind", "a.jsonl.gz", PACKED + b"garbage", sentence="cannot be decompressed after .* Copy it"),
    Case("cut short", "a.jsonl.zst", zstd(MANY)[:-40], sentence="cannot be decompressed after .* Copy it again"),
    Case("gzip under this name", "a.jsonl.zst", PACKED, sentence="cannot be decompressed after 0 lines"),
    Case("an empty list", "a.json", b"[]", sentence="it has no rows"),
    Case("a number", "a.json", b"3", sentence="expected a list of objects, got a JSON int"),
    Case("null", "a.json", b"null", sentence="expected a list of objects, got a JSON NoneType"),
    Case("cut short", "a.json", json.dumps(GOOD).encode()[:-9], sentence="not JSON .*expected a list of objects"),
    Case("nested 100,000 deep", "a.json", b"[" * DEEP, sentence="not JSON .*expected a list of objects"),
    Case("not UTF-8", "a.json", json.dumps(GOOD).encode().replace(b"2 s1", b"\xff s1"), ("1", "3"), 1, "not UTF-8"),
    Case("numbers in the list", "a.json", json.dumps([GOOD[0], 7, None, GOOD[1]]).encode(), ENDS, 2, "^a JSON"),
    Case("JSON lines under this name, one bad", "a.json", LINES + b"{\n", ALL, 1, "^not JSON"),
    Case("two lists in an object", "a.json", b'{"a": [1], "b": [2]}', sentence="has no column 'question'; it has a, b"),
    Case("the header alone", "a.csv", b"question,answer\n", sentence="it has no rows"),
    Case("semicolons", "a.csv", CSV.replace(b",", b";"), sentence="has no column 'question'; it has question;answer"),
    Case("a cell too many", "a.csv", CSV + b"<solve> 9,9,9\n", ALL, 1, "^N more cells than columns"),
    Case("a cell too few", "a.csv", CSV + b"<solve> 9\n", ALL, 1, "^no answer"),
    Case("an open quote at the end", "a.csv", CSV + b'<solve> 9,"9\n<solve> 8,8\n', ALL, 1, "^not CSV"),
    Case("an open quote and another", "a.csv", CSV + b'<solve> 9,"9\n<solve> 8,"8"\n', ALL, 1, "^not CSV"),
    Case("a NUL byte", "a.csv", CSV + b"<solve> 9\0 s1,9\n", (*ALL, "9")),
    Case("not UTF-8", "a.csv", CSV + b"<solve> 9,\xff\n", ALL, 1, "^answer is not UTF-8"),
    Case("Windows line ends and a byte order mark", "a.csv", b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n"), ALL),
    Case("a cell of a megabyte", "a.csv", CSV + b"<solve> 9," + b"9" * 1_000_000 + b"\n", ALL, 1, "^an answer of N"),
    Case("a line end in a cell", "a.csv", CSV + b'"<solve> 9\ns1 + 2",9\n', (*ALL, "9")),
    Case("another type", "a.txt", LINES, sentence="expected one of .jsonl"),
]


def table(values: dict, kind: str = "parquet") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        made = pyarrow.table(values)
        if kind == "parquet":
            pyarrow.parquet.write_table(made, path)
        else:
            new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
            with new(str(path), made.schema) as writer:
                writer.write_table(made)

    return write


def damaged(write: Callable[[Path], None], change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        write(path)
        path.write_bytes(change(path.read_bytes()))

    return rewrite


QUESTIONS = [r["question"] for r in GOOD]
SOUND = {"question": QUESTIONS, "answer": list(ALL)}
# Texts whose second is no UTF-8.
BROKEN = pyarrow.Array.from_buffers(
    pyarrow.string(), 3,
    [None, pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"1\xff3")],
)  # fmt: skip


def answers(values: object) -> Callable[[Path], None]:
    return table({"question": QUESTIONS, "answer": values})


TABLES = [
    Case("cut short", "a.parquet", damaged(table(SOUND), lambda b: b[: len(b) // 2]), sentence="read as parquet"),
    Case("magic numbers alone", "a.parquet", b"PAR1PAR1", sentence="read as parquet"),
    Case("CSV under this name", "a.parquet", CSV, sentence="read as parquet"),
    Case("a damaged footer", "a.parquet", damaged(table(SOUND), lambda b: b[:-60] + bytes(40) + b[-20:]),
         sentence="read as parquet"),
    Case("a damaged page", "a.parquet", damaged(table(SOUND), lambda b: b[:6] + b"\xff" * 30 + b[36:]),
         sentence="read as parquet"),
    Case("no rows", "a.parquet", table({"question": pyarrow.array([], "string"), "answer": []}), sentence="no rows"),
    Case("no column of answers", "a.parquet", table({"question": QUESTIONS}), sentence="has no column 'answer'"),
    Case("answers that are null", "a.parquet", answers(["1", None, "3"]), ("1", "3"), 1, "^no answer"),
    Case("a column of nulls", "a.parquet", answers(pyarrow.nulls(3)), sentence="all 3 rows .* .3 × no answer"),
    Case("answers that are integers", "a.parquet", answers([1, 2, 3]), ALL),
    Case("answers that are numbers and nan", "a.parquet", answers([1.0, float("nan"), 3.0]), ("1", "3"), 1, "nan"),
    Case("answers that are lists of integers", "a.parquet", answers([[1], [2], [3]]), sentence="answer is a list"),
    Case("answers that are objects", "a.parquet", answers([{"a": 1}] * 3), sentence="answer is a dict"),
    Case("answers that are bytes", "a.parquet", answers([b"1", b"2", b"3"]), sentence="answer is a bytes"),
    Case("answers that are times", "a.parquet", answers([datetime(2020, 1, 1)] * 3), sentence="answer is a datetime"),
    Case("answers that are no UTF-8", "a.parquet", answers(BROKEN), ("1", "3"), 1, "UTF-8"),
    Case("questions that are lists", "a.parquet", table(SOUND | {"question": [["a"]] * 3}), sentence="message N is"),
    Case("cut short", "a.arrow", damaged(table(SOUND, "file"), lambda b: b[: len(b) // 2]), sentence="read as arrow"),
    Case("a stream cut short", "a.arrow", damaged(table(SOUND, "stream"), lambda b: b[:-90]), sentence="read as arrow"),
    Case("text", "a.arrow", LINES, sentence="read as arrow"),
    Case("answers that are no UTF-8", "a.arrow", table({"question": QUESTIONS, "answer": BROKEN}, "stream"),
         ("1", "3"), 1, "UTF-8"),
]  # fmt: skip
CASES = [*ROWS, *TEXTS, *TABLES]
