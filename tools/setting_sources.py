"""Where the values of graphs, setups and recipes come from: read from the comments beside them.

    sampler: {group_size: 8, max_tokens: 3000}    # from the authors' release
    learner:                                      # ours
      minibatches: 4                              # second-hand (public ports)
    advantage: {alpha: 10.0, normalize: std}      # second-hand (a public port): alpha; ours: normalize

A comment is a list of clauses, `LABEL (reason or source): settings`, separated by "; ". A clause without settings is
for all values of its line and of the block that the line opens. A comment line that begins with a label belongs to the
line below it. "# Unless a line says otherwise: ours." gives a file's other values the one label that claims nothing.
Text that does not begin with a label is prose.

`tools/update_docs` writes the tables of docs/papers from them, so a page and a file cannot disagree.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

# In C if PyYAML was built with it: these files are read many times.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
OURS = "ours"
LABELS = ("from the paper's text", "from the authors' release", "second-hand", "our reading", OURS)
DEFAULT = "# Unless a line says otherwise: ours."
# Setups that a paper's own settings made: the page that lists them.
SETUP_PAGES = {"dapo_paper": "dapo", "reset_paper": "srpo"}
# Recipes that another one's settings made, and graphs that share a page.
RECIPE_PAGES = {"entropy_8020_qwen3_4b": "entropy_8020"}
GRAPH_PAGES = {
    "gigpo": "turns",
    "igpo": "turns",
    "mt_grpo": "turns",
    "p_trace": "trace",
    "ppo": "vapo",
    "rlsd": "self_teacher",
    "rrpo": "srpo",
    "s_trace": "trace",
    "sdpo": "self_teacher",
    "srpo_turns": "turns",
    "trace_td": "turns",
    "tree_grpo": "turns",
    "tree_turns": "turns",
    "turn_ppo": "turns",
}
CLAUSE = re.compile(rf"({'|'.join(LABELS)})(?: \(([^)]*)\))?(?:: ([\w.]+(?:, [\w.]+)*))?\.?")


@dataclass(frozen=True)
class Clause:
    """One label, its reason or source, and the settings it is for; none are all of its line."""

    label: str
    reason: str
    names: tuple[str, ...]

    @property
    def source(self) -> str:
        """What a page prints."""
        return f"{self.label} ({self.reason})" if self.reason else self.label


@dataclass(frozen=True)
class Value:
    """A value of a file; `source` is None where no comment names one."""

    setting: str
    text: str
    line: int
    source: Clause | None


def parse_comment(comment: str, place: str) -> list[Clause]:
    """The clauses of a comment; none of prose. A ValueError says what is wrong with the others."""
    if not comment.startswith(LABELS):
        return []
    clauses = []
    for part in re.split(r"; (?![^(]*\))", comment):
        match = CLAUSE.fullmatch(part)
        if match is None:
            raise ValueError(f"{place}: expected 'LABEL (reason): settings' with a label of {LABELS}, found '{part}'.")
        label, reason, names = match.groups()
        if label == "second-hand" and not reason:
            raise ValueError(f"{place}: 'second-hand' needs its source: second-hand (public ports).")
        clauses.append(Clause(label, reason or "", tuple(names.split(", ")) if names else ()))
    return clauses


def read_values(file: Path) -> list[Value]:
    """The values of a graph, setup or recipe with their sources, in the order of the file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = [_clauses_at(file, lines, number) for number in range(len(lines))]
    default = [Clause(OURS, "", ())] if DEFAULT in lines else []
    used: set[Clause] = set()
    values = []
    whole = yaml.compose("\n".join(lines), LOADER)
    for path, node, opened in _leaves(whole, (), ()) if whole else ():
        setting = _setting(path, node)
        if setting is None:
            continue
        scopes = [comments[number] for number in dict.fromkeys(reversed(opened))]
        source = next((c for scope in [*scopes, default] if (c := _covering(scope, setting))), None)
        used |= {source} if source else set()
        values.append(Value(setting, _text(node), node.start_mark.line + 1, source))
    idle = [c for scope in comments for c in scope if c.names and c not in used]
    if idle:
        raise ValueError(f"{file.name}: the comment '{idle[0].source}: {', '.join(idle[0].names)}' is for no value.")
    return values


