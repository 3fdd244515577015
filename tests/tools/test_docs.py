"""The documentation site builds without a warning and loads nothing from a network; what pages name and quote exists.

Blocks that are marked <!-- tested --> run.
"""

import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import run_bash, working_in
from sentences import is_quoted, sentences, template

from creditgraph.pipeline.app.cli import all_commands, main
from creditgraph.pipeline.core.registry import BUILTIN
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALL_COMMANDS = all_commands()
TROUBLES = re.findall(r"^```error\n(.*?)\n```$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = {
    page.stem: re.findall(r"^<!-- tested -->\n```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for page in sorted(DOCS.glob("*.md"))
}
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md"))}
# Names with a star stand for several files. What a page has its reader write is no file of the repository.
NAMED_PATH = re.compile(r"(?<![\w./-])(?:pipeline|components|configs|docs|slurm|tests|tools)/[\w./-]*\w(?![\w*])")
MODULE = re.compile(r"(?<![\w/.*-])(?:[ab]/)?([\w/]+\.(?:py|js))\b")
OF_THE_READER = re.compile(r"audit_|pass_at_k|turn_rloo|sapo|mine|ideas\.py|sums|quiz\.py|path/to/file\.py|NAME")
CODE = re.compile(r"```.*?```|`[^`\n]+`|^    .*$", re.MULTILINE | re.DOTALL)
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
    paper = (site / "papers" / "srpo" / "index.html").read_text()
    assert "flowchart" not in paper
    assert "graphs/srpo.svg" in paper
    front = (site / "index.html").read_text()
    assert 'src="images/credit.png"' in front
    menu = (ROOT / "tools" / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.relative_to(DOCS).as_posix() in menu, f"add {page.name} to the nav of tools/mkdocs.yml"


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Every file of the repository, and each end of its path: "memory.py", "cluster/memory.py", …"""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    parts = [name.split("/") for name in names]
    return {"/".join(part[start:]) for part in parts for start in range(len(part))}


@pytest.mark.parametrize("page", PAGES)
def test_every_named_file_exists(page, files):
    paths = {path for path in NAMED_PATH.findall(PAGES[page]) if not (ROOT / path).exists()}
    modules = set(MODULE.findall(PAGES[page])) - files
    assert {path for path in paths | modules if not OF_THE_READER.search(path)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_named_command_and_choice_exists(page):
    code = "\n".join(CODE.findall(PAGES[page]))
    assert set(re.findall(r"(?<![\w./-])creditgraph ([a-z]+)(?= |$|`)", code)) - {"import", "as"} <= set(ALL_COMMANDS)
    for group in ("cluster", "engine", "graph", "learner", "recipe", "setup", "suite"):
        lists = re.findall(rf"(?<![\w.-]){group}=([a-z][\w,]+)", code)
        names = {name for names in lists for name in names.split(",") if not OF_THE_READER.search(name)}
        assert names <= set(list_choices(group, [CONFIG_DIR])), group


def test_the_reference_lists_every_command():
    table = PAGES["docs/reference.md"].partition("## Commands")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `creditgraph (\w+)", table, re.MULTILINE)) == set(ALL_COMMANDS)


def test_the_readme_is_short():
    assert len(PAGES["README.md"].encode()) <= 12_000


def test_the_readme_component_follows_the_contract(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ideas", raising=False)  # of another test in this process, as is its folder
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "ideas.py").exists()])
    (code,) = re.findall(r"^```python\n# my_package/ideas.py\n(.*?)^```$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    (tmp_path / "ideas.py").write_text(code)
    with working_in(tmp_path):
        assert main(["check", "ideas:SignCredit"]) == 0


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
    text = PAGES["docs/reference.md"].partition("\n## Benchmarks\n")[2]
    tools = {p.name for p in (ROOT / "tools").glob("bench_*")}
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) - {"Measured"} == tools
    for name in tools:
        assert f"](#{name})" in text
        assert f"```bash\ntools/{name}" in text


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in EXAMPLES.items() if blocks])
def test_marked_examples_run(page, tmp_path):
    """Blocks below <!-- tested -->, in their order, in one folder."""
    with working_in(tmp_path):
        for language, code in EXAMPLES[page]:
            run_bash(code) if language == "bash" else subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_verifiers_lists_each():
    table = PAGES["docs/data.md"].partition("\n## Verifiers")[2].partition("\n### ")[0]
    listed = re.findall(r"^\| `(verifier\.\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(use for use in BUILTIN if use.startswith("verifier."))
