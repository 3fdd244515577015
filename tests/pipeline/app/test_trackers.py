"""wandb and TensorBoard, with the real packages: a run in two processes, read back from the files they write."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.app.rollout_table import COLUMNS, RolloutTables
from creditgraph.pipeline.app.trackers import TensorBoard, Wandb, _as_text
from creditgraph.pipeline.core.errors import ConfigError, RunError
from creditgraph.pipeline.run.compose.experiment import build_experiment, compose
from creditgraph.pipeline.run.metrics import TableSettings, WandbSettings, read_metrics
from creditgraph.pipeline.run.recorder import RecordSettings

pytestmark = pytest.mark.xdist_group("trackers")
ROOT = Path(__file__).resolve().parents[3]
SETTINGS = [
    "recipe=toy_grpo",
    "prompts.batch=2",
    "sampler.group_size=4",
    "evaluator.num_problems=2",
    "run.name=r",
    "run.checkpoint.every=1",
]
SINKS = [
    "run.record.every=1",
    "run.wandb.mode=offline",
    "run.wandb.checkpoints=true",
    "run.tensorboard.enabled=true",
    "run.tables.every=2",
    "run.tables.rows=5",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tracked")


@pytest.fixture(scope="module")
def imported(folder) -> str:
    """Three iterations in a process of their own; what `-X importtime` says of its imports."""
    pytest.importorskip("tensorboard", reason="not installed here: pip install 'creditgraph[tensorboard]'")
    command = [sys.executable, "-X", "importtime", "-m", "creditgraph", "train", *SETTINGS, *SINKS]
    done = subprocess.run(
        [*command, f"run.root={folder}", "run.iterations=3"],
        cwd=ROOT,
        env={**without_wandb(), **wandb_environment(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def run(imported, folder) -> Path:
    """The run of that process, and two more iterations in this one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(without_wandb()):
            patch.delenv(name)
        for name, value in wandb_environment(folder).items():
            patch.setenv(name, value)
        assert main(["train", *SETTINGS, *SINKS, f"run.root={folder}", "run.iterations=5"]) == 0
    return folder / "r"


def without_wandb() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}


