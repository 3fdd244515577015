"""The documentation site builds without a warning and needs no network; pages quote what the code says; marked examples run."""

import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pipeline.manual.links import Site, in_both_schemes, source_page
from pipeline.manual.pages import component_page, uses
from pipeline.manual.sentences import find, sentences, template

from pipeline.core.metric import Metric
from pipeline.core.registry import BUILTIN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLES = re.findall(r"^```error\n(.*?)\n```$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = {
    page.stem: re.findall(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for page in sorted(DOCS.glob("*.md"))
}
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="not installed here: pip install 'creditgraph[docs]'"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        "tools/mkdocs.yml",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return folder


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_every_component_has_a_page_that_says_what_its_class_says(site):
    for name in BUILTIN:
        assert (site / "components" / f"{name}.html").is_file(), name
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "components" / "sampler.failures.html").read_text()))
    for part in (
        "max_attempts",
        "fresh chains per prompt before it falls back",
        "fallback_share",
        "2605.25507",
        "toy_srpo",
        "wanted 'AxB'",
    ):
        assert part in text, part


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 100
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|iframe|source)[^>]* src="?([^" >]+)|<link[^>]* href="?([^" >]+)', page.read_text()
        )
        assert [a or b for a, b in loaded if (a or b).startswith(("http", "//"))] == [], page


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_graphs_are_pictures_and_every_page_is_reached(site):
    gallery = (site / "gallery.html").read_text()
    assert "flowchart" not in gallery
    for name in ("srpo", "treerl"):
        assert f"graphs/{name}.light.svg#only-light" in gallery
        assert "prefers-color-scheme" not in (site / "graphs" / f"{name}.dark.svg").read_text()
    front = (site / "index.html").read_text()
    assert 'src="images/srpo.svg"' in front
    for page in DOCS.glob("*.md"):
        section = front + "".join(
            (site / f"{p}.html").read_text()
            for p in ("first-run", "metrics", "adding-a-method", "engines", "verifiers")
        )
        assert f'href="{page.stem}.html"' in section, f"{page.name} is in no menu"


@pytest.mark.parametrize("quoted", TROUBLES)
def test_every_quoted_error_is_in_the_code(quoted):
    assert find(quoted, sentences(ROOT)), (
        "docs/troubleshooting.md quotes what no code says; correct the quotation or its cure"
    )


def test_sentences_are_found_and_their_parts_varied():
    found = sentences(ROOT)
    assert len(found) > 300
    one = next(s for s in found if s.text.startswith("run.device: found '…'; wanted auto"))
    assert (one.file, one.kind) == ("pipeline/run/run_settings.py", "ConfigError")
    assert find("nobody says this …", found) == []
    assert template(None) == "…"


def test_every_benchmark_has_a_section():
    text = (DOCS / "benchmarks.md").read_text()
    scripts = {p.name for p in (ROOT / "tools").glob("bench_*")} | {"compare", "creditbench", "cpi_lab"}
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) - {"Measured"} == scripts
    for name in scripts:
        assert f"](#{name})" in text
        assert f"```bash\ntools/{name}" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in EXAMPLES.items() if blocks])
def test_marked_examples_run(page, tmp_path):
    """Blocks below <!-- tested -->, in their order, in one folder."""
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for language, code in EXAMPLES[page]:
        run = {"bash": ["bash", "-euo", "pipefail", "-c", code], "python": [sys.executable, "-c", code]}[language]
        environment = os.environ | {"PATH": commands, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


def test_links_work_on_the_site():
    site = Site(
        ROOT,
        {"sampler.failures": "components/sampler.failures.md"},
        {"flowchart TD": "g"},
        lambda name: f"<svg>{name}</svg>",
    )

    def page(text, file="docs/papers/x.md"):
        return site.page(text, file)

    assert page("[a](../../README.md)") == "[a](../index.md)"
    assert page("[a](../metrics.md#executor)") == "[a](../metrics.md#executor)"
    assert page("[a](../../configs/graph/srpo.yaml)") == "[a](../source/configs/graph/srpo.yaml.md)"
    assert site.sources == {"configs/graph/srpo.yaml"}
    assert page("[a](docs/papers)", "README.md") == "[a](papers/index.md)"
    assert (
        page("[a](https://x.y/z) [b](#here) [c](../../nowhere.py)")
        == "[a](https://x.y/z) [b](#here) [c](../../nowhere.py)"
    )
    assert page("`sampler.failures`") == "[`sampler.failures`](../components/sampler.failures.md)"
    assert (
        page("# `sampler.failures`\n```\n`sampler.failures` [a](../../README.md)\n```")
        == "# `sampler.failures`\n```\n`sampler.failures` [a](../../README.md)\n```"
    )
    drawn = page("```mermaid\nflowchart TD\n```")
    assert drawn.split() == [
        "![The",
        "graph",
        "g](../graphs/g.light.svg#only-light)",
        "![The",
        "graph",
        "g](../graphs/g.dark.svg#only-dark)",
    ]
    assert page("```mermaid\nsequenceDiagram\n```") == "```mermaid\nsequenceDiagram\n```"
    assert page('<img src="../images/a.svg" alt="">') == '<img src="../images/a.svg" alt="">'


def test_a_picture_in_both_schemes():
    light, dark = in_both_schemes(
        "<style>a {b} @media (prefers-color-scheme: dark) { .x { fill: 1; } .y { fill: 2; } }</style>"
    )
    assert light == "<style>a {b} </style>"
    assert dark == "<style>a {b}  .x { fill: 1; } .y { fill: 2; } </style>"
    assert in_both_schemes("<svg/>") == ("<svg/>", "<svg/>")


def test_a_source_page_holds_any_file():
    assert "`````markdown\n````\n````\n`````" in source_page("a.md", "````\n````\n")


def test_recipes_that_replace_a_node_use_the_other_component():
    found = uses(ROOT / "configs")
    assert "toy_srpo_oracle" in found["localizer.oracle"]["recipe"]
    assert "toy_srpo_oracle" not in found["localizer.self"]["recipe"]
    assert "toy_srpo" in found["localizer.self"]["recipe"]


def test_a_component_page_survives_pipes_and_brackets():
    metrics = {"rewards.overlong": (Metric("x", "1", "|a| [b] <c>"),)}
    text = component_page(
        "rewards.overlong", BUILTIN["rewards.overlong"], {}, metrics, [], {"2503.14476": "papers/dapo.md"}
    )
    assert r"| `x` | 1 | \|a\| \[b\] \<c\> |" in text
    assert "([page](../papers/dapo.md))" in text
    assert "No shipped graph" in text
