"""docs/architecture.md names files, classes and folders that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("\n## Concepts")[0]
CODE = re.findall(r"`([^`\n]+)`", PAGE)
PATHS = sorted({code for code in CODE if re.fullmatch(r"[\w./]+/[\w./-]+|\w+\.(py|toml)", code)})


def test_the_page_has_its_four_walks_and_the_table():
    assert PAGE.count("\n### ") == 4
    for change in ("advantage", "objective", "engine", "verifier", "data set", "model family", "metric"):
        assert f"\n| {change}" in PAGE
    for change in ("report panel", "SLURM field", "checkpoint format"):
        assert f"\n| {change}" in PAGE


@pytest.mark.parametrize("name", PATHS)
def test_files_and_folders_exist(name):
    if "/" not in name:  # of pipeline/core or the root, in the section on layers
        assert any((ROOT / folder / name).is_file() for folder in ("", "pipeline/core", "pipeline/run"))
    elif "NAME" in name:
        existing = ROOT / name[: name.index("NAME")]
        assert existing.is_dir()
        assert any(existing.iterdir())
    else:
        assert (ROOT / name).exists()


def test_classes_and_functions_are_defined():
    sources = [
        p.read_text(encoding="utf-8") for folder in ("pipeline", "components") for p in (ROOT / folder).rglob("*.py")
    ]
    names = {part for code in CODE if re.fullmatch(r"[A-Z]+[a-z][A-Za-z]*(\.\w+)?", code) for part in code.split(".")}
    assert {"LocalPolicy", "RolloutTraining", "OptimizerSettings"} <= names
    for name in names - {"Config", "NAME"}:
        pattern = re.compile(rf"^\s*(?:class|def) {name}\b|^{name} = ", re.M)
        assert any(pattern.search(source) for source in sources), name


def test_every_folder_of_components_is_in_the_picture():
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text(encoding="utf-8")
    assert "(images/architecture.svg)" in PAGE
    for folder in (ROOT / "components").iterdir():
        if (folder / "__init__.py").exists():
            assert f">{folder.name}<" in picture, folder.name
