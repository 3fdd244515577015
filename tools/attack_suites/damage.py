"""Damage to a finished run directory; the run, continued, ends with the right state and says so, or ends in a sentence.

Nothing may be accepted (a state, record or row that differs), nothing lost (rows that can be read, the older sound
checkpoint), nothing silent (a warning or an error names the damaged file). An exception that is no sentence fails.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from attack_suites import toy_runs
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.streams import Stream
from creditgraph.pipeline.run import packing
from creditgraph.pipeline.run.checkpoint import manifest_checksum
from creditgraph.pipeline.run.recording import read_payload

DONE = 9  # iterations before the damage; checkpoints after iterations 5 and 8
NEWEST = "checkpoints/000008"
OLDER = "checkpoints/000005"
RECORD = "record/score.rewards/000003.parquet"
LIST = "record/checksums.jsonl"
ARCHIVE = "record/000003-000005.zip"
use = toy_runs.use

Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """Damage to a run directory.

    Attributes:
        name: what is done to what.
        damage: does it, given the run directory.
        mentions: text of the warning or error; "" for damage without any effect.
        refused: whether the run must refuse to continue.
    """

    name: str
    damage: Damage
    mentions: str
    refused: bool = False

    def __str__(self) -> str:
        return self.name


def _flip(place: float, bit: int = 0) -> Damage:
    def damage(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[min(int(place * len(raw)), len(raw) - 1)] ^= 1 << bit
        file.write_bytes(raw)

    return damage


def _flip_drawn(number: int) -> Damage:
    def damage(file: Path) -> None:
        draws = Stream("attack", "damage", str(file.relative_to(file.parents[2])))
        place, bit = (float(draws.uniform(torch.tensor([number]), part)[0]) for part in ("place", "bit"))
        _flip(place, int(bit * 8))(file)

    return damage


def _truncate(share: float) -> Damage:
    return lambda file: os.truncate(file, min(int(share * file.stat().st_size), file.stat().st_size - 1))


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x\n")


def _random(file: Path) -> None:
    bits = Stream("attack", "damage", "bytes").bits(torch.arange(file.stat().st_size // 8 + 1))
    file.write_bytes(bits.tobytes()[: file.stat().st_size])


FILE_DAMAGE: dict[str, Damage] = {
    "first bit flipped": _flip(0.0),
    "bit in the middle flipped": _flip(0.5, 2),
    "last byte changed": _flip(1.0, 6),
    "drawn bit flipped (1)": _flip_drawn(1),
    "drawn bit flipped (2)": _flip_drawn(2),
    "drawn bit flipped (3)": _flip_drawn(3),
    "cut in half": _truncate(0.5),
    "last byte cut": _truncate(1.0),
    "empty": lambda file: file.write_bytes(b""),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "random bytes": _random,
    "bytes appended": _append,
    "deleted": lambda file: file.unlink(),
    "a folder in its place": _directory,
    "a link to nothing": _dangling,
}


def _manifest(**changes: object) -> Damage:
    """Changes fields of the newest manifest, with a checksum that fits unless it is changed itself."""

    def damage(path: Path) -> None:
        file = path / NEWEST / "manifest.json"
        manifest = json.loads(file.read_text()) | changes
        file.write_text(json.dumps(manifest | {"sha256": manifest_checksum(manifest)} | changes))

    return damage


def _text(text: str) -> Damage:
    return lambda path: (path / NEWEST / "manifest.json").write_text(text)


def _without_checksum(path: Path) -> None:
    file = path / NEWEST / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    file.write_text(json.dumps(manifest))


def _copy(source: str, target: str) -> Damage:
    return lambda path: shutil.copyfile(path / source, path / target)


def _swap(one: str, other: str) -> Damage:
    def damage(path: Path) -> None:
        aside = path / "aside"
        (path / one).rename(aside)
        (path / other).rename(path / one)
        aside.rename(path / other)

    return damage


def _both(damage: Damage, *files: str) -> Damage:
    def both(path: Path) -> None:
        for file in files:
            damage(path / file)

    return both


ILL_TYPED: dict[str, object] = {
    "files": None, "files ": [], "files  ": {}, "files   ": {"state.json": 3},
    "files    ": {"../000005/state.json": {"bytes": 1, "sha256": "0"}}, "iteration": 5, "iteration ": "seven",
    "iteration  ": None, "iteration   ": 8.0, "iteration    ": True, "format": "3", "format ": None, "logs": None,
    "logs ": {"metrics.jsonl": 7}, "sha256": None, "sha256 ": "0" * 64,
}  # fmt: skip
TEXTS = {"a list": "[]", "null": "null", "text": '"x"', "a number": "7", "an empty object": "{}",
         "deep lists": "[" * 100_000, "deep objects": '{"a":' * 100_000, "NaN": '{"iteration": NaN}'}  # fmt: skip


def cases() -> list[Case]:
    found = []
    for file in ("manifest.json", "state.json", "tensors.safetensors"):
        for how, damage in FILE_DAMAGE.items():
            found.append(Case(f"newest {file}: {how}", _both(damage, f"{NEWEST}/{file}"), "000008"))
    for field, value in ILL_TYPED.items():
        name = field.strip()
        found.append(Case(f"newest manifest: {name} is {str(value)[:40]}", _manifest(**{name: value}), "000008"))
    found += [Case(f"newest manifest: {what}", _text(text), "000008") for what, text in TEXTS.items()]
    for file in ("metrics.jsonl", "rejected.jsonl", LIST):
        for how, damage in FILE_DAMAGE.items():
            refused = how == "a folder in its place"
            # The last row of metrics is that of the final pass, which runs again.
            torn = file == "metrics.jsonl" and how.startswith("last byte")
            found.append(Case(f"{file}: {how}", _both(damage, file), "" if torn else Path(file).name, refused))
    for how, damage in FILE_DAMAGE.items():
        found.append(Case(f"record: {how}", _both(damage, RECORD), RECORD))
    return found + _whole_checkpoints() + _others() + _archives()


def _whole_checkpoints() -> list[Case]:
    both = [f"{folder}/tensors.safetensors" for folder in (OLDER, NEWEST)]
    manifests = [f"{folder}/manifest.json" for folder in (OLDER, NEWEST)]
    last = "no valid checkpoint is left"
    older, newest = (f"{folder}/" for folder in (OLDER, NEWEST))
    return [
        Case("newest checkpoint: a file in its place", lambda p: (_gone(p / NEWEST), (p / NEWEST).touch()), "000008"),
        Case("newest checkpoint: empty", lambda p: (_gone(p / NEWEST), (p / NEWEST).mkdir()), "000008"),
        Case("newest checkpoint: a later name", lambda p: (p / NEWEST).rename(p / "checkpoints/000009"), "000009"),
        Case("checkpoints: exchanged names", _swap(OLDER, NEWEST), last),
        Case("checkpoints: manifests exchanged", _swap(*manifests), last),
        Case("checkpoints: tensors exchanged", _swap(*both), last),
        Case(
            "newest checkpoint: the older manifest", _copy(f"{older}manifest.json", f"{newest}manifest.json"), "000008"
        ),
        Case("newest checkpoint: the older state", _copy(f"{older}state.json", f"{newest}state.json"), "000008"),
        Case("newest checkpoint: the older tensors", _copy(*both), "000008"),
        Case("newest checkpoint: state and tensors exchanged", _swap(f"{newest}state.json", both[1]), "000008"),
        Case("both checkpoints: tensors cut", _both(_truncate(0.5), *both), last),
        Case("both checkpoints: manifests deleted", _both(lambda f: f.unlink(), *manifests), last),
        Case("both checkpoints: manifests empty", _both(lambda f: f.write_bytes(b""), *manifests), last),
        Case("an older format", _without_checksum_and(2), "checkpoint format", refused=True),
        Case("a manifest without checksum", _without_checksum, "000008"),
        Case("a later format", _manifest(format=4), "checkpoint format", refused=True),
    ]


def _without_checksum_and(written: int) -> Damage:
    def damage(path: Path) -> None:
        _manifest(format=written)(path)
        _without_checksum(path)

    return damage


def _others() -> list[Case]:
    record = "record/score.rewards/00000"
    return [
        Case("checkpoints/: remains of a write", lambda p: (p / "checkpoints/.tmp-000011").mkdir(), ""),
        Case("checkpoints/: a file as remains", lambda p: (p / "checkpoints/.old-000002").touch(), ""),
        Case("checkpoints/: a file with another name", lambda p: (p / "checkpoints/notes").touch(), ""),
        Case("checkpoints/: a file named as a later one", lambda p: (p / "checkpoints/000010").touch(), "000010"),
        Case("records: two exchanged", _swap(f"{record}3.parquet", f"{record}4.parquet"), f"{record}3.parquet"),
        Case("records: one is a copy of another", _copy(f"{record}2.parquet", f"{record}3.parquet"), RECORD),
        Case("records: an output deleted", lambda p: _gone(p / "record/score.rewards"), RECORD),
        Case("records: a note deleted", lambda p: (p / "record/learner.weights/000003.json").unlink(), "000003.json"),
        Case(
            "records: one of another output", _copy(f"{record}3.parquet", "record/source.batch/000001.parquet"), "batch"
        ),
        Case(
            "metrics.jsonl: a row deleted", _lines("metrics.jsonl", lambda rows: rows[:3] + rows[4:]), "metrics.jsonl"
        ),
        Case("metrics.jsonl: rows exchanged", _lines("metrics.jsonl", lambda rows: rows[::-1]), "metrics.jsonl"),
        Case("metrics.jsonl: a row twice", _lines("metrics.jsonl", lambda rows: rows[:3] + rows[2:]), "metrics.jsonl"),
        Case("metrics.jsonl: an end of line flipped", _lines("metrics.jsonl", _joined), "metrics.jsonl"),
        Case("metrics.jsonl: half a row at the end", _lines("metrics.jsonl", lambda rows: [*rows, b'{"iterat']), ""),
        Case("metrics.jsonl and rejected.jsonl exchanged", _swap("metrics.jsonl", "rejected.jsonl"), "metrics.jsonl"),
        Case("config.yaml: empty", lambda p: (p / "config.yaml").write_bytes(b""), "config", refused=True),
        Case("config.yaml: cut", lambda p: os.truncate(p / "config.yaml", 9), "config", refused=True),
        Case("config.yaml: not text", lambda p: (p / "config.yaml").write_bytes(b"\xff\xfe{"), "config", refused=True),
        Case("lock: deleted", lambda p: (p / "lock").unlink(), ""),
        Case("lock: foreign content", lambda p: (p / "lock").write_bytes(b"\xff[[["), ""),
    ]


def _archives() -> list[Case]:
    """Damage to an archive of records."""

    def packed(damage: Damage) -> Damage:
        def of_archive(path: Path) -> None:
            with patch.object(packing, "SEGMENT", toy_runs.SEGMENT):
                packing.pack(path / "record", DONE)
            damage(path / ARCHIVE)

        return of_archive

    lost = ("cut in half", "last byte cut", "empty", "zeros", "random bytes", "deleted", "a folder in its place")
    named = dict.fromkeys((*lost, "a link to nothing"), RECORD) | {"bit in the middle flipped": "record/"}
    cases = [Case(f"an archive of records: {name}", packed(FILE_DAMAGE[name]), said) for name, said in named.items()]
    return [*cases, Case("an archive of records: undamaged", packed(lambda file: None), "")]


def _gone(path: Path) -> None:
    shutil.rmtree(path)


def _joined(rows: list[bytes]) -> list[bytes]:
    return [*rows[:3], rows[3][:-1] + b"\x0b" + rows[4], *rows[5:]]


def _lines(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    def damage(path: Path) -> None:
        rows = (path / name).read_bytes().splitlines(keepends=True)
        (path / name).write_bytes(b"".join(change(rows)))

    return damage


def run(case: Case) -> tuple[bool, str]:
    path = toy_runs.FOLDER / "damaged"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(toy_runs.finished(DONE), path)
    case.damage(path)
    before = {str(row) for row in _rows(path) if row["iteration"] < DONE}
    kept = _sizes(path)
    said: list[str] = []
    try:
        with _listening(said):
            toy_runs.toy.train(path, toy_runs.ITERATIONS, delay=2)
    except CreditgraphError as error:
        return _refused(case, str(error), _sizes(path) == kept)
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error)[:200]}"
    if case.refused:
        return False, "the run continued; expected a refusal"
    problems = [] if toy_runs.state(path) == toy_runs.state(toy_runs.finished(toy_runs.ITERATIONS)) else ["other state"]
    if "no valid checkpoint" not in case.mentions and before - {str(row) for row in _rows(path)}:
        problems.append("rows of metrics are lost")
    if case.mentions and not any(case.mentions in text for text in said):
        problems.append(f"no warning names {case.mentions}")
    if not case.mentions and said:
        problems.append(f"a warning without damage: {said[0][:100]}")
    if any("\n" in text for text in said):
        problems.append("a warning of several lines")
    if "record" in case.name and _reads_wrong(path):
        problems.append("a record that differs is read")
    return not problems, "; ".join(problems) or (said[0][:200] if said else "no effect")


def _refused(case: Case, text: str, unchanged: bool) -> tuple[bool, str]:
    held = case.refused and unchanged and case.mentions in text and text.rstrip().endswith(".")
    return held, f"refused: {text[:200]}" + ("" if unchanged else "; the directory was changed")


def _sizes(path: Path) -> dict[str, int]:
    """Checkpoints, logs and records, by size; the lock and what every start writes are left out."""
    skipped = ("lock", "config.yaml", "heartbeat.json", "traces")
    files = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    return {name: size for name, size in files.items() if not name.startswith(skipped)}


def _rows(path: Path) -> list[dict]:
    if not (path / "metrics.jsonl").is_file():
        return []
    return [row for row in toy_runs.metrics(path) if isinstance(row.get("iteration"), int)]


def _reads_wrong(path: Path) -> bool:
    """Whether a record of iteration 3 or 4 is read that differs from the undisturbed run's."""
    for number in (3, 4):
        name = f"record/score.rewards/00000{number}.parquet"
        try:
            value = read_payload(path / name).value
        except CreditgraphError:
            continue
        if not torch.equal(value, read_payload(toy_runs.finished(DONE) / name).value):
            return True
    return False


class _listening:
    """Collects the warnings of the project instead of printing them."""

    def __init__(self, said: list[str]) -> None:
        self.handler = logging.Handler(logging.WARNING)
        self.handler.emit = lambda record: said.append(record.getMessage())
        self.logger = logging.getLogger("creditgraph")

    def __enter__(self) -> None:
        self.logger.addHandler(self.handler)
        self.logger.propagate = False

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self.handler)
        self.logger.propagate = True
