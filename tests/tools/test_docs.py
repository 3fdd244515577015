"""The documentation site builds without a warning and needs no network; pages quote what the code says; marked examples run."""

import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import is_quoted, sentences, template

from pipeline.core.registry import BUILTIN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TROUBLES = re.findall(r"^```error\n(.*?)\n```$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = {
    page.stem: re.findall(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for page in sorted(DOCS.glob("*.md"))
}
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs_gen_files") is None, reason="not installed here: pip install 'creditgraph[docs]'"
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
        command,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return folder


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_every_component_is_on_the_page_of_its_kind(site):
    for use in BUILTIN:
        page = (site / "components" / use.partition(".")[0] / "index.html").read_text()
        assert f"<code>{use}</code>" in page, use
    page = (site / "components" / "sampler" / "index.html").read_text()
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
    for part in ("max_attempts", "responses per prompt before it falls back", "prompts : Prompts"):
        assert part in text, part


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|iframe|source)[^>]* src="?([^" >]+)|<link[^>]* href="?([^" >]+)', page.read_text()
        )
        assert [a or b for a, b in loaded if (a or b).startswith(("http", "//"))] == [], page


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_graphs_are_pictures_and_every_page_is_in_the_menu(site):
    gallery = (site / "gallery" / "index.html").read_text()
    assert "flowchart" not in gallery
    assert "graphs/srpo.svg" in gallery
    front = (site / "index.html").read_text()
    assert 'src="images/srpo.svg"' in front
    menu = (ROOT / "tools" / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in menu, f"add {page.name} to the nav of tools/mkdocs.yml"


@pytest.mark.parametrize("quoted", TROUBLES)
def test_every_quoted_error_is_in_the_code(quoted):
    assert is_quoted(quoted, ROOT), (
        "docs/troubleshooting.md quotes what no code says; correct the quotation or its cure"
    )


def test_sentences_are_read_and_their_parts_vary():
    assert len(sentences(ROOT)) > 300
    assert any(text.startswith("run.device: expected auto, cpu, cuda or cuda:N, got '…'") for text in sentences(ROOT))
    assert not is_quoted("nobody says this …", ROOT)
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
