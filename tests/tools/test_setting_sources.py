"""Where settings come from: every value of a shipped file is labelled, and pages of papers say what the files say."""

import re
from pathlib import Path

import pytest
import yaml
from setting_sources import LABELS, OURS, page_of, parse_comment, read_values, table

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
PAPERS = ROOT / "docs" / "papers"

# Toy recipes are ours as a whole: no paper has the embedded task. What they take from a paper is labelled.
LABELLED = [
    file
    for folder in ("graph", "setup", "recipe")
    for file in sorted((CONFIGS / folder).glob("*.yaml"))
    if not file.stem.startswith("toy")
]
WITH_TABLE = sorted(page.stem for page in PAPERS.glob("*.md") if "<!-- sources -->" in page.read_text())
NOT_READ = ("grpo_lambda", "ibpo", "rredcot", "trace")
FILES_OF_METHODS = [*CONFIGS.rglob("*.yaml"), *PAPERS.glob("*.md"), ROOT / "docs" / "recipes.md"]


def rows_of(page: str) -> list[tuple[str, str, str]]:
    """(file, setting: value, source) of a page's table, read from its text alone."""
    block = (PAPERS / f"{page}.md").read_text().partition("<!-- sources -->\n")[2].partition("<!-- /sources -->")[0]
    cells = [line.strip("| ").split(" | ") for line in block.splitlines()[2:]]
    return [(row[0].strip("`"), pair, row[2]) for row in cells for pair in re.findall(r"`([^`]*)`", row[1])]


@pytest.mark.parametrize("file", LABELLED, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_value_says_where_it_comes_from(file):
    unlabelled = [f"line {v.line}: {v.setting}" for v in read_values(file) if v.source is None]
    assert unlabelled == [], f"{file.name}: add one of {LABELS} to the comments beside them"


def test_every_recipe_of_a_paper_has_a_page_with_a_table():
    pages = {page_of(file) for file in LABELLED if file.parent.name == "recipe"}
    assert pages <= set(WITH_TABLE)


@pytest.mark.parametrize("page", WITH_TABLE)
def test_pages_and_comments_agree(page):
    rows = rows_of(page)
    assert rows, "no row: tools/update_docs writes the table"
    for name, pair, source in rows:
        values = {f"{v.setting}: {v.text}": v.source for v in read_values(CONFIGS / name)}
        assert values[pair].source == source, (name, pair)
        assert source.startswith(LABELS)
        assert not source.startswith(OURS)


def test_no_claim_of_a_file_is_missing_on_the_pages():
    on_pages = {(name, pair) for page in WITH_TABLE for name, pair, _ in rows_of(page)}
    for file in LABELLED:
        for value in read_values(file):
            if value.source.label != OURS:
                assert (f"{file.parent.name}/{file.name}", f"{value.setting}: {value.text}") in on_pages


@pytest.mark.parametrize("page", NOT_READ)
def test_pages_of_papers_that_were_not_read_say_so_first(page):
    top = (PAPERS / f"{page}.md").read_text().partition("## What the paper claims")[0]
    assert "**The paper's body was not available to us.**" in top
    assert "our reading" in top
    labels = {source for _, _, source in rows_of(page) if source.startswith("from the paper's text")}
    assert labels <= {source for source in labels if "abstract" in source or "2604.20659" in source}
    assert not any(source.startswith("from the authors' release") for _, _, source in rows_of(page))


@pytest.mark.parametrize("page", NOT_READ)
def test_second_hand_facts_stand_with_their_conflicts(page):
    text = (PAPERS / f"{page}.md").read_text()
    expected = {
        "grpo_lambda": (
            "as a floor of the weights",
            "KL to the reference, a supervised warm start, completions of 256",
        ),
        "ibpo": ("the abstract has no figure", "in conflict"),
        "rredcot": ("the abstract has none of these figures",),
        "trace": ("avg@16",),
    }
    for words in expected[page]:
        assert words in text


@pytest.mark.parametrize("file", FILES_OF_METHODS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_nothing_is_called_published(file):
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?i)\bpublished\b", text), f"{file.name}: say where it was read, one of {LABELS}"


@pytest.mark.parametrize("file", sorted((CONFIGS / "suite").glob("*.yaml")), ids=lambda file: file.stem)
def test_settings_of_a_suite_have_a_label(file):
    suite = yaml.safe_load(file.read_text())
    tasks = [task for task in suite["tasks"].values() if task]
    for origin in (part.get("origin", {}) for part in (suite["defaults"], *tasks)):
        assert all(source.startswith(LABELS) for source in origin.values()), origin


# --- the form of comments ---


def write(tmp_path, text):
    (tmp_path / "setup").mkdir(exist_ok=True)
    file = tmp_path / "setup" / "mine.yaml"
    file.write_text(text)
    return {v.setting: v.source.source if v.source else None for v in read_values(file)}


def test_labels_of_lines_blocks_and_names(tmp_path):
    text = """# Mine.
defaults: [/graph: grpo, override /model: tiny]   # from the authors' release
sampler: {group_size: 8, top_p: 1.0}  # from the paper's text: top_p; second-hand (a port; a review): group_size
learner:              # ours
  epochs: 2
  # our reading (a reason): kl
  objective: {kl: {coefficient: 0.1}, aggregate: constant}
  minibatches: 4      # from the paper's text
evaluator: {every: 3, mode: "${sampler.mode}"}   # prose about it
"""
    assert write(tmp_path, text) == {
        "model": "from the authors' release",
        "sampler.group_size": "second-hand (a port; a review)",
        "sampler.top_p": "from the paper's text",
        "learner.epochs": "ours",
        "learner.objective.kl.coefficient": "our reading (a reason)",
        "learner.objective.aggregate": "ours",
        "learner.minibatches": "from the paper's text",
        "evaluator.every": None,
    }


def test_a_file_may_call_the_rest_ours(tmp_path):
    text = "# Mine.\n# Unless a line says otherwise: ours.\nrun: {iterations: 3}\nprompts: {batch: 2}   # our reading\n"
    assert write(tmp_path, text) == {"run.iterations": "ours", "prompts.batch": "our reading"}


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("second-hand", "'second-hand' needs its source"),
        ("ours: batch; from somewhere: size", "found 'from somewhere: size'"),
        ("ours, to save memory", "found 'ours, to save memory'"),
        ("our reading: batches", "'our reading: batches' is for no value"),
    ],
)
def test_comments_that_say_nothing_are_refused(tmp_path, comment, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        write(tmp_path, f"prompts: {{batch: 2, size: 3}}   # {comment}\n")


def test_prose_is_no_label():
    assert parse_comment("20 rollout batches; ours: batch", "here") == []


def test_another_label_in_a_file_changes_the_page(tmp_path):
    copy = tmp_path / "configs"
    for folder in ("graph", "setup", "recipe"):
        (copy / folder).mkdir(parents=True)
        for file in (CONFIGS / folder).glob("*.yaml"):
            (copy / folder / file.name).write_text(file.read_text())
    graph = copy / "graph" / "gspo.yaml"
    assert table("gspo", copy) == table("gspo", CONFIGS)
    graph.write_text(graph.read_text().replace("# from the paper's text", "# our reading"))
    assert table("gspo", copy) != table("gspo", CONFIGS)
