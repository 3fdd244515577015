"""What components there are, read from their source.

Nothing of theirs is imported, so listing them takes milliseconds.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.core.errors import ConfigError, did_you_mean
from pipeline.core.settings import Setting, annotation_text, settings_in


@dataclass(frozen=True)
class Entry:
    """One component.

    Attributes:
        target: "module:Class".
        summary: first line of its docstring.
        doc: the whole docstring.
        takes: input → type as text, for example "Rewards (rows of trajectories)" or "Verifier, optional".
        makes: output → type as text.
        settings: documented settings, nested ones with dotted names.
        paper: arXiv id or name of the source, "" without one.
        placement: "replica" or "collective".
    """

    target: str
    summary: str
    doc: str
    takes: dict[str, str]
    makes: dict[str, str]
    settings: list[Setting]
    paper: str
    placement: str


@dataclass(frozen=True)
class _Source:
    module: str
    path: Path
    tree: ast.Module


@dataclass(frozen=True)
class _Class:
    source: _Source
    node: ast.ClassDef


def describe(target: str) -> Entry:
    """Reads one component, "module:Class", from its source; raises ConfigError when file or class does not exist."""
    module, _, name = target.partition(":")
    source = _read(module)
    component = _find_class(source, name)
    if component is None:
        classes = [n.name for n in source.tree.body if isinstance(n, ast.ClassDef)]
        raise ConfigError(f"component '{target}': no class '{name}' in {source.path}.{did_you_mean(name, classes)}")
    family = list(_with_bases(component))
    doc = ast.get_docstring(component.node) or ""
    members = [(cls, node) for cls in family for node in cls.node.body]
    run = next(((cls, n) for cls, n in members if isinstance(n, ast.FunctionDef) and n.name == "run"), None)
    config = next(
        (_Class(cls.source, n) for cls, n in members if isinstance(n, ast.ClassDef) and n.name == "Config"), None
    )
    return Entry(
        target=target,
        summary=doc.partition("\n")[0],
        doc=doc,
        takes=_inputs(run[1]) if run else {},
        makes=_outputs(run[0], run[1]) if run else {},
        settings=list({s.name: s for s in _settings(config)}.values()) if config else [],
        paper=_constant(family, "paper", ""),
        placement=_constant(family, "placement", "replica"),
    )


@cache
def _read(module: str) -> _Source:
    """Parses a module's file. Only its top-level package is looked up, so no parent package is imported."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        spec = None
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    files = [folder.joinpath(*rest, "__init__.py") for folder in folders]
    if rest:
        files = [folder.joinpath(*rest).with_suffix(".py") for folder in folders] + files
    elif spec and spec.origin:
        files.append(Path(spec.origin))
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise ConfigError(
            f"component module '{module}': no such file; install the package that holds it or correct the name."
        )
    try:
        return _Source(module, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"component module '{module}': {path} cannot be read: {error}") from error


def _find_class(source: _Source, name: str) -> _Class | None:
    """A class by its name in a module: defined there, or imported from the same package or one of this project's."""
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _Class(source, node)
        # Third-party bases are not followed: their source may be a compiled module.
        if isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == name for a in node.names):
            if node.level or node.module.partition(".")[0] not in (
                source.module.partition(".")[0],
                "pipeline",
                "components",
            ):
                return None
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return _find_class(_read(node.module), original)
    return None


def _with_bases(cls: _Class) -> Iterator[_Class]:
    yield cls
    for base in cls.node.bases:
        above = _find_class(cls.source, base.id) if isinstance(base, ast.Name) else None
        # The contract's own base class declares no sockets and no settings.
        if above is not None and above.source.module != "pipeline.core.component":
            yield from _with_bases(above)


def _constant(family: list[_Class], name: str, default: str) -> str:
    for member in family:
        for node in member.node.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return str(node.value.value) if isinstance(node.value, ast.Constant) else default
    return default


def _inputs(run: ast.FunctionDef) -> dict[str, str]:
    defaults = zip(run.args.kwonlyargs, run.args.kw_defaults, strict=True)
    return {a.arg: _type_text(a.annotation) + (", optional" if default is not None else "") for a, default in defaults}


def _outputs(owner: _Class, run: ast.FunctionDef) -> dict[str, str]:
    returned = _unquoted(run.returns)
    if not isinstance(returned, ast.Name):
        return {}
    inner = next((n for n in owner.node.body if isinstance(n, ast.ClassDef) and n.name == returned.id), None)
    outputs = _Class(owner.source, inner) if inner else _find_class(owner.source, returned.id)
    fields = outputs.node.body if outputs else []
    return {
        f.target.id: _type_text(f.annotation)
        for f in fields
        if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
    }


def _type_text(annotation: ast.expr | None) -> str:
    """ "Credit (rows of trajectories)" for Annotated[Credit, same_rows("trajectories")]; "T" for T | None."""
    node = _unquoted(annotation)
    if node is None:
        return "?"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [
            side for side in (node.left, node.right) if not (isinstance(side, ast.Constant) and side.value is None)
        ]
        return " or ".join(_type_text(side) for side in sides)
    if (
        isinstance(node, ast.Subscript)
        and ast.unparse(node.value).split(".")[-1] == "Annotated"
        and isinstance(node.slice, ast.Tuple)
    ):
        inner, *notes = node.slice.elts
        rows = [
            ast.literal_eval(n.args[0])
            for n in notes
            if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Constant)
        ]
        return _type_text(inner) + (f" (rows of {rows[0]})" if rows else "")
    if isinstance(node, ast.Subscript):
        return f"{ast.unparse(node.value)}[{_type_text(node.slice)}]"
    return ast.unparse(node)


def _unquoted(annotation: ast.expr | None) -> ast.expr | None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _settings(config: _Class, prefix: str = "") -> Iterator[Setting]:
    annotations = {
        n.target.id: n.annotation
        for n in config.node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    for base in reversed(list(_with_bases(config))[1:]):  # the order of dataclass fields
        yield from _settings(base, prefix)
    for setting in settings_in(config.node):
        annotation = _unquoted(annotations[setting.name])
        nested = _find_class(config.source, annotation.id) if isinstance(annotation, ast.Name) else None
        if nested is not None and any("dataclass" in ast.unparse(d) for d in nested.node.decorator_list):
            yield from _settings(nested, f"{prefix}{setting.name}.")
        else:
            alias = _alias(config.source, annotation.id) if isinstance(annotation, ast.Name) else None
            yield dataclasses.replace(setting, name=prefix + setting.name, type=alias or setting.type)


def _alias(source: _Source, name: str) -> str | None:
    """What a module-level `Name = Literal[…]` stands for."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return annotation_text(node.value)
    return None
