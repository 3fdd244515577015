"""Recorded rollouts of runs as columns: one entry per trajectory, flat entries per token, texts in tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from creditgraph.components.models.load import cached_file, resolve_model_path
from creditgraph.pipeline.app.report.reasons import reasons
from creditgraph.pipeline.app.report.source import RunSource, spread
from creditgraph.pipeline.app.report.turns import add_turn
from creditgraph.pipeline.app.text import cut
from creditgraph.pipeline.core.errors import DataError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import (
    Batch,
    Credit,
    Prompts,
    Rewards,
    Segments,
    SegmentValues,
    StepErrors,
    TokenLogprobs,
    Trajectories,
    Turns,
)
from creditgraph.pipeline.run.packing import record_size
from creditgraph.pipeline.run.recording import read_table

TRAINED = 1
THOUGHT_END = 2
SEGMENT_END = 4
HAS_CREDIT = 8
HAS_RATIO = 16
HAS_ENTROPY = 32
HAS_LOGPROB = 64
LONGEST_PIECE = 400  # characters kept of one token
LONGEST_TEXT = 20_000  # characters kept of a prompt or reason


Columns = dict[str, Any]
"""Field → one entry per row; NumPy views of the rows of a `Jagged`."""


def columns_of(batch: Batch) -> Columns:
    """The fields of a batch as lists: converted once, they are read row by row much faster than tensors."""
    return {name: _column(value) for name, value in vars(batch).items()}


def _column(value: Any) -> Any:
    if isinstance(value, Jagged):
        # NumPy has no bfloat16.
        flat = (value.values.float() if value.values.is_floating_point() else value.values).numpy()
        return [flat[begin:end] for begin, end in pairwise(value.offsets.tolist())]
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _column(v) for k, v in value.items()}
    return value


class Texts:
    """A table of distinct texts; long ones are cut and marked."""

    def __init__(self, longest: int) -> None:
        self.items: list[str] = []
        self._known: dict[str, int] = {}
        self._longest = longest

    def add(self, text: str) -> int:
        """The text's number."""
        text = cut(text, self._longest)
        if text not in self._known:
            self._known[text] = len(self.items)
            self.items.append(text)
        return self._known[text]


@dataclass
class Rollouts:
    """Columns of all rollouts of a page: `rows` one list per column, `tokens` one array per rollout and column."""

    pieces: Texts = field(default_factory=lambda: Texts(LONGEST_PIECE))
    texts: Texts = field(default_factory=lambda: Texts(LONGEST_TEXT))
    rows: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: defaultdict(list))
    total: int = 0

    def __len__(self) -> int:
        return len(self.rows["uid"])

    def joined(self, name: str, dtype: Any) -> NDArray[Any]:
        """One flat array of a token column."""
        parts = self.tokens[name]
        return np.nan_to_num(np.concatenate(parts).astype(dtype)) if parts else np.zeros(0, dtype)


def roles(run: RunSource) -> dict[str, list[str]]:
    """Payload class → outputs of that class, in graph order, the learner's credit last."""
    outputs: dict[str, list[str]] = defaultdict(list)
    for name in run.outputs():
        outputs[run.classes[name]].append(name)
    learned = learner_wires(run, "credit")
    outputs["Credit"].sort(key=lambda name: name in learned)
    return outputs


def _added_later(run: RunSource, name: str) -> bool:
    """Whether no node of the run recorded it, but a command for one iteration, such as `creditgraph values`."""
    return run.graph is not None and name.partition(".")[0] not in run.graph


def learner_wires(run: RunSource, socket: str) -> list[str]:
    """ "node.output" wired into a learner's socket."""
    learners = run.graph.learners if run.graph else []
    return [f"{w.source}.{w.output}" for node in learners for w in node.wires[socket]]


