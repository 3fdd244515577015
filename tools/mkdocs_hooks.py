"""Called by mkdocs: makes the site's generated pages, its navigation, and links that work there. See pipeline/manual."""

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.manual.links import SOURCE, Site, source_page, title_of
from pipeline.manual.pages import component_page, overview, uses
from pipeline.manual.sentences import errors_page, sentences

from components.metric_names import DEFINITIONS
from pipeline.app import draw
from pipeline.core.graph import build_graph
from pipeline.core.registry import BUILTIN
from pipeline.run.compose import list_choices, read_yaml

# Section → pages in their order; a page of docs/ that is not named here comes last, under "More".
SECTIONS = {
    "First steps": ["first-run", "concepts", "gallery", "reports"],
    "Methods": ["adding-a-method", "compare", "creditbench"],
    "Data and judging": ["data", "verifiers", "evaluation"],
    "Scaling up": ["engines", "sglang", "distributed", "megatron", "cluster", "scaling", "long-tail"],
    "Reference": ["metrics", "benchmarks", "troubleshooting", "errors"],
}
CSS = """\
.md-typeset table:not([class]) { font-size: .7rem; }
.md-typeset table:not([class]) th { min-width: 3rem; }
.md-typeset img { height: auto; }
.md-typeset code { overflow-wrap: anywhere; }
.md-typeset pre > code { overflow-wrap: normal; }
.md-typeset .error pre > code { padding-right: 2rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.md-typeset h1 { color: inherit; font-weight: 400; }
/* Contrast of 4.5 and more, which these lack in the theme. */
.md-tabs__link { opacity: 1; }
.md-tabs__item--active .md-tabs__link { text-decoration: underline; text-underline-offset: .3rem; }
[data-md-color-scheme=default] {
  --md-code-hl-comment-color: #636363; --md-code-hl-variable-color: #636363;
  --md-code-hl-operator-color: #636363; --md-code-hl-punctuation-color: #636363; --md-code-hl-generic-color: #636363;
}
[data-md-color-scheme=slate][data-md-color-primary] { --md-typeset-a-color: #8ab4ff; --md-code-hl-constant-color: #b3a8f0; }
"""


def graphs():
    """Name → checked graph."""
    return {name: build_graph(read_yaml(file)) for name, file in list_choices("graph", [ROOT / "configs"]).items()}


def on_files(files, config):
    drawn = graphs()
    pages = {f.src_uri: Path(f.abs_src_path).read_text(encoding="utf-8") for f in files if f.src_uri.endswith(".md")}
    papers = {p.partition("/")[2]: title_of(t) for p, t in pages.items() if p.startswith("papers/")}
    by_arxiv = {number: f"papers/{p}" for p in papers for number in _own_papers(pages[f"papers/{p}"])}
    site = Site(
        root=ROOT,
        components={name: f"components/{name}.md" for name in BUILTIN},
        graphs={draw.mermaid(graph).strip(): name for name, graph in drawn.items()},
        draw=lambda name: draw.svg(drawn[name]),
    )
    found, used = sentences(ROOT), uses(ROOT / "configs")
    made = {
        "errors.md": errors_page(found),
        "components/index.md": overview(BUILTIN),
        "papers/index.md": "# Papers\n\n"
        + "\n".join(f"- [{title}]({p})" for p, title in sorted(papers.items(), key=lambda x: x[1]))
        + "\n",
        **{
            f"components/{n}.md": component_page(n, t, used.get(n, {}), DEFINITIONS, found, by_arxiv)
            for n, t in BUILTIN.items()
        },
    }
    texts = {place: site.page(text, f"docs/{place}") for place, text in (pages | made).items()}
    texts["index.md"] = site.page((ROOT / "README.md").read_text(encoding="utf-8"), "README.md", "index.md")
    for file in sorted(site.sources):
        texts[f"{SOURCE}/{file}.md"] = _shown(file)
    worker = (ROOT / "tools" / "iframe-worker.js").read_text(encoding="utf-8")
    contents = texts | site.pictures | {"assets/site.css": CSS, "assets/iframe-worker.js": worker}
    kept = [f for f in files if f.src_uri not in contents]
    config["nav"] = navigation(pages.keys() | made.keys(), papers)
    return Files(kept + [File.generated(config, place, content=text) for place, text in contents.items()])


def on_post_page(output, page, config):
    """Names the search dialog, which the theme leaves nameless."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def navigation(places, papers):
    """mkdocs's nav: every page once."""
    stems = {p.removesuffix(".md") for p in places if "/" not in p and p != "index.md"}
    nav = [{"Overview": "index.md"}]
    for title, names in SECTIONS.items():
        entries = [f"{n}.md" for n in names if n in stems]
        if title == "Methods":
            entries.append({"Papers": ["papers/index.md", *(f"papers/{p}" for p in sorted(papers))]})
        nav.append({title: entries})
        if title == "Methods":
            nav.append({"Components": ["components/index.md", *_by_kind()]})
    more = sorted(stems - {n for names in SECTIONS.values() for n in names})
    return nav + ([{"More": [f"{n}.md" for n in more]}] if more else [])


def _by_kind():
    kinds = dict.fromkeys(name.partition(".")[0] for name in BUILTIN)
    return [{kind: [{n: f"components/{n}.md"} for n in BUILTIN if n.partition(".")[0] == kind]} for kind in kinds]


def _own_papers(text):
    """arXiv numbers in the first lines, where a page names its papers."""
    return re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", "\n".join(text.splitlines()[:5]))


def _shown(file):
    path = ROOT / file
    if path.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if p.name != "__pycache__")
        return source_page(file, "\n".join(names))
    return source_page(file, path.read_text(encoding="utf-8"))
