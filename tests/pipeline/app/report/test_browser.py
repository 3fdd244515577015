"""The report in a real browser: data opens, filters and keys work, hostile text is inert, pages are accessible."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from creditgraph.pipeline.app.credit.side_by_side import compare
from creditgraph.pipeline.app.report.credit import write_credit
from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.source import read_run
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.run.recording import read_payload, write_payload

axe = pytest.importorskip("axe_core_python.sync_playwright", reason="pip install axe-core-python")


@pytest.fixture(scope="module")
def html(make_run_once: Any) -> str:
    """The page of one run."""
    return report_html([read_run(make_run_once("one", trace="sampler"))])


@pytest.fixture(scope="module")
def html_of_two(make_run_once: Any) -> str:
    """The page of two runs."""
    return report_html([read_run(make_run_once("a", trace="sampler")), read_run(make_run_once("b", "recipe=toy_grpo"))])


@pytest.fixture(scope="module")
def html_of_credit(real_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of `creditgraph credit`."""
    file = tmp_path_factory.mktemp("credit") / "credit.html"
    recipes = ["toy_grpo", "toy_rredcot", "toy_treerl"]
    write_credit(compare(real_run, recipes, [], [], None, 2, 4), file, "<b>t</b>")
    return file.read_text(encoding="utf-8")


def violations(page: Any) -> list[tuple[str, Any]]:
    # Without the elements that pass, which are most of the time.
    violations = axe.Axe().run(page, options={"resultTypes": ["violations"]})["violations"]
    return [(v["id"], [n["html"][:200] for n in v["nodes"]]) for v in violations]


def too_wide(page: Any, width: int) -> list[str]:
    """What makes a page scroll sideways."""
    if page.evaluate("document.documentElement.scrollWidth") <= width:
        return []
    script = """w => [...document.querySelectorAll('body *')]
        .filter(e => e.getBoundingClientRect().right > w && !e.closest('.scroll, .picture'))
        .slice(0, 8).map(e => e.outerHTML.slice(0, 150))"""
    return page.evaluate(script, width) or ["the page"]


# Width decides overflow and the scheme contrast, so two of the four pairs see both.
SCREENS = [(1600, "light"), (360, "dark")]


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_clean_console_no_overflow_and_no_violation(html_of_two, open_tab, width, scheme):
    tab = open_tab(html_of_two, width, scheme)
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    tab.page.locator("#graph-0 g[data-name=advantage]").click()
    tab.page.wait_for_timeout(300)
    assert violations(tab.page) == []
    assert too_wide(tab.page, width) == []
    assert tab.said == []


def test_filters(html, open_tab):
    page = open_tab(html).page
    count = page.locator("#count")
    assert count.inner_text() == "8 of 8 rollouts"
    page.click(".more > summary")
    for box, text, left in (
        ("min-reward", "1", 2),
        ("max-credit", "-1", 2),
        ("min-length", "4", 4),
        ("max-iteration", "0", 4),
    ):
        page.fill(f"#{box}", text)
        assert count.inner_text() == f"{left} of 8 rollouts", box
        page.click("#reset")
    page.select_option("#outcome", "no reward")
    assert count.inner_text() == "2 of 8 rollouts"
    page.fill("#search", "nothing like this")
    assert count.inner_text() == "0 of 8 rollouts"
    assert "No rollout matches" in page.locator("#list").inner_text()
    page.click("#reset")
    # The list opens on the largest credit; reset returns to it.
    assert "credit −2.00" in page.locator("#list .item").first.inner_text()
    page.select_option("#sort", "credit down")
    assert "credit +1.00" in page.locator("#list .item").first.inner_text()


def test_keyboard_alone(html, open_tab):
    page = open_tab(html).page
    page.select_option("#sort", "recorded up")
    page.focus("#list")
    page.keyboard.press("Home")
    assert page.locator(".item[aria-selected=true]").get_attribute("id") == "r0"
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#list", "aria-activedescendant") == "r1"
    page.keyboard.press("End")
    assert page.get_attribute("#list", "aria-activedescendant") == "r7"
    page.focus(".tokens")
    page.keyboard.press("End")
    readout = page.inner_text("#readout")
    assert "Token 3 of 3" in readout
    assert "credit −2.0000" in readout
    assert "log-ratio +0.5000" in readout
    assert "entropy 0.500" in readout
    page.keyboard.press("Home")
    assert "inherited" in page.inner_text("#readout")
    page.focus("#graph-0 g[data-name=rewards]")
    page.keyboard.press("Enter")
    assert "rewards.outcome" in page.inner_text("#node-0")
    assert "Rewards, 3 rows" in page.inner_text("#node-0")


def test_the_timeline_follows_its_menus(make_run, open_tab):
    page = open_tab(
        report_html([read_run(make_run("a", trace="sampler")), read_run(make_run("b", trace="expander"))])
    ).page
    chart, numbers = page.locator("#timeline-chart svg"), page.locator("#timeline-numbers")
    assert page.locator("#timeline-iteration option").all_inner_texts() == ["0 (3.000 s)", "1 (3.000 s)"]
    assert "sampler" in chart.text_content()
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert numbers.locator("tbody tr").all_inner_texts() == [
        "generation\tgeneration\t2.000\t66.7 %\t1",
        "generation\twaiting\t0.500\t16.7 %\t1",
        "main\tlearning\t1.500\t50.0 %\t1",
    ]
    page.select_option("#timeline-run", "1")
    page.wait_for_function("document.querySelector('#timeline-chart svg').textContent.includes('expander')")
    page.select_option("#timeline-iteration", "0")
    assert "3.000 s in all" in numbers.inner_text()


