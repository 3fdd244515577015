"""Writes the rollouts of another trainer's files as a run directory, and computes a graph's credit for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.imports.batch import Texts, payloads
from creditgraph.adapters.imports.formats import files_of
from creditgraph.adapters.imports.row import Format, Options, Row, reason_of
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import ModelSpec
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError, extra
from creditgraph.pipeline.core.payloads import Payload, Rewards
from creditgraph.pipeline.run.compose.experiment import Experiment, build_experiment
from creditgraph.pipeline.run.metrics import JsonLines
from creditgraph.pipeline.run.recorder import Recorder, RecordSettings
from creditgraph.pipeline.run.run_directory import RunDirectory, write_json
from creditgraph.pipeline.run.session import GraphSession

NO_TOKENIZER = "./no-tokenizer-was-given"
"""model.path of a run whose tokens nothing turns into text"""
_NODES = "creditgraph.adapters.imports.nodes"
_COLUMNS = {
    "advantage": "advantages, so tokens have no credit",
    "mask": "masks, so all tokens of a response count as trained",
    "logprobs": "log-probs of the policy that sampled",
    "old_logprobs": "log-probs of the trainer, so no ratio is shown",
    "reference_logprobs": "log-probs of a reference model",
}
REASONS = 5  # of skipped rows that are printed


@dataclass
class Imported:
    """What was read.

    Attributes:
        path: the run directory.
        steps: step → number of responses.
        skipped: reason → number of rows.
        lacking: sentences on what no row had, and how to add it.
    """

    path: Path
    steps: dict[int, int] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    lacking: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to import, and how.

    Attributes:
        files: files and folders.
        reader: their format.
        target: the run directory, new.
        options: what the files do not say.
        tokenizer: folder or hub name of the model's tokenizer, "" without.
        graph: computes the credit; "" takes the recorded advantages.
        settings: of that graph, as on the command line.
        turns: whether turns become rows, as in runs with environments; they do where rows are steps of episodes.
        endpoint, model: of a server that scores texts for `creditgraph credit`; "" without.
    """

    files: Sequence[Path]
    reader: Format
    target: Path
    options: Options = field(default_factory=Options)
    tokenizer: str = ""
    graph: str = ""
    settings: Sequence[str] = ()
    turns: bool = False
    endpoint: str = ""
    model: str = ""


def import_files(request: Request) -> Imported:
    """Writes the run directory.

    Raises:
        ConfigError: no such file, or the graph cannot credit recorded rollouts, or not turns.
        DataError: no row could be read; the reasons are in rejected.jsonl of the folder.
        RunError: the target holds another run.
    """
    if RunDirectory(request.target).has_results:
        raise RunError(f"{request.target}: holds a run already; choose another folder with -o, or remove this one.")
    graph = CreditGraph(request.graph, *request.settings) if request.graph else None
    files = files_of(request.files, request.reader)
    texts = Texts(_tokenizer(request.tokenizer))
    rejected: list[dict[str, Any]] = []
    steps = {
        step: request.reader.joined(rows) for step, rows in _by_step(_rows(files, request, texts, rejected)).items()
    }
    in_steps = any(row.episode is not None for rows in steps.values() for row in rows)
    turns = request.turns or in_steps or (graph is not None and graph.turns)
    if turns and graph is not None and not graph.turns:
        raise ConfigError(
            f"--graph {graph.name}: it credits whole responses, but the rows are turns (--turns, or steps of "
            "episodes), so that an episode would count once for each. Choose a graph of turns, as grpo_turns or "
            "gigpo, or none for the recorded advantages."
        )
    experiment = build_experiment(_configuration(request, graph, len(steps)), "the imported run")
    done = Imported(request.target, {step: len(rows) for step, rows in steps.items()})
    done.skipped.update(row["reason"] for row in rejected)
    done.lacking = _lacking([row for rows in steps.values() for row in rows], request, texts.made)
    gaps = sum(not all(row.mask or (True,)) for rows in steps.values() for row in rows)
    if gaps and graph is not None and not turns:
        done.lacking.append(
            f"{gaps:,} responses hold tokens that the policy did not sample; {graph.name} credits those as the others"
        )
    with RunDirectory.open(request.target, experiment.public) as run:
        with closing(JsonLines(run.rejected_path)) as file:
            file.write(rejected)
        if not steps:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in done.skipped.most_common(REASONS))
            raise DataError(f"no rollout was read from {len(files)} files: {reasons or 'they are empty'}.")
        _write(run, experiment, steps, turns)
        write_json(run.path / "data_card.json", {"imported": _card(request, files, done)})
    return done


def _tokenizer(name: str) -> Any:
    if not name:
        return None
    with extra("train", "--tokenizer"):
        import transformers  # noqa: F401
    return load_tokenizer(ModelSpec(path=name))


