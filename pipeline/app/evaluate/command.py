"""`creditgraph eval … suite=NAME`: reads the command line, evaluates every subject on every task, and writes results
and comparisons."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.data.loading import load_data
from components.models.load import load_tokenizer
from pipeline.app.evaluate.contamination import Search, report_of
from pipeline.app.evaluate.items import Chunk, ItemStore
from pipeline.app.evaluate.measure import Work, measure
from pipeline.app.evaluate.request import Request, names_in, parse_request
from pipeline.app.evaluate.scores import TaskScores, mean_results, paired, read_scores, task_results
from pipeline.app.evaluate.sets import DataChoices, Problems, Verifiers, load_problems
from pipeline.app.evaluate.subject import Choices, Engines, Subject, open_model_subject, open_run_subject
from pipeline.app.evaluate.suite import Suite, load_suite
from pipeline.app.evaluate.tables import comparison_page, results_page, results_table
from pipeline.core.component import Context
from pipeline.core.errors import ConfigError, DataError, RunError
from pipeline.run.compose import search_dirs
from pipeline.run.run_directory import locked, write_aside, writing

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One subject's evaluation, ready to run: problems loaded, records opened, nothing asked.

    Attributes:
        subject, suite: what is evaluated on what.
        folder: eval/SUITE/CHECKPOINT of the subject.
        works: one per task.
        contamination: task → report.
    """

    subject: Subject
    suite: Suite
    folder: Path
    works: list[Work]
    contamination: dict[str, dict[str, Any]]


def evaluate_suite(arguments: Sequence[str], config_dirs: Sequence[str], fresh: bool, compare: bool, say: Say) -> None:
    """Evaluates every subject on every task, and writes results.

    Args:
        arguments: as of `Request`.
        config_dirs: further config folders.
        fresh: throw away earlier records of these tasks.
        compare: only read what is there; RunError when something is missing.
        say: gets progress, notes and tables.
    """
    request = parse_request(arguments)
    dirs = search_dirs(config_dirs)
    changes = request.changes
    settings = {
        k: v
        for k, v in (
            ("tasks", changes.get("tasks")),
            ("contamination", changes.get("contamination")),
            ("seed", request.seed),
        )
        if v is not None
    }
    suite = load_suite(request.suite, dirs, settings, names_in(request.tasks))
    subjects = open_subjects(request, dirs)
    finished: dict[str, dict[str, TaskScores]] = {}
    pages: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        verifiers, engines = (
            stack.enter_context(closing(Verifiers(subjects[0].spec))),
            stack.enter_context(closing(Engines())),
        )
        folders = [stack.enter_context(_locked(subject, suite, request.label)) for subject in subjects]
        # All of them first: a mistake in the last subject shows before the first is asked.
        plans = [
            prepare(s, suite, f, request, config_dirs, verifiers, fresh, say)
            for s, f in zip(subjects, folders, strict=True)
        ]
        for plan in plans:
            _ask_missing(plan, engines, verifiers, compare, say)
            scores = {w.problems.name: read_scores(w.store, w.chunks, w.problems.task) for w in plan.works}
            results = write_results(plan, scores)
            if len(subjects) == 1 or not compare:
                say(f"\n{results_table(results)}\n\nwrote {plan.folder / 'results.md'}, results.json and items/\n")
            finished[plan.subject.name], pages[plan.subject.name] = scores, results
    if len(subjects) > 1:
        say(write_comparison(subjects, suite, request.label, finished, pages))


def open_subjects(request: Request, dirs: Sequence[Path]) -> list[Subject]:
    """Every run and model of the request, runs first; two of the same name get their folder's, too."""
    model = request.changes.get("model") or {}
    engine = request.changes.get("engine") or {}
    choices = Choices(
        dirs=dirs,
        engine=request.engine,
        engine_settings=engine,
        model_settings=model,
        device=request.device,
        root=Path(request.root),
    )
    found = [open_run_subject(Path(p).expanduser(), request.checkpoint, choices) for p in names_in(request.run)]
    found += [open_model_subject(name, choices) for name in names_in(request.model)]
    names = [s.name for s in found]
    if len(set(names)) == len(names):
        return found
    longer = [dataclasses.replace(s, name=str(s.folder)) for s in found]
    if len({s.name for s in longer}) < len(longer):
        raise ConfigError(
            f"eval: {', '.join(sorted(s.name for s in longer))}: the same subject twice; wanted each once."
        )
    return longer