def wandb_environment(folder: Path) -> dict[str, str]:
    return {
        "WANDB_MODE": "offline",
        "WANDB_DATA_DIR": str(folder / "staging"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
    }


def test_training_does_not_import_the_report(imported):
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "creditgraph.pipeline.app.trackers" in modules
    assert not {name for name in modules if name.startswith("creditgraph.pipeline.app.report")}


def wandb_records(file: Path):
    """The records of a .wandb file: blocks of 32 KiB, whose chunks have a header of checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def parts(run: Path) -> list[Path]:
    return sorted((run / "wandb").glob("offline-run-*/*.wandb"))


def history(file: Path) -> list[dict]:
    rows = []
    for record in wandb_records(file):
        if record.HasField("history"):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append(row | {"_step": record.history.step.num})
    return rows


def test_both_parts_have_one_id(run):
    name = (run / "wandb_id").read_text()
    assert len(parts(run)) == 2
    for file in parts(run):
        assert file.name == f"run-{name}.wandb"
        begun = next(r.run for r in wandb_records(file) if r.HasField("run"))
        assert begun.run_id == name
        assert begun.project == "creditgraph"
        assert begun.display_name == "r"


def test_wandb_has_the_numbers_of_metrics_jsonl_once(run):
    rows = [row for file in parts(run) for row in history(file)]
    steps = [row["_step"] for row in rows if "seconds/iteration" in row]
    assert steps == sorted(set(steps)), (
        "steps grow from part to part, so that no iteration is dropped when both are sent"
    )
    sent = {row["iteration"]: row for row in rows if "seconds/iteration" in row}
    for row in read_metrics(run / "metrics.jsonl"):
        if "seconds/iteration" in row:
            assert {k: v for k, v in sent[row["iteration"]].items() if k in row} == pytest.approx(row, nan_ok=True)


def test_wandb_gets_bounded_tables_and_the_graph_once(run):
    tables = [row for file in parts(run) for row in history(file) if any(k.startswith("rollouts") for k in row)]
    assert tables
    graphs = list((run / "wandb").glob("offline-run-*/files/media/html/graph*"))
    assert len(graphs) == 1
    assert "<svg" in graphs[0].read_text()
    shown = defaultdict(list)
    for file in (run / "wandb").glob("offline-run-*/files/media/table/rollouts*.json"):
        table = json.loads(file.read_text())
        assert table["columns"] == list(COLUMNS)
        for row in table["data"]:
            shown[row[0]].append(dict(zip(COLUMNS, row, strict=True)))
    assert set(shown) == {0, 2, 4}
    assert all(len(rows) == 5 for rows in shown.values())
    first = shown[0][0]
    assert first["problem"]
    assert first["response"]
    assert first["correct"] in ("yes", "no")


def test_wandb_keeps_every_checkpoint_as_an_artifact(run):
    made = [
        r.request.log_artifact.artifact
        for file in parts(run)
        for r in wandb_records(file)
        if r.request.HasField("log_artifact")
    ]
    made += [r.artifact for file in parts(run) for r in wandb_records(file) if r.HasField("artifact")]
    made = [a for a in made if a.type == "checkpoint"]
    assert sorted(alias for a in made for alias in a.aliases if alias.startswith("iteration-")) == [
        f"iteration-{i}" for i in range(5)
    ]
    assert {a.name for a in made} == {"r-checkpoint"}
    assert (run / "wandb_sent").read_text() == "000004"


def test_tensorboard_reads_back(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    rows = read_metrics(run / "metrics.jsonl")
    actual = events.Scalars("sampler/response_length")
    assert [e.step for e in actual] == [0, 1, 2, 3, 4]
    for name in ("sampler/response_length", "learner/loss", "evaluator/accuracy"):
        expected = {r["iteration"]: r[name] for r in rows if name in r}
        assert {e.step: e.value for e in events.Scalars(name)} == pytest.approx(expected, rel=1e-6)
    assert {"evaluator/accuracy", "seconds/iteration"} <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["graph"]
    assert [e.step for e in events.Tensors("rollouts/text_summary")] == [0, 2, 4]


def test_tables_take_only_what_is_recorded_and_due(run, tmp_path):
    experiment = build_experiment(compose([*SETTINGS, f"run.root={tmp_path}"]), "toy_grpo")

    def tables(every, rows, recorded):
        settings = TableSettings(every=every, rows=rows)
        return RolloutTables(run, experiment.graph, settings, RecordSettings(every=recorded))

    assert [i for i in range(13) if tables(4, 1, 3).due(i)] == [0, 6, 12]
    assert not tables(0, 1, 1).due(0)
    assert not tables(1, 1, 0).due(0)
    assert len(tables(1, 1000, 1).rows(1)) == 2 * 4
    assert tables(1, 3, 1).rows(99) == []
    with pytest.raises(ValueError, match="rows 0: expected every ≥ 0 and rows ≥ 1"):
        TableSettings(rows=0)


def test_a_damaged_record_costs_its_table_and_not_the_run(run, tmp_path, caplog):
    experiment = build_experiment(compose([*SETTINGS, f"run.root={tmp_path}"]), "toy_grpo")
    shutil.copytree(run / "record", tmp_path / "record")
    damaged = tmp_path / "record" / "sampler.trajectories" / "000001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:200])
    settings = (TableSettings(every=1), RecordSettings())
    pending = RolloutTables(tmp_path, experiment.graph, *settings)
    for iteration in (0, 1, 2):
        pending.add(iteration)
    assert {row[0] for row in pending.take()} == {0, 2}
    assert "the table of rollouts of iteration 1 is left out" in caplog.text
    assert pending.take() == []


def test_a_rollout_is_code_in_tensorboard_whatever_it_says():
    row = dict.fromkeys(COLUMNS, "x") | {
        "response": "</code>\n<script>alert(1)</script>\n# big\u2028</p>",
        "reward": 0.5,
    }
    lines = _as_text(list(row.values())).split("\n")
    assert all(line.startswith("    ") for line in lines if line)
    assert "reward 0.5" in lines[0]


def test_without_tensorboard_the_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(
        ConfigError,
        match=r"run\.tensorboard\.enabled=true: a package of the extra 'tensorboard' .*pip install 'creditgraph",
    ):
        TensorBoard(tmp_path)


def test_what_wandb_refuses_is_an_error(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("permission denied\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        RunError, match=r"run\.wandb\.mode=online: wandb did not start \(permission denied\); expected .* `wandb login`"
    ):
        Wandb(WandbSettings(mode="online"), tmp_path, {})


def test_the_final_pass_has_a_step_of_its_own(tmp_path, monkeypatch):
    """Iterations 0, 1, the final pass at 2; then the run is made longer: 2 (as training), 3, the final pass at 4."""
    import wandb

    steps = []
    fake = SimpleNamespace(
        log=lambda values, step: steps.append(step),
        define_metric=lambda *a, **k: None,
        finish=lambda: None,
        url="https://wandb.example/run",
    )
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    for total, logged in ((2, (0, 1, 2)), (4, (2, 3, 4))):
        sink = Wandb(WandbSettings(), tmp_path, {}, iterations=total)
        for iteration in logged:
            sink.log(iteration, {})
        sink.close()
    assert (tmp_path / "wandb_url").read_text() == "https://wandb.example/run"  # the report links to it
    assert steps == [0, 2, 3, 4, 6, 7]


def test_closing_waits_for_the_process_that_writes_the_file(tmp_path, monkeypatch):
    """`finish` alone sends a message and returns: the file may then lack the last rows for a while."""
    import wandb

    called = []
    fake = SimpleNamespace(
        log=lambda *a, **k: None,
        define_metric=lambda *a, **k: None,
        finish=lambda: called.append("finish"),
        url=None,  # offline
    )
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr(wandb, "teardown", lambda: called.append("teardown"))
    Wandb(WandbSettings(), tmp_path, {}).close()
    assert called == ["finish", "teardown"]
