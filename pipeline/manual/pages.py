"""A Markdown page per component, made of its class: sockets, settings, metrics, errors, source, and the recipes that use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.catalog import Entry, describe
from pipeline.compose import list_choices, read_yaml
from pipeline.manual.sentences import Sentence, escaped
from pipeline.metric_names import Definitions

KINDS = {
    "prompts": "Where problems come from.",
    "engine": "What holds the policy and samples from it.",
    "sampler": "Which responses are sampled per problem.",
    "verifier": "What judges an answer.",
    "rewards": "What a verdict is worth.",
    "segmenter": "Where a response is cut.",
    "value": "What a prefix is worth.",
    "localizer": "Where a wrong response went wrong.",
    "expander": "What is sampled from the middle of a response.",
    "reviser": "How a wrong response is repaired.",
    "buffer": "What is trained on together.",
    "advantage": "How much credit each token gets.",
    "learner": "What changes the weights.",
    "evaluator": "What is measured beside training.",
}


def uses(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Component → {"graph" or "recipe": names of the shipped files whose nodes use it}; a recipe may replace a node of its graph."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    graphs = {name: _nodes(read_yaml(file)) for name, file in list_choices("graph", [folder]).items()}
    for name, nodes in graphs.items():
        for use in set(nodes.values()):
            found[use]["graph"].append(name)
    for name, file in list_choices("recipe", [folder]).items():
        values = read_yaml(file)
        nodes = graphs.get(_chosen_graph(values), {}) | _nodes(values)
        for use in set(nodes.values()):
            found[use]["recipe"].append(name)
    return found


def _nodes(values: Mapping[str, Any]) -> dict[str, str]:
    """Node → component, in both places a file may say so: below `nodes` and in a section of the node's name."""
    sections = {**values, **(values.get("nodes") or {})}
    return {name: str(v["use"]) for name, v in sections.items() if isinstance(v, dict) and "use" in v}


def _chosen_graph(values: Mapping[str, Any]) -> str:
    for item in values.get("defaults") or []:
        if isinstance(item, dict):
            for key, choice in item.items():
                if str(key).split()[-1] == "/graph":
                    return str(choice)
    return ""


def component_page(
    use: str, target: str, used_by: Mapping[str, list[str]], metrics: Definitions, errors: Iterable[Sentence], papers: Mapping[str, str]
) -> str:
    """The page of one component; links are as of a file docs/components/NAME.md.

    Args:
        use: registered name.
        target: "module:Class".
        used_by: of `uses`.
        metrics: definitions per component.
        errors: all sentences.
        papers: arXiv id → page below docs/.
    """
    entry, file = describe(target), target.partition(":")[0].replace(".", "/") + ".py"
    parts = [f"# {use}", _inline(entry.summary)]
    rest = entry.doc.partition("\n")[2].strip("\n")
    if rest:
        parts.append(_prose(rest))
    parts.append(f"Class `{target}` in [{file}](../../{file}); {_placement(entry)}")
    if entry.paper:
        parts.append(f"**Source:** {_source(entry.paper, papers)}.")
    parts += ["## Takes", _sockets(entry.takes), "## Makes", _sockets(entry.makes), "## Settings", _settings(entry)]
    if metrics.get(use):
        rows = [f"| `{m.name}` | {m.unit} | {escaped(m.text)} |" for m in metrics[use]]
        parts += ["## Metrics", "\n".join(["| node/… | unit | definition |", "|---|---|---|", *rows])]
    own = [s for s in errors if s.file == file]
    if own:
        parts += ["## Errors", "… stands for what varies.", "\n".join(f"- {escaped(' '.join(s.text.split()))}" for s in own)]
    parts += ["## Used by", _used(used_by)]
    return "\n\n".join(parts) + "\n"


def overview(names: Mapping[str, str]) -> str:
    """The list of all components, by kind."""
    parts = ["# Components\n\nEvery page below is made of its class: what it takes and makes, settings, metrics, errors, source, recipes."]
    kinds = list(dict.fromkeys(name.partition(".")[0] for name in names))
    for kind in kinds:
        rows = [f"- [{n}]({n}.md): {_inline(describe(t).summary)}" for n, t in names.items() if n.partition(".")[0] == kind]
        parts.append(f"## {kind}\n\n{KINDS.get(kind, '')}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _placement(entry: Entry) -> str:
    return "runs on all ranks together." if entry.placement == "collective" else "runs once per data-parallel replica."


def _source(paper: str, papers: Mapping[str, str]) -> str:
    parts = []
    for one in (p.strip() for p in paper.split(",")):
        link = f"[{one}](https://arxiv.org/abs/{one})" if one[:4].isdigit() else one
        parts.append(f"{link} ([page](../{papers[one]}))" if one in papers else link)
    return ", ".join(parts)


def _sockets(sockets: Mapping[str, str]) -> str:
    if not sockets:
        return "Nothing."
    return "\n".join(["| socket | type |", "|---|---|", *(f"| `{name}` | {escaped(text)} |" for name, text in sockets.items())])


def _settings(entry: Entry) -> str:
    if not entry.settings:
        return "None."
    rows = [
        f"| `{s.name}` | {_code(s.type)} | {_code(s.default)} | {_inline(' '.join(s.doc.split()), table=True)} |" for s in entry.settings
    ]
    return "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows])


def _code(text: str) -> str:
    return f"`{text.replace('|', 'or')}`" if text else "required"


def _used(used_by: Mapping[str, list[str]]) -> str:
    if not used_by:
        return "No shipped graph; name it with `NODE.use=…`."
    lines = []
    for group, title in (("graph", "Graphs"), ("recipe", "Recipes")):
        if used_by.get(group):
            lines.append(f"- {title}: " + ", ".join(f"[{n}](../../configs/{group}/{n}.yaml)" for n in sorted(used_by[group])))
    return "\n".join(lines)


def _prose(text: str) -> str:
    """The rest of a docstring: "Name:" parts become lists, indented lines code, the rest paragraphs."""
    out: list[str] = []
    for block in text.split("\n\n"):
        lines = block.strip("\n").split("\n")
        head = lines[0].strip()
        if head in ("Args:", "Attributes:", "Raises:"):
            out.append(f"{head}\n\n" + "\n".join(_items(lines[1:])))
        elif all(line.startswith("    ") for line in lines):
            out.append("\n".join(lines))
        else:
            out.append(" ".join(_inline(line.strip()) for line in lines))
    return "\n\n".join(out)


def _items(lines: list[str]) -> list[str]:
    depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    items: list[str] = []
    for line in lines:
        if len(line) - len(line.lstrip()) > depth and items:
            items[-1] += " " + _inline(line.strip())
        else:
            items.append("- " + _inline(line.strip()))
    return items


def _inline(text: str, table: bool = False) -> str:
    """Prose with `code` kept as code."""
    return "`".join((part.replace("|", "\\|") if table else part) if i % 2 else escaped(part) for i, part in enumerate(text.split("`")))
