"""Markdown written for the repository's host, made fit for the site: links, graphs and component names.

Pages link to each other, to README.md and to source files by relative paths, which a repository's host follows. On the site, files
outside docs/ become pages of their own below source/, so that every link works there too, without a network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SOURCE = "source"
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".md": "markdown",
    ".sh": "bash",
    ".txt": "text",
    ".jinja": "jinja",
}
_LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)\s]+)((?:\s+\"[^\"]*\")?\))")
_HTML_IMAGE = re.compile(r'<img src="([^"]+\.svg)"')
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$|^~~~.*?^~~~$)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"(?<!\[)`([a-z]+\.[a-z_]+)`(?!\])")
_DARK = "@media (prefers-color-scheme: dark) {"


@dataclass
class Site:
    """What the pages of a site are made of.

    Attributes:
        root: of the repository; pages are in docs/ below it.
        components: name → page below docs/.
        graphs: mermaid text → name of the graph.
        sources: files outside docs/ that a page links to; filled while pages are made.
        pictures: site path → SVG; filled while pages are made.
        draw: graph name → SVG.
    """

    root: Path
    components: Mapping[str, str]
    graphs: Mapping[str, str]
    draw: Callable[[str], str]
    sources: set[str] = field(default_factory=set)
    pictures: dict[str, str] = field(default_factory=dict)

    def page(self, text: str, file: str, place: str | None = None) -> str:
        """The Markdown of a page.

        Args:
            text: as it is in the repository.
            file: where it stands there, such as "docs/papers/srpo.md" or "README.md".
            place: the page's path on the site, as its Markdown file below docs/; by default where `file` is.
        """
        place = place or file.removeprefix("docs/")
        text = text.replace("\n```error\n", "\n``` {.text .error}\n")  # long lines, which the site folds
        parts = _CODE.split(_MERMAID.sub(lambda m: self._graph(m, place), text))
        return "".join(part if part.startswith(("```", "~~~")) else self._prose(part, file, place) for part in parts)

    def _prose(self, text: str, file: str, place: str) -> str:
        text = _LINK.sub(lambda m: m[1] + self._target(m[2], file, place) + m[3], text)
        text = _HTML_IMAGE.sub(lambda m: self._html_image(m, file, place), text)
        lines = (line if line.startswith("#") else _NAME.sub(lambda m: self._component(m, place), line) for line in text.split("\n"))
        return "\n".join(lines)

    def _target(self, target: str, file: str, place: str) -> str:
        path, _, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return target
        found = os.path.normpath(PurePosixPath(file).parent / path)
        end = f"#{anchor}" if anchor else ""
        if found == "README.md":
            return _relative("index.md", place) + end
        if found.startswith("docs/"):
            inside = found.removeprefix("docs/")
            if (self.root / found).is_dir():
                inside += "/index.md"
            return _relative(inside, place) + end
        if not (self.root / found).exists():
            return target  # left as it is, so that the strict build tells
        self.sources.add(found)
        return _relative(f"{SOURCE}/{found}.md", place)

    def _html_image(self, match: re.Match[str], file: str, place: str) -> str:
        found = os.path.normpath(PurePosixPath(file).parent / match[1])
        return f'<img src="{_relative(found.removeprefix("docs/"), place)}"'

    def _graph(self, match: re.Match[str], place: str) -> str:
        """A drawn picture in the place of a graph's mermaid text, in both colour schemes; other mermaid text stays."""
        name = self.graphs.get(match[1].strip())
        if name is None:
            return match[0]
        light, dark = in_both_schemes(self.draw(name))
        self.pictures[f"graphs/{name}.light.svg"], self.pictures[f"graphs/{name}.dark.svg"] = light, dark
        alt = f"The graph {name}"
        return "\n".join(f"![{alt}]({_relative(f'graphs/{name}.{s}.svg', place)}#only-{s})" for s in ("light", "dark"))

    def _component(self, match: re.Match[str], place: str) -> str:
        page = self.components.get(match[1])
        return match[0] if page is None or page == place else f"[`{match[1]}`]({_relative(page, place)})"


def in_both_schemes(svg: str) -> tuple[str, str]:
    """An SVG that follows the system's colour scheme as one that is always light and one that is always dark."""
    begin = svg.find(_DARK)
    if begin < 0:
        return svg, svg
    depth, end = 1, begin + len(_DARK)
    while depth:
        depth += {"{": 1, "}": -1}.get(svg[end], 0)
        end += 1
    return svg[:begin] + svg[end:], svg[:begin] + svg[begin + len(_DARK) : end - 1] + svg[end:]


def source_page(file: str, text: str) -> str:
    """A page that shows a file; the site's search leaves it out."""
    fence = "`" * max(4, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    language = LANGUAGES.get(PurePosixPath(file).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {file}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def title_of(text: str) -> str:
    """A page's first heading.

    >>> title_of("x\\n# The title\\n")
    'The title'
    """
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found[1] if found else "Untitled"


def _relative(target: str, place: str) -> str:
    return os.path.relpath(target, PurePosixPath(place).parent)
