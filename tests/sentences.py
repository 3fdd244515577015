"""Error sentences, read from the source: what a `raise` says, and what is collected as a problem. Nothing is imported.

A part that varies is "…": `raise ConfigError(f"node '{name}': expected 1.")` gives "node '…': expected 1.".
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HOLE = "…"
SHORTEST = 20  # characters of a sentence


def template(node: ast.expr | None) -> str:
    """An expression's text with "…" for what is not literal."""
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
def sentences(root: Path) -> frozenset[str]:
    """Every message of the product."""
    files = [file for folder in ("pipeline", "components") for file in (root / folder).rglob("*.py")]
    return frozenset(" ".join(text.split()) for file in files for text in _of_file(file) if len(text) >= SHORTEST)


def _of_file(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()  # parts of sums, which are no sentence of their own
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp):
            inside.update(id(n) for n in (node.left, node.right))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield template(node.exc.args[0])
        if isinstance(node, ast.JoinedStr | ast.BinOp | ast.Constant) and id(node) not in inside:
            yield template(node)


def is_quoted(text: str, root: Path) -> bool:
    """Whether a message contains the text, "…" in it being any part that varies."""
    return any(" ".join(text.split()) in message for message in sentences(root))