def claims_of_page(page: str, configs: Path) -> list[tuple[str, list[Value]]]:
    """(file, values that are not ours) of every graph, setup and recipe of a paper's page."""
    graphs = {file.stem for file in (configs / "graph").glob("*.yaml") if GRAPH_PAGES.get(file.stem, file.stem) == page}
    files = [configs / "graph" / f"{name}.yaml" for name in sorted(graphs)]
    files += [configs / "setup" / f"{name}.yaml" for name, of in SETUP_PAGES.items() if of == page]
    files += [file for file in sorted((configs / "recipe").glob("*.yaml")) if page_of(file) == page]
    found = [(str(file.relative_to(configs)), read_values(file)) for file in files]
    found = [(name, [v for v in values if v.source and v.source.label != OURS]) for name, values in found]
    return [(name, values) for name, values in found if values]


def table(page: str, configs: Path) -> str:
    """The page's table: one row per file and source."""
    rows = ["| file in `configs` | settings | source |", "|---|---|---|"]
    for name, values in claims_of_page(page, configs):
        sources = dict.fromkeys(v.source.source for v in values if v.source)
        for source in sources:
            settings = ", ".join(f"`{v.setting}: {v.text}`" for v in values if v.source and v.source.source == source)
            rows.append(f"| `{name}` | {settings} | {source} |")
    return "\n".join(rows)


@cache
def page_of(recipe: Path) -> str:
    """The page of a recipe's graph, through the recipes it starts from."""
    if recipe.stem in RECIPE_PAGES:
        return RECIPE_PAGES[recipe.stem]
    for item in yaml.load(recipe.read_text(encoding="utf-8"), LOADER).get("defaults", []):
        if isinstance(item, dict) and "/graph" in item:
            return str(GRAPH_PAGES.get(item["/graph"], item["/graph"]))
        if isinstance(item, str):
            return page_of(recipe.with_name(f"{item}.yaml"))
    raise ValueError(f"{recipe.name}: no graph in its defaults.")


def _clauses_at(file: Path, lines: list[str], number: int) -> list[Clause]:
    """Clauses of the comment at the end of a line and of the comment lines right above it."""
    if _is_comment(lines[number]):
        return []
    first = number
    while first and _is_comment(lines[first - 1]):
        first -= 1
    comments = [line.strip().removeprefix("# ") for line in lines[first:number]]
    comments.append(lines[number].partition("  # ")[2].strip())
    return [clause for text in comments for clause in parse_comment(text, f"{file.name}:{number + 1}")]


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _leaves(
    node: yaml.Node, path: tuple[str, ...], opened: tuple[int, ...]
) -> Iterator[tuple[tuple[str, ...], yaml.Node, tuple[int, ...]]]:
    """(path, node, lines of its keys from the outermost) of every value; a list is one value, but for `defaults`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _leaves(value, (*path, key.value), (*opened, key.start_mark.line))
    elif isinstance(node, yaml.SequenceNode) and path == ("defaults",):
        for item in node.value:
            yield from _leaves(item, path, (*opened, item.start_mark.line))
    else:
        yield path, node, (*opened, node.start_mark.line)


def _setting(path: tuple[str, ...], node: yaml.Node) -> str | None:
    """The name of a setting as a command line has it; None for wires, names of files and values that follow others."""
    if path[0] == "defaults":
        name = path[-1].removeprefix("override ").removeprefix("/")
        return name if name in ("model", "data") else None
    if path[0] == "nodes":
        path = (path[1], *path[3:]) if path[2] == "config" else ()
    if not path or (isinstance(node, yaml.ScalarNode) and node.value.startswith("${")):
        return None
    return ".".join(path)


def _covering(clauses: list[Clause], setting: str) -> Clause | None:
    """The clause that names the setting or a section of it, else the one for the whole line."""
    named = [c for c in clauses for name in c.names if f".{name}." in f".{setting}."]
    return next(iter(named or [c for c in clauses if not c.names]), None)


def _text(node: yaml.Node) -> str:
    """The value as the file writes it."""
    if isinstance(node, yaml.SequenceNode):
        return f"[{', '.join(_text(item) for item in node.value)}]"
    if isinstance(node, yaml.MappingNode):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in node.value)}}}"
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    return repr(node.value) if quoted else str(node.value)
