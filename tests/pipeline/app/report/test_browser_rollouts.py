"""The rollouts of a report in a real browser: why, links, one prompt over training and in two runs, export, layout."""

import csv
import io
import json
import re
from itertools import pairwise

import pytest
import torch

from creditgraph.pipeline.app.report.page import report_html
from creditgraph.pipeline.app.report.source import read_run


@pytest.fixture(scope="module")
def two(make_run_once):
    """The page of two runs of the same prompts."""
    return report_html([read_run(make_run_once("left", trace="sampler")), read_run(make_run_once("right"))])


def test_curves_come_first_and_rollouts_open_on_credit(two, open_tab):
    page = open_tab(two).page
    sections = page.eval_on_selector_all("main > section", "all => all.map(s => s.id)")
    assert sections == ["runs", "curves", "rollouts", "phases", "timeline", "graph", "data", "configuration"]
    assert "credit −2.00" in page.locator(".item[aria-selected=true]").inner_text()
    assert page.locator(".tokens .n5").count() == 1


def test_the_formula_stands_with_the_rollout(two, open_tab):
    # Rewards 1, 0, 0 of one group: population std √2/3 = .471, (0 − .333)/.471 = −.707.
    page = open_tab(two).page
    why = page.inner_text(".why")
    assert "advantage (advantage.group)" in why
    assert "rewards of its group: 1, 0, 0; mean .333, standard deviation .471 of 3" in why
    assert "(0 − .333)/.471 = −.707" in why


def test_a_link_opens_a_rollout(two, open_tab):
    tab = open_tab(two)
    tab.page.locator(".item").nth(4).click()
    heading = tab.page.inner_text("#detail h3")
    address = tab.page.get_attribute("#detail h3 a", "href")
    assert tab.page.evaluate("location.hash") == address
    tab.page.select_option("#outcome", "right")  # a filter that hides some rollouts
    # A rollout that the filter leaves out, named by hand in the address.
    tab.page.evaluate("location.hash = '#rollout=right:13'")
    tab.page.wait_for_function("document.querySelector('#detail h3').textContent.includes('Rollout 13 ')")
    assert "of right" in tab.page.inner_text("#detail h3")
    assert heading != tab.page.inner_text("#detail h3")
    tab.page.goto(tab.page.url.partition("#")[0] + "#rollout=left:22")
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready]")
    assert "Rollout 22 of iteration 1 of left" in tab.page.inner_text("#detail h3")
    tab.page.evaluate("location.hash = '#rollout=left:999'")
    tab.page.wait_for_function("document.querySelector('#count').textContent.includes('999 of left')")
    assert "is not in this page" in tab.page.inner_text("#count")
    assert tab.said == []


def test_one_prompt_over_training_and_two_runs_side_by_side(two, open_tab):
    page = open_tab(two).page
    head = page.locator("table.answers thead th")
    assert head.all_inner_texts() == ["iteration", "left", "right"]
    assert page.locator("table.answers tbody th").all_inner_texts() == ["0", "1"]
    cells = page.locator("table.answers tbody tr").first.locator("td")
    assert [text.splitlines()[0] for text in cells.all_inner_texts()] == ["1 of 4 right", "1 of 4 right"]
    cells.nth(1).locator("button").first.click()
    assert "of right" in page.inner_text("#detail h3")
    assert page.locator("table.answers thead th").all_inner_texts() == ["iteration", "right", "left"]
    page.select_option("#beside", "-1")
    assert page.locator("table.answers thead th").all_inner_texts() == ["iteration", "right"]
    page.click("#only")
    assert page.get_attribute("#only", "aria-pressed") == "true"
    assert page.inner_text("#count") == "16 of 16 rollouts, of one prompt"


def saved(page, button):
    with page.expect_download() as download:
        page.click(button)
    return download.value.suggested_filename, open(download.value.path(), encoding="utf-8", newline="").read()


