"""Run by mkdocs-gen-files: the site's front page, a reference page per kind of component, and links that work there."""

import re
import sys
from pathlib import Path

import mkdocs_gen_files

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from metric_tables import metric_table

from creditgraph.pipeline.app.drawing import draw
from creditgraph.pipeline.core.graph import build_graph
from creditgraph.pipeline.core.registry import BUILTIN, load_class
from creditgraph.pipeline.run.compose.choices import list_choices, read_yaml

GRAPHS = {name: build_graph(read_yaml(f)) for name, f in list_choices("graph", [ROOT / "configs"]).items()}
PICTURES = {draw.mermaid(graph).strip(): name for name, graph in GRAPHS.items()}


def for_site(text: str, page: str) -> str:
    """A page's text with graphs as pictures and without links to files that the site does not have."""
    up = "../" * page.count("/")

    def picture(match: re.Match[str]) -> str:
        name = PICTURES.get(match[1].strip())
        return f"![The graph {name}]({up}graphs/{name}.svg)" if name else match[0]

    def link(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / page).parent.joinpath(match[2].partition("#")[0]).resolve()
        return match[0] if target.is_relative_to(ROOT / "docs") and target.exists() else match[1]

    text = re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)", link, text)
    return re.sub(r"```mermaid\n(.*?)```", picture, text, flags=re.DOTALL)


for name, graph in GRAPHS.items():
    with mkdocs_gen_files.open(f"graphs/{name}.svg", "w") as file:
        file.write(draw.svg(graph))
pages = {p.relative_to(ROOT / "docs").as_posix(): p.read_text() for p in (ROOT / "docs").rglob("*.md")}
readme = (ROOT / "README.md").read_text()
pages["index.md"] = re.sub(r"(\]\(|src=\")docs/", r"\1", readme)
for page, text in pages.items():
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(for_site(text, page))
for kind in dict.fromkeys(name.partition(".")[0] for name in BUILTIN):
    with mkdocs_gen_files.open(f"components/{kind}.md", "w") as file:
        file.write(f"# {kind.capitalize()}\n")
        for use, target in BUILTIN.items():
            if use.startswith(f"{kind}."):
                file.write(f"\n## `{use}`\n\n::: {target.replace(':', '.')}\n")
                if metrics := load_class(use).metrics:
                    file.write(f"\n{metric_table('node/…', metrics)}\n")
