"""`creditgraph localization`: where a run reset its failures, against where they first went wrong.

Prints the tables and writes failures.jsonl, answers.jsonl (of a judge) and the figure to RUN/localization.
docs/papers/srpo.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from creditgraph.pipeline.app.arguments import add_output
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError
from creditgraph.pipeline.run.run_directory import make_folder, write_aside

if TYPE_CHECKING:
    from creditgraph.lab.localization.labels import Labels
    from creditgraph.lab.localization.records import Failure

SUMMARY = "Compare the localised steps of a run's failures with their true first errors."


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.epilog = (
        "examples:\n"
        "  creditgraph localization runs/toy_srpo-s0                 # the embedded task knows its true first errors\n"
        "  creditgraph localization RUN --judge http://127.0.0.1:8000/v1 --judge-model Qwen/Qwen3-32B\n"
        "  creditgraph localization RUN --labels labels.jsonl        # lines with uid and first_error\n"
        "  creditgraph localization TRACES.jsonl --judge URL --judge-model NAME   # lines as BIG-Bench-Mistake's\n\n"
        "A key for the judge's server goes into the environment variable OPENAI_API_KEY."
    )
    parser.add_argument(
        "run",
        metavar="RUN|FILE",
        type=Path,
        help="run directory (train with run.record.every=1), or labelled traces in BIG-Bench-Mistake's format",
    )
    truth = parser.add_mutually_exclusive_group()
    truth.add_argument("--judge", metavar="URL", help="base URL of an OpenAI-compatible server that names the errors")
    truth.add_argument("--labels", metavar="FILE", type=Path, help="JSONL or Parquet with uid and first_error")
    parser.add_argument("--judge-model", metavar="NAME", help="model of the judge's server")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a judge's answer (default: 4096)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests to the judge at a time (default: 8)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a request to the judge (default: 120)")
    parser.add_argument("--limit", type=int, metavar="N", help="label at most N failures, evenly spaced over the run")
    parser.add_argument(
        "--min-words", type=int, default=0, help="steps with fewer words do not count in a deviation (default: 0)"
    )
    add_output(parser, "DIR", "default: localization in the run", type=Path)
    parser.add_argument("--format", choices=["png", "svg"], default="png", help="of the figure (default: png)")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def main(options: argparse.Namespace) -> int:
    """Prints the results, writes the files."""
    _check(options)
    if options.run.suffix == ".jsonl":
        return _traces(options)
    from creditgraph.lab.localization.gradient_signal import gradient_signal
    from creditgraph.lab.localization.records import read_failures
    from creditgraph.lab.localization.show import Result, draw, numbers, tables
    from creditgraph.lab.localization.study import study
    from creditgraph.pipeline.app.report.source import read_run, spread
    from creditgraph.pipeline.app.text import visible
    from creditgraph.pipeline.run.metrics import plain

    run = read_run(options.run)
    everything = read_failures(run)
    folder: Path = options.output or options.run / "localization"
    failures = spread(everything, options.limit) if options.limit and everything else everything
    labels = _labels(options, failures, folder) if failures else None
    result = Result(
        run=run.name,
        iterations=len({f.iteration for f in failures}),
        failures=len(failures),
        labels=labels,
        study=study(failures, labels.step, options.min_words) if labels else None,
        signal=gradient_signal(run, (f.uid for f in everything)),
        min_words=options.min_words,
    )
    if not failures:
        run.note("no localised failure is recorded, so there is no localisation")
        if not result.signal:
            raise RunError(
                f"{options.run}: neither localised failures nor credit with log-probs are recorded; expected a run of "
                "a graph with a localizer and run.record.every=1."
            )
    if options.json:
        notes = [*run.notes, *(labels.notes if labels else ())]
        print(json.dumps(plain(numbers(result) | {"notes": notes}), indent=1))
    else:
        for note in [*run.notes, *(labels.notes if labels else ())]:
            print(f"note: {visible(note)}")
        print(tables(result))
    make_folder(folder, "--output DIR")
    draw(result, folder / f"localization.{options.format}")
    if labels is not None:
        _write(folder / "failures.jsonl", failures, labels.step)
    if not options.json:
        print(f"\nwrote {folder}/localization.{options.format}" + (" and failures.jsonl" if labels else ""))
    return 0


def _traces(options: argparse.Namespace) -> int:
    """Prints how a judge, or a file of labels, agrees with labelled traces."""
    from creditgraph.lab.localization.traces import agreement, agreement_table, read_traces
    from creditgraph.pipeline.app.report.source import spread
    from creditgraph.pipeline.app.text import visible
    from creditgraph.pipeline.run.metrics import plain

    if not options.judge and not options.labels:
        raise ConfigError(
            f"{options.run}: expected --judge URL --judge-model NAME, or --labels FILE whose uid is the line's number, "
            "to compare with its labels."
        )
    failures, sound = read_traces(options.run)
    failures = spread(failures, options.limit) if options.limit and failures else failures
    labels = _labels(options, failures, options.output or options.run.with_suffix(""))
    if options.json:
        result = {name: s if isinstance(s, float) else s.numbers() for name, s in agreement(failures, labels).items()}
        counts = {"traces": len(failures), "without_mistake": sound, "unlabelled": dict(labels.unlabelled)}
        print(json.dumps(plain({"truth": labels.name, **counts, **result, "notes": labels.notes}), indent=1))
        return 0
    for note in labels.notes:
        print(f"note: {visible(note)}")
    print(agreement_table(options.run.name, failures, sound, labels))
    return 0


def _check(options: argparse.Namespace) -> None:
    if bool(options.judge) != bool(options.judge_model):
        missing = "--judge-model, the name of its model" if options.judge else "--judge, the URL of its server"
        raise ConfigError(f"a judge also needs {missing}.")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: expected at least 1.")
    if options.min_words < 0:
        raise ConfigError(f"--min-words {options.min_words}: expected 0 (all steps count) or more.")


def _labels(options: argparse.Namespace, failures: Sequence[Failure], folder: Path) -> Labels:
    """The true first errors, from where the options say."""
    from creditgraph.lab.localization.judge import JudgeSettings, judge_labels
    from creditgraph.lab.localization.labels import file_labels, oracle_labels

    if options.judge:
        settings = JudgeSettings(
            url=options.judge,
            model=options.judge_model,
            max_tokens=options.max_tokens,
            concurrency=options.concurrency,
            seconds=options.seconds,
        )
        return judge_labels(
            settings,
            failures,
            folder / "answers.jsonl",
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    if options.labels:
        return file_labels(options.labels, failures)
    labels = oracle_labels(failures)
    if labels is None:
        file = folder / "failures.jsonl"
        make_folder(folder, "--output DIR")
        _write(file, failures, {})
        raise DataError(
            f"{options.run}: the true first errors of this task are not known. Give --judge URL --judge-model NAME, "
            f"or fill in first_error in a copy of {file} and give it as --labels."
        )
    return labels


def _write(file: Path, failures: Sequence[Failure], first_error: dict[int, int]) -> None:
    """One line per failure: the problem, its steps, where it was reset and where it first went wrong."""
    rows = [
        {
            "uid": str(f.uid),  # as text, because many JSON readers keep 53 bits
            "iteration": f.iteration,
            "problem": f.problem,
            "answer": f.answer,
            "steps": f.steps,
            "localized_step": f.step,
            "source": f.source,
            "suffixes": f.suffixes,
            "correct_suffixes": f.correct,
            "first_error": first_error.get(f.uid),
        }
        for f in failures
    ]
    write_aside(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "--output DIR")