def test_export_of_what_the_filters_leave(two, open_tab):
    tab = open_tab(two)
    tab.page.click(".more > summary")
    tab.page.fill("#max-credit", "-1")
    name, text = saved(tab.page, "#export-json")
    rows = json.loads(text)
    assert name == "rollouts.json"
    assert [(r["run"], r["iteration"], r["uid"]) for r in rows] == [
        ("left", 0, "13"),
        ("left", 1, "23"),
        ("right", 0, "13"),
        ("right", 1, "23"),
    ]
    assert [t["trained"] for t in rows[0]["response_tokens"]] == [False, False, True]
    assert rows[0]["response_tokens"][2]["credit"] == pytest.approx(-2)
    assert "(0 − .333)/.471" in rows[0]["why"]
    name, text = saved(tab.page, "#export-csv")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert name == "rollouts.csv"
    assert [line["uid"] for line in lines] == ["13", "23", "13", "23"]
    assert lines[0]["mean_credit"] == "-2"
    assert lines[0]["response"] == rows[0]["response"]
    assert tab.said == []


def test_a_formula_of_a_response_does_not_run_in_a_spreadsheet(make_run, open_tab):
    page = open_tab(report_html([read_run(make_run(details=["=HYPERLINK(1)", "a,b\n", '"q"']))])).page
    lines = list(csv.DictReader(io.StringIO(saved(page, "#export-csv")[1])))
    assert {line["reason"] for line in lines} == {"'=HYPERLINK(1)", "a,b\n", '"q"', ""}


@pytest.mark.parametrize("width", [1600, 800, 360])
def test_the_graph_is_whole_at_any_width(two, open_tab, width):
    page = open_tab(two, width).page
    box = page.evaluate(
        """() => {
            const place = document.getElementById('graph-0'), svg = place.shadowRoot.querySelector('svg');
            const [a, b] = [place.getBoundingClientRect(), svg.getBoundingClientRect()];
            return {inside: b.left >= a.left && b.right <= a.right && b.top >= a.top && b.bottom <= a.bottom,
                    height: b.height, cut: place.scrollHeight - place.clientHeight};
        }"""
    )
    assert box["inside"]
    assert box["height"] > 100
    assert box["cut"] <= 0


def test_time_axes_begin_at_0(make_run, open_tab):
    page = open_tab(report_html([read_run(make_run(iterations=50, records=False))])).page
    for chart in ("#phase-chart", "[data-curve='0'] .chart"):
        domain = page.evaluate("s => document.querySelector(s).view.scale('x').domain()", chart)
        assert domain[0] == 0
        assert domain[1] <= 50


def linear(channel):
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def lab(rgb):
    """CIE L*a*b* of an sRGB colour, D65."""
    r, g, b = (linear(c / 255) for c in rgb)
    xyz = (
        (0.4125 * r + 0.3576 * g + 0.1804 * b) / 0.9505,
        0.2127 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9503 * b) / 1.0888,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return torch.tensor([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_colours_are_near_equal(two, open_tab, scheme):
    page = open_tab(two, 800, scheme).page
    series = page.evaluate("report.colors().series")
    colors = [lab([int(c[i : i + 2], 16) for i in (1, 3, 5)]) for c in series]
    assert len(series) == len(set(series)) == 11
    nearest = min(float((a - b).norm()) for i, a in enumerate(colors) for b in colors[:i])
    assert nearest > 20
    # Every phase of the timeline has its own.
    script = page.evaluate("[...document.scripts].map(s => s.textContent).find(t => t.includes('const PHASES'))")
    places = script.partition("PHASES = {")[2].partition("}")[0]
    numbers = [int(n) for n in re.findall(r"\d+", places)]
    assert all(a != b for a, b in pairwise(sorted(numbers)))
    assert len(numbers) == 11


def test_an_episode_is_drawn_as_its_turns(make_run, put_turns, open_tab):
    run = make_run("episodes")
    for i in range(2):
        put_turns(run, i)
    page = open_tab(report_html([read_run(run)])).page
    page.select_option("#sort", "iteration up")
    page.locator(".item").first.click()
    rows = page.locator("table.turns tbody tr")
    # Of each turn reward, mean credit, its sum and the state.
    cells = [[c.strip() for c in rows.nth(i).locator("th, td").all_inner_texts()][3:] for i in range(rows.count())]
    assert cells == [["0.25", "+1.000", "+4.00", "start"], ["0.5", "−0.500", "−1.50", "later"]]
    said = page.locator("#detail").inner_text()
    assert "2 turns, return 0.75, ended by the environment. This rollout is turn 1." in said
    rows.nth(1).locator("button").click()
    assert "This rollout is turn 2." in page.locator("#detail").inner_text()
    page.locator(".item", has_text="expander").first.click()
    assert "1 turn, return 0, cut off (raised: KeyError)" in page.locator("#detail").inner_text()