def collect(runs: Iterable[RunSource], max_bytes: float = float("inf")) -> Rollouts:
    """Reads the rollouts of all runs.

    Args:
        runs: the runs, whose notes are added to.
        max_bytes: recorded bytes to read in all; beyond it, evenly spaced iterations are taken.
    """
    runs = list(runs)
    out = Rollouts()
    for number, run in enumerate(runs):
        kinds = roles(run)
        collector = _Collector(run, number, kinds, out)
        for iteration in _choose(run, kinds, max_bytes / max(len(runs), 1)):
            collector.iteration(iteration)
        collector.finish()
    return out


def _choose(run: RunSource, kinds: dict[str, list[str]], max_bytes: float) -> list[int]:
    names = {*kinds["Trajectories"], *kinds["Credit"]}
    size = sum(record_size(file) for (name, _), file in run.files.items() if name in names)
    recorded = sorted({i for name, i in run.files if name in kinds["Trajectories"]})
    chosen = spread(recorded, max(1, int(len(recorded) * min(1.0, max_bytes / max(size, 1)))))
    if len(chosen) < len(recorded):
        run.note(
            f"rollouts of {len(chosen)} of {len(recorded)} recorded iterations are shown, evenly spaced, to keep the "
            "file small"
        )
    return chosen


class _Collector:
    """Appends the rollouts of one run."""

    def __init__(self, run: RunSource, number: int, kinds: dict[str, list[str]], out: Rollouts) -> None:
        self.run = run
        self.number = number
        self.kinds = kinds
        self.out = out
        self.tokenizer = load_tokenizer(str((run.config.get("model") or {}).get("path", "")))
        if kinds["Trajectories"] and self.tokenizer is None:
            missing = "the package tokenizers is not installed (pip install 'creditgraph[train]')"
            absent = "its tokenizer is not on this machine"
            run.note(f"{absent if find_spec('tokenizers') else missing}: tokens are shown as ids")
        self._piece_of: dict[int, int] = {}
        self._prompt_of: dict[bytes, int] = {}
        self._missing: set[str] = set()

    def finish(self) -> None:
        """Notes outputs that no iteration had."""
        if not self.run.files:
            return
        for kind, missing in (
            ("Trajectories", "no rollouts"),
            ("Rewards", "no rewards"),
            ("Credit", "no credit (tokens stay plain)"),
        ):
            if not self.kinds[kind]:
                self.run.note(f"no output with {kind} is recorded: {missing}")
        for text in sorted(self._missing):
            self.run.note(text)

    def iteration(self, iteration: int) -> None:
        """Adds every trajectory recorded in an iteration once, under the node that sampled it."""
        known: dict[int, int] = {}
        rewards, credit, errors = (self._rows(kind, iteration) for kind in (Rewards, Credit, StepErrors))
        prompts = self._rows(Prompts, iteration)
        turns = self._rows(Turns, iteration)
        values = self._values(iteration)
        scores = self._logprobs(iteration, credit)
        whys = reasons(self.run, iteration)
        pending: list[tuple[int, int]] = []
        for name in self.kinds["Trajectories"]:
            if self._all_known(name, iteration, known):
                continue
            batch = self.run.read(name, iteration)
            if not isinstance(batch, Trajectories):
                continue
            table = columns_of(batch)
            pieces = self._pieces(batch.response_tokens)
            for i, uid in enumerate(table["uid"]):
                if uid in known:
                    continue
                known[uid] = len(self.out)
                pending.append((len(self.out), table["parent"][i]))
                self._row(name.partition(".")[0], iteration, table, i)
                self._outcome(uid, table["prompt_uid"][i], rewards, errors, prompts)
                add_turn(self.out, turns, uid, known)
                self.out.rows["why"].append(self.out.texts.add(whys.get(uid, "")))
                self._tokens(table, pieces[i], i, credit, values, scores)
        for row, parent in pending:
            self.out.rows["parent"][row] = known.get(parent, -1)

    def _all_known(self, name: str, iteration: int, known: dict[int, int]) -> bool:
        file = self.run.files.get((name, iteration))
        if file is None:
            self._missing.add(f"{name} is not recorded in every iteration")
            return True
        try:
            uids = read_table(file, ["uid"]).column("uid").to_pylist()
        except (pa.ArrowException, OSError, KeyError, DataError):
            return False  # reading all of it will note the error
        return bool(uids) and all(u in known for u in uids)

    def _rows(self, kind: type[Batch], iteration: int) -> dict[int, tuple[Columns, int]]:
        """uid → (table, row); later outputs replace earlier ones."""
        rows: dict[int, tuple[Columns, int]] = {}
        for name in self.kinds[kind.__name__]:
            batch = self.run.read(name, iteration)
            if isinstance(batch, kind):
                table = columns_of(batch)
                rows |= {uid: (table, i) for i, uid in enumerate(table["uid"])}
            elif (name, iteration) not in self.run.files and not _added_later(self.run, name):
                self._missing.add(f"{name} is not recorded in every iteration that has rollouts")
        return rows

    def _logprobs(self, iteration: int, credit: dict[int, Any]) -> dict[int, NDArray[Any]]:
        """uid → log-probs of the learner; where it recorded none, those that came with the credit."""
        with_credit = ((uid, t["columns"], i) for uid, (t, i) in credit.items())
        logprobs = {uid: columns["logprobs"][i] for uid, columns, i in with_credit if "logprobs" in columns}
        learner = self._rows(TokenLogprobs, iteration)
        return logprobs | {uid: table["logprobs"][i] for uid, (table, i) in learner.items()}

    def _values(self, iteration: int) -> dict[int, tuple[NDArray[Any], NDArray[Any]]]:
        """uid → (segment ends, values at the start and after each), where both are recorded."""
        cuts = self._rows(Segments, iteration)
        segments = {}
        for uid, (table, i) in self._rows(SegmentValues, iteration).items():
            if uid in cuts:
                ends = cuts[uid][0]["ends"][cuts[uid][1]]
                values = table["values"][i]
                if len(values) == len(ends) + 1:
                    segments[uid] = (ends, values)
        return segments

    def _row(self, node: str, iteration: int, table: Columns, i: int) -> None:
        rows = self.out.rows
        texts = self.out.texts
        rows["run"].append(self.number)
        rows["iteration"].append(iteration)
        rows["uid"].append(table["uid"][i])
        rows["parent"].append(-1)
        rows["inherited"].append(table["inherited"][i])
        rows["version"].append(table["policy_version"][i])
        rows["problem"].append(table["prompt_uid"][i])
        rows["node"].append(texts.add(node))
        rows["finish"].append(texts.add(table["finish_reason"][i]))
        rows["prompt"].append(self._prompt(table["prompt_tokens"][i]))
        rows["text"].append(texts.add(table["text"][i]) if self.tokenizer is None else -1)

    def _outcome(
        self, uid: int, problem: int, rewards: dict[int, Any], errors: dict[int, Any], prompts: dict[int, Any]
    ) -> None:
        rows = self.out.rows
        texts = self.out.texts
        table, i = rewards.get(uid, (None, 0))
        rows["reward"].append(table["value"][i] if table else float("nan"))
        rows["correct"].append((1 if table["correct"][i] else 0) + (0 if table["valid"][i] else 2) if table else 4)
        rows["detail"].append(texts.add(table["detail"][i] if table else ""))
        table, i = errors.get(uid, (None, 0))
        rows["step"].append(table["step"][i] if table else 0)
        rows["step_source"].append(texts.add(table["source"][i] if table else ""))
        table, i = prompts.get(problem, (None, 0))
        rows["answer"].append(texts.add(table["answer"][i] if table else ""))

    def _tokens(
        self,
        table: Columns,
        pieces: NDArray[Any],
        i: int,
        credit: dict[int, Any],
        values: dict[int, Any],
        scores: dict[int, Any],
    ) -> None:
        uid = table["uid"][i]
        size = len(pieces)
        flags = np.zeros(size, np.uint8)
        _mark(flags, table["thought_ends"][i], THOUGHT_END)
        sampled = _sized(table["engine_logprobs"][i], size)
        advantage = np.zeros(size, np.float32)
        ratio = np.zeros(size, np.float32)
        credited, row = credit.get(uid, (None, 0))
        if credited is not None and len(credited["advantage"][row]) == size:
            advantage = credited["advantage"][row]
            flags |= credited["mask"][row].astype(np.uint8) * np.uint8(TRAINED) | np.uint8(HAS_CREDIT)
        logprobs = scores.get(uid, ())
        if len(logprobs) == size:
            ratio = logprobs - sampled  # NaN, and 0 in the page, where the learner computed none
            flags |= np.isfinite(ratio).astype(np.uint8) * np.uint8(HAS_RATIO)
        ends, at = values.get(uid, ((), np.zeros(0, np.float32)))
        _mark(flags, np.asarray(ends, np.int64), SEGMENT_END)
        entropy = _sized(table["entropies"][i], size)
        flags |= np.isfinite(entropy).astype(np.uint8) * np.uint8(HAS_ENTROPY)
        flags |= np.isfinite(sampled).astype(np.uint8) * np.uint8(HAS_LOGPROB)
        for name, column in zip(_TOKEN_COLUMNS, (pieces, advantage, ratio, entropy, sampled, flags, at), strict=True):
            self.out.tokens[name].append(column)
        trained = advantage[(flags & TRAINED) > 0]
        rows = self.out.rows
        rows["length"].append(size)
        rows["values"].append(len(at))
        rows["mean_credit"].append(float(trained.mean()) if len(trained) else float("nan"))
        self.out.total += size

    def _pieces(self, tokens: Jagged) -> Any:
        """Numbers of the token texts, per row."""
        ids, place = torch.unique(tokens.values, return_inverse=True)
        for token in ids.tolist():
            if token not in self._piece_of:
                self._piece_of[token] = self.out.pieces.add(piece(self.tokenizer, token))
        numbers = torch.tensor([self._piece_of[t] for t in ids.tolist()], dtype=torch.int64)
        return _column(tokens.with_values(numbers[place]))

    def _prompt(self, tokens: NDArray[Any]) -> int:
        key = tokens.tobytes()
        if key not in self._prompt_of:
            ids = tokens.tolist()
            if self.tokenizer is None:
                text = " ".join(piece(None, t) for t in ids[:2000])
            else:
                text = str(self.tokenizer.decode(ids, skip_special_tokens=False))
            self._prompt_of[key] = self.out.texts.add(text)
        return self._prompt_of[key]


