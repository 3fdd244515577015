"""`creditgraph eval … suite=NAME`: evaluates every subject on every task of a suite."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditgraph.components.data.loading import load_data
from creditgraph.components.models.load import load_tokenizer
from creditgraph.lab.evaluate.contamination import find_overlaps, report_of
from creditgraph.lab.evaluate.items import Chunk, ItemStore
from creditgraph.lab.evaluate.measure import Work, measure
from creditgraph.lab.evaluate.request import Request, names_in, parse_request
from creditgraph.lab.evaluate.results import results_table, write_comparison, write_results
from creditgraph.lab.evaluate.scores import TaskScores, read_scores
from creditgraph.lab.evaluate.sets import Problems, SuiteVerifiers, data_entry, load_problems
from creditgraph.lab.evaluate.subject import Engines, Subject, open_model_subject, open_run_subject
from creditgraph.lab.evaluate.suite import Suite, load_suite
from creditgraph.pipeline.core.component import Context
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError
from creditgraph.pipeline.run.compose.choices import search_dirs
from creditgraph.pipeline.run.run_directory import locked, make_folder, write_json

CONTAMINATION = "_contamination.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """State shared by all subjects of a command.

    Attributes:
        request, suite: what is evaluated, and how.
        config_dirs: further config folders.
        verifiers, engines: started when they are first needed.
        say: gets progress, notes and tables.
    """

    request: Request
    suite: Suite
    config_dirs: Sequence[str]
    verifiers: SuiteVerifiers
    engines: Engines
    say: Callable[[str], None]

    def prepare(self, subject: Subject, folder: Path, fresh: bool) -> list[Work]:
        """One work per task: loads problems, opens records and searches the training data; samples nothing.

        Every mistake of the user shows here.
        """
        tokenizer = load_tokenizer(subject.spec)
        train = self._training_data(subject)
        sets = load_problems(self.suite, subject.spec, tokenizer, self.request.changed("data"), self.config_dirs)
        for problems in sets:
            self.verifiers.check(problems)
        for note in [*subject.checkpoint.notes, *(note for problems in sets for note in problems.notes)]:
            self.say(f"note: {note}")
        works = []
        for problems in sets:
            items = folder / "items" / problems.name
            if fresh:
                shutil.rmtree(items, ignore_errors=True)
            store = ItemStore(items, self._made_with(subject, problems, train), self.request.chunk)
            works.append(Work(problems=problems, store=store, seed=self.suite.seed))
        self._search_training_data(works, train, subject, tokenizer)
        return works

    def sample_missing(self, subject: Subject, works: Sequence[Work], compare: bool) -> None:
        """Samples and verifies what is not on disk; RunError instead where `compare` forbids it."""
        missing = {work.problems.name: work.missing() for work in works}
        for work in works:
            for name in work.store.damaged:
                self.say(f"note: {work.store.folder / name} is not whole; its responses are sampled again")
        if not any(missing.values()):
            return
        if compare:
            unfinished = ", ".join(name for name, chunks in missing.items() if chunks)
            raise RunError(
                f"{subject.name}: {unfinished} not finished; --compare only reads. Run the same command without "
                "--compare first."
            )
        # Started only now: reading finished records needs no model.
        policy = self.engines.start(subject)
        for work in works:
            name = work.problems.name
            left = sum(chunk.rows for chunk in missing[name])
            on_disk = sum(chunk.rows for chunk in work.chunks) - left
            kept = f", {on_disk} are on disk" if on_disk else ""
            self.say(f"{subject.name}, {name}: {left} responses to sample{kept}")

            def on_chunk(chunk: Chunk, right: int, name: str = name) -> None:
                self.say(f"  {name}, {chunk.part} {chunk.first}–{chunk.last - 1}: {right} of {chunk.rows} right")

            measure(work, policy, self.verifiers.of(work.problems), on_chunk)

    def _training_data(self, subject: Subject) -> dict[str, Any] | None:
        """The data entry that is searched for the problems."""
        request = self.request
        if not request.contamination:
            return None
        return data_entry(request.train, "train", "train", self.config_dirs) if request.train else subject.train

    def _made_with(self, subject: Subject, problems: Problems, train: dict[str, Any] | None) -> dict[str, Any]:
        """Everything the records of a task depend on; estimates over the records may change."""
        task = dataclasses.asdict(problems.task)
        for name in ("origin", "k", "majority", "verifier"):
            del task[name]
        return {
            "suite": self.suite.name,
            "suite_version": self.suite.version,
            "seed": self.suite.seed,
            "task": task,
            "data": problems.source,
            "problems": problems.fingerprint,
            "verifier": problems.verifier,
            "weights": subject.checkpoint.fingerprint,
            "model": dataclasses.asdict(subject.spec),
            "engine": subject.engine.use,
            "device": subject.device.partition(":")[0],
            "contamination": dataclasses.asdict(self.suite.contamination) | {"train": train},
        }

    def _search_training_data(
        self, works: Sequence[Work], train: dict[str, Any] | None, subject: Subject, tokenizer: Any
    ) -> None:
        """Adds the contamination reports; read from disk where an earlier start of this evaluation wrote them."""
        for work in works:
            with suppress(OSError, ValueError):
                work.contamination = json.loads((work.store.folder / CONTAMINATION).read_text(encoding="utf-8"))
        left = [work for work in works if not work.contamination]
        reports = self._search([work.problems for work in left], train, subject, tokenizer) if left else {}
        for work in left:
            work.contamination = reports[work.problems.name]
            write_json(work.store.folder / CONTAMINATION, work.contamination)

    def _search(
        self, sets: Sequence[Problems], train: dict[str, Any] | None, subject: Subject, tokenizer: Any
    ) -> dict[str, dict[str, Any]]:
        if train is None:
            status = "no training data is named; set train=DATA, or leave it"
            return {problems.name: {"status": status} for problems in sets}
        context = Context(node="contamination", model=subject.spec)
        try:
            rows = load_data(train, context, tokenizer, place="data.train").rows
        except DataError as error:
            self.say(f"note: the training data cannot be read, so contamination is not checked ({error})")
            return {problems.name: {"status": f"the training data could not be read ({error})"} for problems in sets}
        settings = self.suite.contamination
        questions = (str(row.metadata["question"]) for row in rows)
        overlaps, num_rows = find_overlaps({p.name: p.questions for p in sets}, questions, settings)
        source = str(train.get("path") or train.get("name") or train.get("source"))
        return {p.name: report_of(overlaps[p.name], p.ids, source, num_rows, settings) for p in sets}


def evaluate_suite(
    arguments: Sequence[str], config_dirs: Sequence[str], fresh: bool, compare: bool, say: Callable[[str], None]
) -> None:
    """Evaluates every subject on every task, and writes results.

    Args:
        arguments: as of `Request`.
        config_dirs: further config folders.
        fresh: throw away earlier records of these tasks.
        compare: only read what is on disk; RunError when something is missing.
        say: gets progress, notes and tables.
    """
    request = parse_request(arguments)
    dirs = search_dirs(config_dirs)
    suite = load_suite(request.suite, dirs, request.suite_changes, names_in(request.tasks))
    subjects = open_subjects(request, dirs)
    finished: dict[str, dict[str, TaskScores]] = {}
    results: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        evaluation = Evaluation(
            request=request,
            suite=suite,
            config_dirs=config_dirs,
            verifiers=stack.enter_context(closing(SuiteVerifiers(subjects[0].spec))),
            engines=stack.enter_context(closing(Engines())),
            say=say,
        )
        folders = [stack.enter_context(_locked(subject, suite, request.label)) for subject in subjects]
        # All of them first: a mistake in the last subject shows before the first is sampled.
        prepared = [evaluation.prepare(s, folder, fresh) for s, folder in zip(subjects, folders, strict=True)]
        for subject, folder, works in zip(subjects, folders, prepared, strict=True):
            evaluation.sample_missing(subject, works, compare)
            name = subject.name
            finished[name] = {w.problems.name: read_scores(w.store, w.chunks, w.problems.task) for w in works}
            results[name] = write_results(folder, subject, suite, works, finished[name])
            if len(subjects) == 1 or not compare:
                table = results_table(results[name])
                say(f"\n{table}\n\nwrote {folder / 'results.md'}, results.json and items/\n")
    if len(subjects) > 1:
        say(write_comparison(subjects, suite, request.label, finished, results))


def open_subjects(request: Request, dirs: Sequence[Path]) -> list[Subject]:
    """Every run and model of the request, runs first; subjects of the same name are named by their folders."""
    subjects = [open_run_subject(Path(path).expanduser(), request, dirs) for path in names_in(request.run)]
    subjects += [open_model_subject(name, request, dirs) for name in names_in(request.model)]
    if len({s.name for s in subjects}) < len(subjects):
        subjects = [dataclasses.replace(s, name=str(s.folder)) for s in subjects]
    if len({s.name for s in subjects}) < len(subjects):
        raise ConfigError(f"eval: {', '.join(sorted(s.name for s in subjects))}: expected each subject once.")
    return subjects


@contextmanager
def _locked(subject: Subject, suite: Suite, label: str) -> Iterator[Path]:
    """The folder of an evaluation, for one process at a time."""
    folder = subject.folder / "eval" / suite.name / (subject.checkpoint.name + (f"-{label}" if label else ""))
    make_folder(folder)
    with locked(folder / "lock", "use label=NAME"):
        yield folder
