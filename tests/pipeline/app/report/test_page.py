"""The page as text: self-contained, hostile text inert, nothing lost on the way to the blob."""

import base64
import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.report.pack import pack, unpack
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.app.text import visible

EVIL = [
    "<script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "\u202eevil\u202c\u2066\u200f",
    "\x1b[31mred\x1b[0m\x07",
    "</script><svg onload=window.pwned=1>",
    "{{7*7}}{% raw %}",
    "\ud800lone",
    "x" * 100_000,
    "tab\there\nline\r\x00nul",
]
EVIL_NAMES = ["<script>window.pwned=1</script>", "\u202eevil", "\x1b[31mred"]


def blob(html: str, name: str):
    return unpack(re.search(f'id="{name}">([^<]*)<', html).group(1))


def evil_run(make_run, texts):
    """Hostile reasons, metric names, settings and rejected rows."""
    run = make_run(details=texts[:3])
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    config["recipe"] = texts[0]
    config["data"]["train"]["source"] = "".join(t[:200] for t in texts if t.isprintable())
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    row = {"iteration": 0, **dict.fromkeys(EVIL_NAMES, 1.0)}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (run / "rejected.jsonl").write_text(
        "".join(json.dumps({"iteration": 0, "reason": t}) + "\n" for t in texts), encoding="utf-8"
    )
    return run


@pytest.mark.slow
def test_only_its_own_scripts_and_nothing_from_a_network(make_run):
    html = report_html([read_run(make_run())])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html).group(1).replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    for text in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    markup = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#)', markup)
    assert "url(http" not in markup


@pytest.mark.parametrize("part", range(0, len(EVIL), 3))
def test_hostile_text_never_becomes_markup_or_control(make_run, part):
    html = report_html([read_run(evil_run(make_run, EVIL[part : part + 3]))])
    assert len(html) < 2_500_000
    outside = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert "<script" not in outside
    assert 'onerror="' not in outside
    assert "<svg onload" not in html
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200e\u200f\x1b\x07\x00\x9b]", outside)
    html.encode()  # no lone surrogate


def test_hostile_text_reaches_the_data_unharmed(make_run):
    html = report_html([read_run(evil_run(make_run, EVIL[:3]))])
    header, columns = blob(html, "data-rollouts")
    assert [header["texts"][columns["detail"][i]] for i in (0, 1)] == EVIL[:2]
    main_header, _ = blob(html, "data-main")
    assert set(main_header["curves"]["lines"]) == set(EVIL_NAMES)


def test_the_terminal_gets_no_control_characters(make_run, capsys):
    run = make_run()
    evil = run.with_name("r\x1b[31m\u202e")
    run.rename(evil)
    (evil / "record" / "rewards.rewards" / "000000.parquet").write_bytes(b"PAR1")
    assert main(["report", str(evil), "-o", str(evil.parent / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "note: r␛[31m[U+202E]: record/rewards.rewards/000000.parquet is half-written" in out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_visible_keeps_ordinary_text():
    assert visible("naïve ✓ 数学\n\tx") == "naïve ✓ 数学\n\tx"
    assert visible("\ud800") == "\ufffd"
    assert visible("a\u2028b\x7f") == "a[U+2028]b[U+007F]"


def test_pack_round_trip_aligns_every_array():
    arrays = {"a": np.arange(3, dtype=np.uint8), "b": np.array([1.5, np.inf], np.float64), "c": np.zeros(0, np.int16)}
    header, result = unpack(pack({"x": [float("nan"), "<"], "y": {"z": float("inf")}}, arrays))
    assert header["x"] == [None, "<"]
    assert header["y"] == {"z": None}
    assert all(np.array_equal(result[k], v) for k, v in arrays.items())
    assert all(offset % 8 == 0 for _, offset, _ in header["arrays"].values())


def test_several_runs_show_their_differences(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b", "recipe=toy_grpo"))]
    html = report_html(runs)
    assert "<h3>Differences</h3>" in html
    assert "<title>2 runs</title>" in html


def test_unwritable_target(make_run, tmp_path: Path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["report", str(make_run()), "-o", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