def prepare(
    subject: Subject,
    suite: Suite,
    folder: Path,
    request: Request,
    config_dirs: Sequence[str],
    verifiers: Verifiers,
    fresh: bool,
    say: Say,
) -> Plan:
    """Loads problems, opens records and searches the training data; asks nothing. Every mistake shows here."""
    data = DataChoices(config_dirs=config_dirs, changes=request.changes.get("data") or {})
    train = _train_entry(subject, request, data)
    tokenizer = load_tokenizer(subject.spec)
    sets = load_problems(suite, data, subject.spec, tokenizer)
    for problems in sets:
        verifiers.check(problems.verifier, f"tasks.{problems.name}")
    for note in [*subject.notes, *(n for p in sets for n in p.notes)]:
        say(f"note: {note}")
    for problems in sets if fresh else ():
        shutil.rmtree(folder / "items" / problems.name, ignore_errors=True)
    stores = {
        p.name: ItemStore(folder / "items" / p.name, _made_with(subject, suite, p, train), request.chunk) for p in sets
    }
    contamination = search(sets, stores, train, subject, suite, tokenizer, say)
    works = []
    for p in sets:
        report = contamination[p.name]
        hit = {i["problem"] for i in report.get("overlapping", ()) if i["flagged"]}
        flagged = [n in hit for n in range(len(p.ids))] if report["status"] == "checked" else None
        works.append(Work(problems=p, store=stores[p.name], flagged=flagged, seed=suite.seed))
    return Plan(subject=subject, suite=suite, folder=folder, works=works, contamination=contamination)


def search(
    sets: Sequence[Problems],
    stores: Mapping[str, ItemStore],
    train: dict[str, Any] | None,
    subject: Subject,
    suite: Suite,
    tokenizer: Any,
    say: Say,
) -> dict[str, dict[str, Any]]:
    """Task → contamination report; read from disk where an earlier start of this evaluation wrote it."""
    reports: dict[str, dict[str, Any]] = {}
    for problems in sets:
        with suppress(OSError, ValueError):
            reports[problems.name] = json.loads(
                (stores[problems.name].folder / "_contamination.json").read_text(encoding="utf-8")
            )
    left = [p for p in sets if p.name not in reports]
    if left:
        reports |= _searched(left, train, subject, suite, tokenizer, say)
        for p in left:
            write_aside(
                stores[p.name].folder / "_contamination.json",
                json.dumps(reports[p.name], indent=1, ensure_ascii=False) + "\n",
            )
    return {p.name: reports[p.name] for p in sets}


def _searched(
    sets: Sequence[Problems], train: dict[str, Any] | None, subject: Subject, suite: Suite, tokenizer: Any, say: Say
) -> dict[str, dict[str, Any]]:
    if train is None:
        return {p.name: {"status": "no training data is named; set train=DATA, or leave it"} for p in sets}
    try:
        rows = load_data(train, Context(node="contamination", model=subject.spec), tokenizer, place="data.train").rows
    except DataError as error:
        say(f"note: the training data cannot be read, so contamination is not checked ({error})")
        return {p.name: {"status": f"the training data could not be read ({error})"} for p in sets}
    found = Search(suite.contamination)
    for p in sets:
        found.add(p.name, p.questions)
    found.scan(str(row.metadata["question"]) for row in rows)
    overlaps = found.overlaps()
    where = str(train.get("path") or train.get("name") or train.get("source") or "chains")
    return {p.name: report_of(found, where, overlaps[p.name], p.ids) for p in sets}


def _ask_missing(plan: Plan, engines: Engines, verifiers: Verifiers, compare: bool, say: Say) -> None:
    missing = {w.problems.name: w.missing() for w in plan.works}
    for w in plan.works:
        for name in w.store.damaged:
            say(f"note: {w.store.folder / name} is not whole; its items are asked again")
    if not any(missing.values()):
        return
    if compare:
        left = ", ".join(n for n, chunks in missing.items() if chunks)
        raise RunError(
            f"{plan.folder}: {left} not finished; --compare only reads. Run the same command without --compare first."
        )
    policy = engines.start(plan.subject)
    for w in plan.works:
        chunks, name = missing[w.problems.name], w.problems.name
        there = sum(c.rows for c in w.chunks) - sum(c.rows for c in chunks)
        say(
            f"{plan.subject.name}, {name}: {sum(c.rows for c in chunks)} responses to ask"
            + (f", {there} were there" if there else ""),
        )

        def told(chunk: Chunk, right: int, name: str = name) -> None:
            say(f"  {name}, {chunk.part} {chunk.first}–{chunk.last - 1}: {right} of {chunk.rows} right")

        measure(w, policy, verifiers.of(w.problems.verifier, f"tasks.{name}"), told)


