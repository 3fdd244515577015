"""Result files of an evaluation: results of each subject, and the comparison of several."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditgraph.lab.evaluate.measure import Work
from creditgraph.lab.evaluate.scores import TaskScores, mean_results, metric_order, paired, task_results
from creditgraph.lab.evaluate.sets import Problems
from creditgraph.lab.evaluate.subject import Subject
from creditgraph.lab.evaluate.suite import Suite
from creditgraph.pipeline.app.text import markdown_table
from creditgraph.pipeline.run.run_directory import write_aside, write_json


def write_results(
    folder: Path, subject: Subject, suite: Suite, works: Sequence[Work], scores: Mapping[str, TaskScores]
) -> dict[str, Any]:
    """Writes results.json, results.md, contamination.json and rejected.jsonl; returns the results.

    They contain no times, so that equal records give equal files.
    """
    sets = [work.problems for work in works]
    contamination = {work.problems.name: work.contamination for work in works}
    results = {
        "suite": suite.name,
        "title": suite.title,
        "version": suite.version,
        "subject": subject.name,
        "checkpoint": subject.checkpoint.name,
        "weights": subject.checkpoint.fingerprint,
        "model": dataclasses.asdict(subject.spec),
        "engine": subject.engine.use,
        "device": subject.device,
        "seed": suite.seed,
        "confidence": suite.confidence,
        "resamples": suite.resamples,
        "tasks": {p.name: task_results(p.name, scores[p.name], suite) | _described(p) for p in sets},
        "mean": mean_results(scores, suite),
        "contamination": {n: {k: v for k, v in r.items() if k != "overlapping"} for n, r in contamination.items()},
    }
    rejected = [json.dumps(row, ensure_ascii=False) + "\n" for problems in sets for row in problems.rejected]
    write_json(folder / "results.json", results)
    write_aside(folder / "results.md", results_page(results))
    write_json(folder / "contamination.json", contamination)
    write_aside(folder / "rejected.jsonl", "".join(rejected))
    return results


def write_comparison(
    subjects: Sequence[Subject],
    suite: Suite,
    label: str,
    scores: Mapping[str, Mapping[str, TaskScores]],
    results: Mapping[str, Any],
) -> str:
    """Writes comparison.json and comparison.md into eval/SUITE of the first subject; returns the page."""
    names = [s.name for s in subjects]
    first, *others = names
    tasks: dict[str, Any] = {}
    notes = []
    for task in suite.tasks:
        metrics = {
            metric: {
                n: results[n]["tasks"][task]["metrics"][metric] for n in names if metric in scores[n][task].metrics
            }
            for metric in scores[first][task].metrics
        }
        differences = {n: paired(task, scores[first][task], scores[n][task], suite) for n in others}
        tasks[task] = {"metrics": metrics, "differences": differences}
        notes += [
            f"note: {task}: {d['only_first']} only in {first}, {d['only_second']} only in {n}; the difference is over "
            "the others\n"
            for n, d in differences.items()
            if d["only_first"] or d["only_second"]
        ]
    comparison = {
        "suite": suite.name,
        "version": suite.version,
        "subjects": names,
        "checkpoints": {s.name: s.checkpoint.name for s in subjects},
        "engines": {s.name: s.engine.use for s in subjects},
        "confidence": suite.confidence,
        "resamples": suite.resamples,
        "tasks": tasks,
    }
    folder = subjects[0].folder / "eval" / suite.name
    stem = f"comparison-{label}" if label else "comparison"
    page = comparison_page(comparison)
    write_json(folder / f"{stem}.json", comparison)
    write_aside(folder / f"{stem}.md", page)
    return f"{page}\n{''.join(notes)}wrote {folder / f'{stem}.md'} and {stem}.json"


def _described(problems: Problems) -> dict[str, Any]:
    """Description of a task in the results, in addition to its metrics."""
    task = problems.task
    settings: dict[str, Any] = {
        "mode": task.mode,
        "template": str(problems.prompts.metadata[0].get("template", "")),
        "max_tokens": task.max_tokens,
    }
    if task.mode == "thought":
        limits = task.thoughts
        names = ("max_tokens", "max_thoughts", "ends_at_eos")
        settings["thoughts"] = {name: getattr(limits, name) for name in names}
    settings |= {"greedy": task.greedy, "samples": task.samples}
    if task.samples:
        settings |= {"temperature": task.temperature, "top_p": task.top_p, "k": list(task.k)}
    return {
        "rejected": problems.num_rejected,
        "set": task.data + (f" ({task.split})" if task.split else ""),
        "verifier": problems.verifier,
        "settings": settings,
        "origin": task.origin,
    }


def percent(estimate: Mapping[str, float] | None, sign: bool = False) -> str:
    """ "81.2 [77.0, 85.4]" in percent; an en dash without an estimate.

    >>> percent({"value": 0.812, "low": 0.77, "high": 0.854})
    '81.2 [77.0, 85.4]'
    """
    if not estimate:
        return "–"
    value, low, high = (f"{100 * estimate[k]:{'+' if sign else ''}.1f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def results_table(results: Mapping[str, Any]) -> str:
    """Tasks as rows, metrics as columns; tasks with flagged problems have a second row without them."""
    tasks: Mapping[str, Any] = results["tasks"]
    metrics = metric_order({m for t in tasks.values() for m in t["metrics"]})
    rows: list[list[str]] = []

    def add(name: str, problems: str, flagged: str, estimates: Mapping[str, Any]) -> None:
        rows.append([name, problems, flagged, *(percent(estimates["metrics"].get(m)) for m in metrics)])

    for name, task in tasks.items():
        add(name, str(task["problems"]), "–" if task["flagged"] is None else str(task["flagged"]), task)
        if task.get("without_flagged"):
            add(f"{name}, without flagged", str(task["without_flagged"]["problems"]), "0", task["without_flagged"])
    if results.get("mean"):
        add("mean of tasks", "", "", results["mean"])
    return markdown_table(["task", "problems", "flagged", *metrics], rows)


def results_page(results: Mapping[str, Any]) -> str:
    """The whole results.md of one subject."""
    rows = []
    for name, task in results["tasks"].items():
        settings = ", ".join(f"{k} {_inline(v)}{_origin(task['origin'].get(k))}" for k, v in task["settings"].items())
        counts = [str(task[k]) for k in ("responses", "invalid", "no_answer", "cut", "rejected")]
        rows.append([name, task["set"], *counts, settings])
    head = ["task", "set", "responses", "invalid", "no answer", "cut off", "rows rejected", "settings"]
    return f"""# {results["title"]}: {results["subject"]}, checkpoint {results["checkpoint"]}

