"""The notebooks of the docs run, and what they show is what is kept with them."""

import importlib.util
import json
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
ROOT = Path(__file__).parents[2]
LOADER = SourceFileLoader("notebooks_tool", str(ROOT / "tools" / "notebooks"))
TOOL = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(TOOL)
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def words_and_numbers(shown: list[Any]) -> tuple[str, list[float]]:
    """Outputs without their decimals and colours, and the decimals, whose last digit is the processor's."""
    text = re.sub(r"#[0-9a-f]{6}", "#", json.dumps(shown, sort_keys=True))
    decimal = r"[-+]?\d+\.\d+|[-+]\d+\b"
    return re.sub(decimal, "±", text), [float(x) for x in re.findall(decimal, text)]


def test_there_are_two() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["a-method-of-your-own", "see-credit"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_running_it_gives_the_outputs_that_are_kept(file: Path) -> None:
    kept = nbformat.read(file, 4)
    nbformat.validate(kept)
    shown = TOOL.stable_outputs(kept)
    assert any(outputs for _, outputs in shown)
    words, numbers = words_and_numbers(TOOL.stable_outputs(TOOL.executed(kept)))
    expected_words, expected = words_and_numbers(shown)
    assert words == expected_words
    assert numbers == pytest.approx(expected, rel=0.02, abs=0.02)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_nothing_of_the_machine_that_ran_it_is_kept(file: Path) -> None:
    text = file.read_text()
    assert "site-packages" not in text
    assert "/tmp" not in text
    assert str(Path.home()) + "/" not in text
    assert len(text) < 300_000