def test_every_control_is_reached_by_tab(html, open_tab):
    page = open_tab(html).page
    controls = {
        "timeline-run",
        "timeline-iteration",
        "search",
        "outcome",
        "min-reward",
        "max-credit",
        "sort",
        "scale",
        "reset",
        "export-csv",
        "export-json",
        "list",
        "only",
        "phase-run",
        "graph-0",
    }
    page.click(".more > summary")
    seen = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id"))
    assert controls <= seen


def test_credit_shows_by_more_than_colour_and_the_tree_leads_on(html, open_tab):
    page = open_tab(html).page
    page.click(".more > summary")
    page.fill("#max-credit", "-1")
    page.locator(".item").first.click()
    negative = page.locator(".tokens .n5")
    assert negative.count() == 1
    assert negative.evaluate("e => getComputedStyle(e).borderBottomStyle") == "dotted"
    assert page.locator(".tokens .off").count() == 2  # inherited
    tree = page.locator("ul.tree")
    assert "root: failed" in tree.inner_text()
    assert "first error at thought 2 (boxed)" in tree.inner_text()
    assert "after 1 kept thoughts (2 tokens): reward 0" in tree.inner_text()
    tree.locator("button", has_text="reward 1").click()
    assert page.locator(".tokens .p5").count() == 4
    assert page.evaluate("document.activeElement.tagName") == "H3"


def evil_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"[UNK]": 0} | {t: i + 1 for i, t in enumerate(texts)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_hostile_text_is_shown_and_never_runs(make_run, open_tab, tmp_path):
    texts = [
        "<script>window.pwned=1</script>",
        '"><img src=x onerror="window.pwned=1">',
        "</script><svg onload=window.pwned=1>",
        "\u202eRLO\u2066",
        "\x1b[31mred\x07",
        "{{7*7}}",
        "y" * 100_000,
        "line\nbreak\r\t",
        "<!--<script>",
        "javascript:window.pwned=1",
        "é👩‍👩‍👧",
        "'-alert(1)-'",
    ]
    evil_tokenizer(tmp_path / "model", texts)
    run = make_run(
        "r", "recipe=toy_srpo", f"model.path={tmp_path / 'model'}", details=[*texts[:2], "\ud800 lone"], trace=texts[1]
    )
    (run / "data_card.json").write_text(json.dumps({texts[0]: {texts[1]: texts, texts[3]: texts[4]}}), encoding="utf-8")
    metrics = {"iteration": 0, texts[0]: 1.0, texts[1]: 2.0, "seconds/<img src=x onerror=window.pwned=1>": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    tab = open_tab(report_html([read_run(run)], title=texts[0]), 360)
    for item in range(3):
        tab.page.focus("#list")
        tab.page.keyboard.press("Home" if item == 0 else "ArrowDown")
        tab.page.focus(".tokens")
        tab.page.keyboard.press("End")
    tab.page.locator("#graph-0 g[data-name=rewards]").click()
    tab.page.wait_for_timeout(300)
    assert tab.page.evaluate("window.pwned") is None
    assert too_wide(tab.page, 360) == []
    assert tab.page.locator("main img, main svg[onload]").count() == 0
    shown = tab.page.inner_text("body")
    assert "<script>window.pwned=1</script>" in shown
    assert not any(c in shown for c in "\u202e\u2066\x1b\x07")
    assert tab.said == []
    assert violations(tab.page) == []


def test_a_response_of_many_tokens_comes_in_parts(make_run, open_tab):
    run = make_run()
    file = run / "record" / "sampler.trajectories" / "000000.parquet"
    batch = read_payload(file)
    tokens = Jagged.from_rows([[5, 6, 9] * 3000, [5]], torch.int32)
    numbers = tokens.with_values(torch.zeros(len(tokens.values)))
    ends = Jagged.from_rows([[], []], torch.int32)
    write_payload(
        file, batch.replace(response_tokens=tokens, engine_logprobs=numbers, entropies=numbers, thought_ends=ends)
    )
    page = open_tab(report_html([read_run(run)])).page
    page.click(".more > summary")
    page.fill("#min-length", "9000")
    page.locator(".item").first.click()
    assert page.locator(".tokens .t").count() == 3000
    page.locator(".tokens button").click()
    assert page.locator(".tokens .t").count() == 6000
    page.focus(".tokens")
    page.keyboard.press("End")
    assert page.locator(".tokens .t").count() == 9000
    assert "Token 9000 of 9000" in page.inner_text("#readout")


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_the_page_of_methods_side_by_side(html_of_credit, open_tab, width, scheme):
    tab = open_tab(html_of_credit, width, scheme)
    tab.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert violations(tab.page) == []
    assert too_wide(tab.page, width) == []
    assert tab.page.inner_text("h1") == "<b>t</b>"
    assert tab.page.locator("table.methods").count() == 2
    assert "needs further sampling" in tab.page.inner_text("#methods")
    assert "true advantage" in tab.page.inner_text("#methods-0")
    # Blue and orange are explained, and a token of the table has the colour of its credit's sign.
    assert "raises the token" in tab.page.inner_text("#tokens .legend")
    assert tab.page.locator("table.methods .t.p5, table.methods .t.n5").count() > 0
    assert tab.said == []


def test_without_recordings_the_page_still_works(make_run, open_tab):
    tab = open_tab(report_html([read_run(make_run(records=False))]))
    assert "No rollouts are recorded" in tab.page.inner_text("#rollouts")
    assert tab.page.locator("[data-curve] svg").count() == 2
    assert tab.said == []