{results_table(results)}

Percent, with {100 * results["confidence"]:g} % bootstrap intervals over problems ({results["resamples"]:,} draws, \
percentile method). Suite {results["suite"]} version {results["version"]}, seed {results["seed"]}, \
{results["engine"]}, model {results["model"]["path"]} ({results["model"]["dtype"]}).

{contamination_lines(results["contamination"])}

{markdown_table(head, rows)}
"""


def contamination_lines(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The outcome of the search in training data, a sentence per way of searching."""
    tasks: dict[str, list[str]] = {}
    for task, report in reports.items():
        tasks.setdefault(_search_line(report), []).append(task)
    if len(tasks) == 1:
        return next(iter(tasks))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in tasks.items())


def _search_line(report: Mapping[str, Any]) -> str:
    if report["status"] != "checked":
        return f"Contamination not checked: {report['status']}."
    rule = f"more than {100 * report['share']:g} %" if report["share"] else "any"
    return (
        f"Flagged are problems with {rule} of their {report['n']}-grams of words in the {report['train_rows']:,} "
        f"training problems of {report['train']}."
    )


def comparison_page(comparison: Mapping[str, Any]) -> str:
    """Several subjects in one table; differences are to the first."""
    first, *others = comparison["subjects"]
    rows = []
    for task, results in comparison["tasks"].items():
        for metric, values in results["metrics"].items():
            gaps = [results["differences"][n]["metrics"].get(metric) for n in others]
            cells = [percent(values.get(n)) for n in (first, *others)]
            cells += [percent(gap, sign=True) + (" *" if gap and gap["resolved"] else "") for gap in gaps]
            rows.append([task, metric, *cells])
    head = ["task", "metric", first, *others, *(f"{n} − {first}" for n in others)]
    used = [
        f"{n} is checkpoint {comparison['checkpoints'][n]} with {comparison['engines'][n]}" for n in (first, *others)
    ]
    return f"""{markdown_table(head, rows)}

Percent, with {100 * comparison["confidence"]:g} % bootstrap intervals; differences are drawn in pairs over the \
problems both have, and * marks those whose interval leaves out 0. Suite {comparison["suite"]} version \
{comparison["version"]}; {"; ".join(used)}.
"""


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} {_inline(v)}" for k, v in value.items()) + "}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _origin(source: str | None) -> str:
    return f" ({source})" if source else ""