def _rows(files: Sequence[Path], request: Request, texts: Texts, rejected: list[dict[str, Any]]) -> Iterator[Row]:
    """The rows of all files, with token ids; the others are added to `rejected`."""
    for file in files:
        for place, entry in request.reader.entries(file):
            try:
                if isinstance(entry, Exception):
                    raise entry
                found = [texts.with_tokens(row) for row in request.reader.rows(entry, file, request.options)]
                if any(not row.tokens for row in found):
                    raise DataError("the response is empty")
            except (DataError, LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                where = {"node": "rollouts", "iteration": 0, "row": f"{file}: {place}"}
                rejected.append({**where, "reason": reason_of(error)})
                continue
            yield from found


def _by_step(rows: Iterator[Row]) -> dict[int, list[Row]]:
    steps: dict[int, list[Row]] = {}
    for row in rows:
        steps.setdefault(row.step or 0, []).append(row)
    return dict(sorted(steps.items()))


def _configuration(request: Request, graph: CreditGraph | None, iterations: int) -> dict[str, Any]:
    """The graph of an imported run: recorded rollouts, perhaps the nodes that credit them, and the other trainer."""
    trainer = {"trainer": request.reader.name}
    nodes, computed = ({}, "") if graph is None else graph.described("rollouts")
    folder = Path(request.tokenizer or NO_TOKENIZER)
    policy = {"url": request.endpoint, "model": request.model}
    model = str(folder.absolute()) if folder.is_dir() else request.tokenizer
    return {
        "nodes": {
            "rollouts": {"use": f"{_NODES}:ImportedRollouts", "config": trainer},
            "verifier": {"use": f"{_NODES}:RecordedVerifier", "in": {"rewards": "rollouts.rewards"}},
            **nodes,
            **({"policy": {"use": f"{_NODES}:Endpoint", "config": policy}} if request.endpoint else {}),
            "trainer": {
                "use": f"{_NODES}:ImportedTrainer",
                "in": {
                    "trajectories": "rollouts.trajectories",
                    "credit": [wire for wire in (computed, "rollouts.credit") if wire],
                },
                "config": trainer,
            },
        },
        "run": {
            "name": request.target.resolve().name,
            "root": str(request.target.resolve().parent),
            "iterations": iterations,
            "device": "cpu",
        },
        "model": {"path": model or NO_TOKENIZER},
        "data": {},
    }


def _write(run: RunDirectory, experiment: Experiment, steps: Mapping[int, Sequence[Row]], turns: bool) -> None:
    """Records each step, and what the graph's own nodes make of it; one line of metrics per step."""
    recorder = Recorder(run.path / "record", RecordSettings(), experiment.graph)
    recorder.resume(-1, {})
    try:
        with closing(JsonLines(run.metrics_path)) as metrics, GraphSession(experiment) as session:
            for step, rows in steps.items():
                made = payloads(rows, step, turns)
                for name, value in made.items():
                    source, _, output = name.partition(".")
                    session.give(source, step, {output: value})
                    recorder.put(source, output, step, value)
                logged = _metrics(made)
                for node in experiment.graph.nodes:
                    if node.use.startswith(_NODES):
                        continue
                    session.runner(node).context.iteration = step
                    for output, value in session.run(node, step).items():
                        recorder.put(node.name, output, step, value)
                    logged |= session.runner(node).harvest().metrics
                metrics.log(step, logged)
    finally:
        recorder.close()


def _metrics(made: Mapping[str, Payload]) -> dict[str, float]:
    rewards = made["rollouts.rewards"]
    assert isinstance(rewards, Rewards)
    valid = rewards.value[rewards.valid]
    return {
        "rewards/mean": float(valid.mean()) if len(valid) else float("nan"),
        "rewards/valid_share": float(rewards.valid.float().mean()),
        "rollouts/rows": float(len(rewards)),
    }


def _lacking(rows: Sequence[Row], request: Request, made: int) -> list[str]:
    """Sentences on the columns that no row has."""
    patches = request.reader.patches
    out = []
    if made:
        what = f"token ids in {made:,} of {len(rows):,} responses, so those of the tokenizer for the text are used"
        out.append(_sentence(what, patches.get("tokens")))
    for name, what in _COLUMNS.items():
        if name == "advantage" and request.graph:
            continue
        if all(getattr(row, name) is None for row in rows):
            out.append(_sentence(what, patches.get(name)))
    return out


def _sentence(what: str, patch: str | None) -> str:
    return f"no {what}" + (f": {patch}" if patch else "")


def _card(request: Request, files: Sequence[Path], done: Imported) -> dict[str, Any]:
    return {
        "format": request.reader.name,
        "read as": request.reader.source,
        "files": len(files),
        "first file": str(files[0]),
        "responses": sum(done.steps.values()),
        "skipped": sum(done.skipped.values()),
        "tokenizer": request.tokenizer or "none",
        "credit": f"computed by graph {request.graph}" if request.graph else "as recorded",
        "lacks": done.lacking,
    }
