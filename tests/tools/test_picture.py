"""tools/picture: a part of a page as a picture of twice the page's pixels."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PAGE = (
    '<!doctype html><html data-ready="true"><body style="margin: 0">'
    '<p>above</p><div id="box" style="height: 50px; background: #0b5cc4"></div></body></html>'
)


@pytest.fixture
def page(tmp_path):
    pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        pytest.skip("no Chromium: apt-get install -y chromium")
    file = tmp_path / "page.html"
    file.write_text(PAGE, encoding="utf-8")
    return file


def run(*arguments):
    command = [str(ROOT / "tools" / "picture"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_part_of_a_page(page, tmp_path):
    target = tmp_path / "box.png"
    assert run(page, "#box", target, "--width", 300).returncode == 0
    picture = Image.open(target).convert("RGB")
    assert picture.size == (600, 100)
    assert picture.getpixel((300, 50)) == (0x0B, 0x5C, 0xC4)


def test_mistakes(page, tmp_path):
    assert "'#bix' names 0 parts of the page; expected one" in run(page, "#bix", tmp_path / "x.png").stderr
    assert "no such file; expected a page" in run(tmp_path / "none.html", "#box", tmp_path / "x.png").stderr
    assert not (tmp_path / "x.png").exists()