_TOKEN_COLUMNS = ("piece", "credit", "ratio", "entropy", "logprob", "flags", "value")


def _mark(flags: NDArray[np.uint8], ends: NDArray[Any], bit: int) -> None:
    inside = ends[(ends > 0) & (ends <= len(flags))]
    flags[inside - 1] |= np.uint8(bit)


def _sized(row: NDArray[Any], size: int) -> NDArray[Any]:
    """The row; zeros when its length is not the response's."""
    return row if len(row) == size else np.zeros(size, np.float32)


def load_tokenizer(model: str) -> Any:
    """The `tokenizers.Tokenizer` of a model folder, or of a hub model in the local cache; None if unavailable.

    Never uses the network, so that a report can be written anywhere.
    """
    try:
        path = resolve_model_path(model)
        here = Path(path) / "tokenizer.json"
        file = here if here.is_file() else cached_file(path, "tokenizer.json")
        from tokenizers import Tokenizer

        return file and Tokenizer.from_file(str(file))
    except Exception:  # not installed; no such model; tokenizers raises bare Exception for a file that it cannot read
        return None


def piece(tokenizer: Any, token: int) -> str:
    """Text of one token; "⟨id⟩" without a tokenizer or outside its vocabulary."""
    if tokenizer is None or tokenizer.id_to_token(token) is None:
        return f"⟨{token}⟩"
    return str(tokenizer.decode([token], skip_special_tokens=False))
