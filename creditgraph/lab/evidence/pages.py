"""The blocks of the documentation that are written from the declaration and results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from creditgraph.lab.bench.curves import Axis
from creditgraph.lab.bench.statistics import mean_sd
from creditgraph.lab.evidence.across import across_families
from creditgraph.lab.evidence.costs import COSTS, cheaper, head_to_head, method_costs, ratio
from creditgraph.lab.evidence.declaration import Cell
from creditgraph.lab.evidence.regimes import MEANING, regime
from creditgraph.lab.evidence.verdicts import DECIDED, TOKEN_AXES, Results, Verdict, collapsed, few
from creditgraph.lab.prediction.cells import read_cells
from creditgraph.lab.prediction.study import repeatability_line, study, study_table
from creditgraph.pipeline.app.progress import ACCURACY

NOTHING = "Not measured yet."
WORDS = (*DECIDED, "undecided", "not yet measured", "not testable here", "withdrawn")
SHOWN_AXES: tuple[Axis, ...] = ("tokens", "processed", "steps")
AXIS_NAMES = {
    "tokens": "sampled tokens",
    "processed": "processed tokens",
    "steps": "optimiser steps",
    "trained": "tokens in the loss",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A compact Markdown table."""
    lines = [head, ["---"] * len(head), *([c.replace("|", "&#124;") for c in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def claims_block(results: Results) -> str:
    """docs/evidence.md: the decided claims, and below folds the others; predictions are on the papers' pages."""
    verdicts = results.verdicts()
    known: dict[str, list[list[str]]] = {}
    for name, claim in results.declaration.claims.items():
        verdict = verdicts[name]
        paper = f"[{claim.paper}](papers/{claim.page}.md)" + " **primary**" * claim.primary
        regime = f"[{claim.cell}](#{claim.cell})" if claim.cell else "–"
        found = verdict.result.text() if verdict.result else verdict.reason or "–"
        known.setdefault(verdict.word, []).append([claim.text, paper, regime, found])
    head = ["claim", "paper", "regime", "difference [95 %]"]
    titles = {word: f"{word[0].upper()}{word[1:]}" for word in WORDS if word in known}
    parts = [f"### {title}\n\n{table(head, known[word])}" for word, title in titles.items() if word in DECIDED]
    parts += [folded(title, table(head, known[word])) for word, title in titles.items() if word not in DECIDED]
    return "\n\n".join([_count(verdicts), *parts])


def predictions_block(results: Results) -> str:
    """docs/evidence.md: how often predictions of each kind were right."""
    rows = [[kind, *map(str, counts.values())] for kind, counts in results.scored().items()]
    return table(["predicted", "right", "wrong", "undecided"], rows)


def progress_block(results: Results, file: Path) -> str:
    """docs/evidence.md: cells of which some runs are finished. They are raw data, and no verdict rests on them."""
    if not file.exists():
        return "Nothing."
    lines = []
    for name, entry in json.loads(file.read_text(encoding="utf-8"))["cells"].items():
        complete = name in results.cells and not results.earlier(name)
        if not complete and name in results.declaration.cells and entry["digest"] == results.declaration.digest(name):
            kinds = [run.partition("/")[0] for run in entry["finished"]]
            sweep, fresh = kinds.count("sweep"), kinds.count("runs")
            lines.append(
                f"- [{name}](#{name}): in progress, no verdict. {sweep} runs of the sweep and {fresh} fresh runs are "
                f"finished, at commit {entry['commit']}."
            )
    return "\n".join(lines) or "Nothing."


def folded(title: str, text: str) -> str:
    """Markdown that a reader opens."""
    return f"<details markdown><summary>{title}</summary>\n\n{text}\n\n</details>"


def withdrawn_block(results: Results) -> str:
    """docs/evidence.md: the comparisons that were shown once and say nothing about credit, each with the reason."""
    lines = []
    for name, cell in results.declaration.cells.items():
        claims = [c.text for c in results.declaration.claims.values() if c.cell == name and c.axis in TOKEN_AXES]
        if cell.withdrawn and claims:
            title = f"**[{name}](#{name}), at equal sampled tokens.**"
            lines.append(f"- {title} {cell.withdrawn} Claims that rested on it:")
            lines += [f"    - {text}" for text in claims]
    return "\n".join(lines) or "Nothing."


def paper_block(results: Results, page: str) -> str:
    """A paper's page: what was predicted of its claims, and what was measured."""
    verdicts = results.verdicts()
    claims = {n: c for n, c in results.declaration.claims.items() if c.page == page}
    rows = [
        [c.text + " **(primary)**" * c.primary, c.source, c.prediction, *_measured(results, n, verdicts[n])]
        for n, c in claims.items()
    ]
    text = "Predicted before the runs, and measured; regimes, rules and all methods are on [Evidence](../evidence.md)."
    return f"{text}\n\n{table(['claim', 'who says it', 'predicted', 'compared', 'result', 'verdict'], rows)}"


def cells_block(results: Results) -> str:
    """docs/evidence.md: a section per cell, with its setting and its methods."""
    parts = []
    for name, cell in results.declaration.cells.items():
        methods = folded("Setting and methods", f"{cell.regime}\n\n{cell_block(results, name)}")
        parts.append(f"### {name}\n\n{cell.title}\n\n{methods}")
    return "\n\n".join(parts)


def cell_block(results: Results, name: str) -> str:
    """Any page: a cell's setting and its methods."""
    cell = results.declaration.cells[name]
    family = results.declaration.families[cell.family]
    settings = ", ".join(f"`{s}`" for s in (*family.settings, *cell.set))
    steps = f" and at least {cell.steps} optimiser steps" if cell.steps else ""
    widened = f"widened by {cell.factor:g} at most {cell.widenings} times" if cell.widenings else "not widened"
    setting = (
        f"{family.title} ({settings}). {cell.tokens:,.0f} sampled tokens{steps} per run, {cell.seeds} seeds; rates "
        f"{', '.join(f'{r:g}' for r in cell.rates)}, {widened}"
        + (f"; {', '.join(map(str, cell.batches))} prompts per batch." if cell.batches else ".")
    )
    if family.metric != ACCURACY:
        setting += f" Accuracy is `{family.metric}`: of samples at the training temperature, not greedy."
    return f"{setting}\n\n{_methods_table(results, name, cell) if name in results.cells else NOTHING}"


def across_block(results: Results) -> str:
    """docs/evidence.md: methods over families."""
    rows = []
    for row in across_families(results):
        least, *_, most = sorted(row.gains.items(), key=lambda item: item[1])
        ahead = f"{sum(gain > 0 for gain in row.gains.values())} of {len(row.gains)}"
        extremes = [f"{gain:+.3f} `{family}`" for family, gain in (least, most)]
        rows.append([f"`{row.method}`", f"`{row.baseline}`", ahead, row.result.text(), *extremes])
    head = ["method", "against", "families and models where it is higher", "mean [95 %]", "least", "most"]
    return table(head, rows) if rows else NOTHING


def regimes_block(results: Results, file: Path) -> str:
    """docs/evidence.md: a rule for where each method gains, and how often it is right elsewhere."""
    known: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = [r for row in across_families(results) if (r := regime(row, known)) is not None]
    if not found:
        return NOTHING
    rows = [
        [
            f"`{r.method}`",
            f"`{r.baseline}`",
            f"`{r.name}` {'≥' if r.above else '<'} {r.threshold:.3g}",
            *(f"{right} of {of}" for right, of in (r.fitted, r.tested)),
            f"{r.majority} of {r.tested[1]}",
        ]
        for r in found
    ]
    head = ["method", "against", "helps where", "right, fitted", "right, tested", "by the more frequent sign"]
    better = sum(r.tested[0] > r.majority for r in found)
    right, guessed, of = (sum(v) for v in zip(*((r.tested[0], r.majority, r.tested[1]) for r in found), strict=True))
    sentence = (
        f"On the tested families the rules are right {right} times of {of}, the more frequent sign alone "
        f"{guessed} times; {better} of {len(found)} rules do better than it."
    )
    families = [[f"`{name}`", *(_shown(known[name].get(n)) for n in MEANING)] for name in sorted(known)]
    own = folded("Properties of the families", table(["family", *MEANING], families))
    return f"{sentence}\n\n{table(head, rows)}\n\n{own}"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def costs_block(results: Results) -> str:
    """docs/evidence.md: what a step of each method takes, and whether SRPO is cheaper than RRPO."""
    both = head_to_head(results, "toy_srpo", "toy_rrpo")
    said = [f"{AXIS_NAMES.get(cost, cost)}: {cheaper('SRPO', 'RRPO', both.get(cost, ()))}" for cost in COSTS[:-1]]
    rows = [
        [f"`{method}`", f"`{base}`", *(ratio(logs[cost]) for cost in COSTS)]
        for (method, base), logs in method_costs(results).items()
    ]
    head = ["method", "against", "sampled tokens", "processed tokens", "seconds", "response length"]
    sentence = f"**Is SRPO cheaper than RRPO?** Per optimiser step and prompt, {'; '.join(said)}."
    return f"{sentence}\n\n{folded('Every method', table(head, rows))}"


def creditbench_blocks(results: Results, gains: Path, scores: Path) -> dict[str, str]:
    """docs/lab.md: whether a score of credit predicts what training gains, and the table of the study."""
    if not scores.exists():
        return {"predicts": NOTHING, "study": NOTHING}
    cells = [
        cell
        for cell in read_cells([gains], scores)[0]
        if cell.name in results.cells and not results.withdrawn(cell.name)
    ]
    families = len({cell.family for cell in cells})
    found = study(cells)
    verdict, _, rows = study_table(found).partition("\n\n")
    name, best = next(iter(found.items()))
    return {
        "predicts": f"**{verdict}** Nearest: `{name}` with {best.tau:+.2f} [{best.low:+.2f}, {best.high:+.2f}]; "
        f"{sum(len(cell.methods) for cell in cells)} methods in {len(cells)} cells of {families} families. "
        f"{repeatability_line(cells)}",
        "study": rows,
    }


def readme_block(results: Results) -> str:
    """The README: how many claims held, and what methods gained over families, in a few lines."""
    lines = [f"- {_count(results.verdicts())}"]
    for row in [row for row in across_families(results) if not row.knows_errors]:
        ahead = sum(gain > 0 for gain in row.gains.values())
        lines.append(
            f"- `{row.method}` has a higher accuracy than `{row.baseline}` in {ahead} of {len(row.gains)} task "
            f"families: {row.result.text()} on average."
        )
    return "\n".join(lines)


def _count(verdicts: dict[str, Verdict]) -> str:
    words = [v.word for v in verdicts.values()]
    counted = ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)
    return f"Of {len(words)} claims: {counted}."


def _measured(results: Results, name: str, verdict: Verdict) -> list[str]:
    """What was compared, the result, and the verdict."""
    claim, pair = results.declaration.claims[name], verdict.pair
    if not claim.cell:
        return ["–", "–", f"{verdict.word}: {verdict.reason}"]
    compared = f"`{claim.better}` > `{claim.worse}` at equal {AXIS_NAMES[claim.axis]}"
    word = verdict.word + (f": {verdict.reason}" if verdict.reason else "")
    if pair is None:
        return [compared, "–", word]
    steps = " and ".join(f"{s:.0f}" for s in pair["took"]["steps"])
    compared += f" ({pair['at']:,.0f}; {steps} steps, {len(pair['seeds'])} seeds)"
    if verdict.result is None:
        return [compared, "–", word]
    if verdict.word == "undecided":
        word += f" (detectable: {verdict.result.detectable:.3f})"
    word += "; declared after its data" * verdict.late
    return [compared, f"{verdict.result.text()}, p = {_p(verdict.corrected)}", word]


def warnings(measured: dict[str, Any]) -> str:
    """What runs of a cell warned of: a part of their method may have done nothing."""
    return "".join(f"\n\nWarned: `{method}` ({said})." for method, said in measured.get("warned", {}).items())


def _methods_table(results: Results, name: str, cell: Cell) -> str:
    measured = results.cells[name]
    rows = []
    for method, row in measured["methods"].items():
        by_axis = {axis: results.pair(name, method, cell.baseline_of(method), axis) for axis in SHOWN_AXES}
        baseline = f"`{base}`" if (base := cell.baseline_of(method)) else "–"
        rows.append(
            [
                f"`{method}`",
                _point(row),
                "–" if cell.withdrawn else accuracy(row),
                _steps(row),
                _costs(row),
                baseline,
                *(_equal(results, name, by_axis[axis]) for axis in SHOWN_AXES),
                f"{collapsed(row, cell.seeds):.2f}",
                str(len(row["seeds"])),
            ]
        )
    head = ["method", "lr", "accuracy", "steps", "processed tokens, seconds", "baseline"]
    head += [f"at equal {AXIS_NAMES[axis]}" for axis in SHOWN_AXES] + ["end below start, or failed", "seeds"]
    filled = [i for i in range(len(head)) if any(row[i] not in ("–", "0.00") for row in rows)]
    head, rows = [head[i] for i in filled], [[row[i] for i in filled] for row in rows]
    failed = "".join(f"\n\nFailed: `{run}` ({why})." for run, why in measured["failed"].items())
    earlier = results.earlier(name)
    rule = f" Rates were chosen by an earlier rule: {', '.join(earlier)}." if earlier else ""
    sweep = f" (the sweep: {measured['sweep_commit']})" if "sweep_commit" in measured else ""
    return f"{table(head, rows)}\n\nMeasured at commit {measured['commit']}{sweep}.{rule}{failed}{warnings(measured)}"


def _point(row: dict[str, Any]) -> str:
    """The rate, the prompts per batch where they were swept, and whether the rate is the lowest or highest tried."""
    rates = [float(text.split(" x ")[0]) for text in row["tried"]]
    edge = " (edge)" if rates and row["lr"] in (min(rates), max(rates)) else ""
    return f"{row['lr']:g}{edge}" + (f", {row['batch']} prompt{'s' * (row['batch'] > 1)}" if row.get("batch") else "")


def _costs(row: dict[str, Any]) -> str:
    """What went through the model until the budget of sampled tokens, where it was recorded."""
    if "processed" not in row:
        return "–"
    return f"{mean_sd(row['processed'])[0]:,.0f}, {mean_sd(row['seconds'])[0]:.0f} s"


def accuracy(row: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds."""
    mean, deviation = mean_sd(row["accuracy"])
    return f"{mean:.3f} ± {deviation:.3f}"


def _steps(row: dict[str, Any]) -> str:
    steps = mean_sd(row["steps"])[0]
    return f"{steps:.0f}{' (not ranked)' if few(steps) else ''}"


def _equal(results: Results, cell: str, pair: dict[str, Any] | None) -> str:
    return f"{results.compared(cell, pair).text()} at {pair['at']:,.0f}" if pair else "–"


def _p(value: float) -> str:
    return "< .001" if value < 0.001 else f"{value:.3f}"