def write_results(plan: Plan, scores: Mapping[str, TaskScores]) -> dict[str, Any]:
    """Writes results.json, results.md, contamination.json and rejected.jsonl; returns the results. No clock is in them."""
    subject, suite = plan.subject, plan.suite
    tasks = {}
    for w in plan.works:
        p = w.problems
        tasks[p.name] = {
            **task_results(p.name, scores[p.name], suite),
            "rejected": p.num_rejected,
            "set": p.task.data + (f" ({p.task.split})" if p.task.split else ""),
            "verifier": p.verifier,
            "settings": _settings(p),
            "origin": p.task.origin,
        }
    results = {
        "suite": suite.name,
        "title": suite.title,
        "version": suite.version,
        "subject": subject.name,
        "checkpoint": subject.checkpoint,
        "weights": subject.fingerprint,
        "model": dataclasses.asdict(subject.spec),
        "engine": subject.engine.use,
        "device": subject.device,
        "seed": suite.seed,
        "confidence": suite.confidence,
        "resamples": suite.resamples,
        "tasks": tasks,
        "mean": mean_results(scores, suite),
        "contamination": {n: {k: v for k, v in r.items() if k != "overlapping"} for n, r in plan.contamination.items()},
    }
    rejected = [json.dumps(r, ensure_ascii=False) + "\n" for w in plan.works for r in w.problems.rejected]
    for name, text in (
        ("results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n"),
        ("results.md", results_page(results)),
        ("contamination.json", json.dumps(plan.contamination, indent=1, ensure_ascii=False) + "\n"),
        ("rejected.jsonl", "".join(rejected)),
    ):
        write_aside(plan.folder / name, text)
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
    tasks = {}
    for task in suite.tasks:
        metrics = list(scores[names[0]][task].metrics)
        values = {
            m: {n: results[n]["tasks"][task]["metrics"][m] for n in names if m in scores[n][task].metrics}
            for m in metrics
        }
        differences = {n: paired(task, scores[names[0]][task], scores[n][task], suite) for n in names[1:]}
        tasks[task] = {"metrics": values, "differences": differences}
    comparison = {
        "suite": suite.name,
        "version": suite.version,
        "subjects": names,
        "checkpoints": {s.name: s.checkpoint for s in subjects},
        "engines": {s.name: s.engine.use for s in subjects},
        "confidence": suite.confidence,
        "resamples": suite.resamples,
        "tasks": tasks,
    }
    folder = subjects[0].folder / "eval" / suite.name
    stem = f"comparison-{label}" if label else "comparison"
    page = comparison_page(comparison)
    write_aside(folder / f"{stem}.json", json.dumps(comparison, indent=1, ensure_ascii=False) + "\n")
    write_aside(folder / f"{stem}.md", page)
    uneven = [
        f"{t}: {d['only_first']} only in {names[0]}, {d['only_second']} only in {n}"
        for t, v in tasks.items()
        for n, d in v["differences"].items()
        if d["only_first"] or d["only_second"]
    ]
    notes = "".join(f"note: {line}; the difference is over the others\n" for line in uneven)
    return f"{page}\n{notes}wrote {folder / f'{stem}.md'} and {stem}.json"


def _settings(p: Problems) -> dict[str, Any]:
    task, sampled = p.task, p.task.samples > 0
    shown: dict[str, Any] = {
        "mode": task.mode,
        "template": str(p.prompts.metadata[0].get("template", "")),
        "max_tokens": task.max_tokens,
    }
    if task.mode == "thought":
        shown["thoughts"] = {"max_tokens": task.thoughts.max_tokens, "max_thoughts": task.thoughts.max_thoughts}
    shown |= {"greedy": task.greedy, "samples": task.samples}
    return shown | ({"temperature": task.temperature, "top_p": task.top_p, "k": list(task.k)} if sampled else {})


def _made_with(subject: Subject, suite: Suite, p: Problems, train: dict[str, Any] | None) -> dict[str, Any]:
    """Everything the records of a task depend on."""
    task = {k: v for k, v in dataclasses.asdict(p.task).items() if k not in ("origin", "k", "majority", "verifier")}
    return {
        "suite": suite.name,
        "suite_version": suite.version,
        "seed": suite.seed,
        "task": task,
        "data": p.source,
        "problems": p.fingerprint,
        "verifier": p.verifier,
        "weights": subject.fingerprint,
        "model": dataclasses.asdict(subject.spec),
        "engine": subject.engine.use,
        "device": subject.device.partition(":")[0],
        "contamination": dataclasses.asdict(suite.contamination) | {"train": train},
    }


def _train_entry(subject: Subject, request: Request, data: DataChoices) -> dict[str, Any] | None:
    if not request.contamination:
        return None
    return data.entry(request.train, "train", "train") if request.train else subject.train


@contextmanager
def _locked(subject: Subject, suite: Suite, label: str) -> Iterator[Path]:
    """The folder of an evaluation, for one process at a time."""
    folder = subject.folder / "eval" / suite.name / (subject.checkpoint + (f"-{label}" if label else ""))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock", "use label=NAME"):
        yield folder
