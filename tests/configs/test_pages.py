"""Pages of papers: the sections a reader looks for, pictures that are current, and recipes and tests that exist."""

import re
from pathlib import Path

import pytest

from creditgraph.pipeline.app.drawing.draw import mermaid
from creditgraph.pipeline.core.graph import build_graph
from creditgraph.pipeline.run.compose.choices import CONFIG_DIR, list_choices, read_yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = {p.stem: p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs" / "papers").glob("*.md"))}
RATIO_PAGES = ("dapo", "drgrpo", "entropy_8020", "grpo", "grpo_lambda", "gspo", "srpo", "trace")
GRAPH_PAGES = [name for name, text in PAGES.items() if "```mermaid" in text]


@pytest.fixture(scope="module")
def pictures():
    return {mermaid(build_graph(read_yaml(file))).strip() for file in list_choices("graph", [CONFIG_DIR]).values()}


@pytest.mark.parametrize("page", GRAPH_PAGES)
def test_picture_is_that_of_a_shipped_graph(page, pictures):
    result = re.findall(r"^```mermaid\n(.*?)^```$", PAGES[page], re.M | re.S)
    assert all(picture.strip() in pictures for picture in result), (
        f"draw docs/papers/{page}.md with creditgraph graph graph=NAME"
    )


@pytest.mark.parametrize("page", RATIO_PAGES)
def test_sections(page):
    result = re.findall(r"^## (.*)$", PAGES[page], re.M)
    assert result == [
        "What the paper claims",
        "The graph",
        "What we read into it",
        "Our test of it",
        "Measured",
        "Settings",
    ]
    assert re.search(r"arxiv.org/abs/\d{4}\.\d{5}", PAGES[page])


@pytest.mark.parametrize("page", RATIO_PAGES)
def test_named_files_and_recipes_exist(page):
    for path in re.findall(r"`((?:tests|tools|components)/[\w/.]+)", PAGES[page]):
        assert (ROOT / path).exists(), path
    recipes = list_choices("recipe", [CONFIG_DIR])
    for name in re.findall(r"`(toy_\w+|\w+_(?:qwen|deepseek|olmo)\w+)`", PAGES[page]):
        assert name in recipes or any(r.endswith(name) for r in recipes), name


def test_two_names_that_other_papers_have_too_come_with_their_paper():
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    named = [file for file in files if re.search(r"\b(RRPO|SRPO)\b", file.read_text(encoding="utf-8"))]
    assert [f.name for f in named if "2605.25507" not in f.read_text(encoding="utf-8")] == []


def test_what_a_recipe_or_graph_is_of_comes_with_its_paper():
    shipped = [*list_choices("graph", [CONFIG_DIR]).values(), *list_choices("recipe", [CONFIG_DIR]).values()]
    comments = {file.stem: file.read_text(encoding="utf-8").splitlines()[1] for file in shipped}
    lacking = [name for name, text in comments.items() if not re.search(r"\b\d{4}\.\d{5}\b", text)]
    assert lacking == []
