"""Error sentences, read from the source: what a `raise` says, and what is collected as a problem. Nothing is imported.

A part that varies is "…": `raise ConfigError(f"node '{name}': wanted 1.")` gives "node '…': wanted 1.".
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOLE = "…"
SHORTEST = 20  # characters of a sentence
_ERROR = re.compile(r"^\w*(Error|Failure|BadAnswer)$")
_NEVER_SHOWN = {"NameError", "KeyError", "NotImplementedError", "OSError", "RuntimeError", "StopIteration", "TypeError", "AttributeError"}


@dataclass(frozen=True, order=True)
class Sentence:
    """One message.

    Attributes:
        file: below the root, with "/".
        line: of the raise or the string.
        kind: class of the error; "problem" for a sentence that is collected with others.
        text: the message.
    """

    file: str
    line: int
    kind: str
    text: str


def template(node: ast.expr | None) -> str:
    """An expression's text with "…" for what is not literal.

    >>> template(ast.parse("f'a {x}{y} b' + ' c'", mode="eval").body)
    'a … b c'
    """
    return re.sub(f"{HOLE}(?:{HOLE})+", HOLE, _template(node))


def _template(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return HOLE


@cache
def sentences(root: Path, folders: tuple[str, ...] = ("pipeline", "components")) -> tuple[Sentence, ...]:
    """Every sentence below some folders, in the order of files and lines."""
    files = sorted(f for folder in folders for f in (root / folder).rglob("*.py"))
    return tuple(sorted(found for f in files for found in _of_file(f, f.relative_to(root).as_posix())))


def _of_file(path: Path, name: str) -> Iterator[Sentence]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            raised.update(id(n) for n in ast.walk(node.exc))
            text = template(node.exc.args[0])
            if _ERROR.match(kind) and kind not in _NEVER_SHOWN and len(text) >= SHORTEST:
                yield Sentence(name, node.lineno, kind, text)
    for text_node in _strings(tree):
        if id(text_node) not in raised and (text := template(text_node)).find("wanted ") >= 0 and HOLE in text and len(text) >= SHORTEST:
            yield Sentence(name, text_node.lineno, "problem", text)


def _strings(tree: ast.Module) -> Iterator[ast.expr]:
    """f-strings, the parts of sums left out."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            inside.update(id(n) for n in (node.left, node.right))
        if isinstance(node, ast.JoinedStr | ast.BinOp) and id(node) not in inside:
            yield node


def find(quoted: str, among: Iterable[Sentence]) -> list[Sentence]:
    """The sentences that say what is quoted, "…" standing for any part of either."""
    wanted = _plain(quoted)
    return [s for s in among if wanted in _plain(s.text)]


def _plain(text: str) -> str:
    return " ".join(text.split())


def errors_page(found: Iterable[Sentence]) -> str:
    """Markdown: all sentences, by file."""
    parts = [
        "# Every error sentence\n\nEach names the place, what was found, what was wanted and the next step; … stands for what varies. "
        "A *problem* is told together with others. [Troubleshooting](troubleshooting.md) has the usual ones by symptom."
    ]
    last = ""
    for one in found:
        if one.file != last:
            parts.append(f"## [{one.file}](../{one.file})\n")
            last = one.file
        parts.append(f"- *{one.kind}*: {escaped(_plain(one.text))}")
    return "\n".join(parts).replace("\n## ", "\n\n## ") + "\n"


def escaped(text: str) -> str:
    """Text as Markdown shows it, whatever it contains."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)
