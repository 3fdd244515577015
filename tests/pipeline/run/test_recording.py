import json
import math
from dataclasses import dataclass, field, fields
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from creditgraph.pipeline.core.component import Component
from creditgraph.pipeline.core.errors import ConfigError, DataError, RunError
from creditgraph.pipeline.core.graph import Graph, Node
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Batch, Credit, Prompts, Rewards, TrainReport, Weights
from creditgraph.pipeline.run.recorder import Recorder, RecordSettings
from creditgraph.pipeline.run.recording import from_arrow, read_payload, to_arrow, write_payload


@dataclass(frozen=True, eq=False, kw_only=True)
class Everything(Batch):
    half: Tensor
    small: Tensor
    ragged: Jagged
    flags: Jagged
    brain: Jagged
    text: list[str]
    detail: list[Any]
    columns: dict[str, Jagged] = field(default_factory=dict)
    scale: float = 1.0
    limit: int | None = None
    names: dict[str, Any] = field(default_factory=dict)


def bits(value):
    if isinstance(value, Jagged):
        return bits(value.values), value.offsets.tolist()
    if isinstance(value, Tensor):
        raw = value if value.dtype == torch.bool else value.contiguous().view(torch.uint8)
        return str(value.dtype), tuple(value.shape), raw.tolist()
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    return repr(value)


def assert_same(a, b):
    assert type(a) is type(b)
    for f in fields(a):
        assert bits(getattr(a, f.name)) == bits(getattr(b, f.name)), f.name


def everything(rows):
    floats = torch.tensor(
        [0x7FC00001, 0x00000001, 0x7F800000, 0xFFC12345 - (1 << 32), -(1 << 31), 0], dtype=torch.int32
    ).view(torch.float32)
    lengths = torch.tensor([3, 0, 3][:rows])
    size = int(lengths.sum())
    return Everything(
        uid=torch.tensor([5, -1, 1 << 62][:rows]),
        half=torch.tensor([0x7FC1, 1, -32768][:rows], dtype=torch.int16).view(torch.bfloat16),
        small=torch.tensor([True, False, True][:rows]),
        ragged=Jagged.from_lengths(floats[:size], lengths),
        flags=Jagged.from_lengths((torch.arange(6) % 2 == 0)[:size], lengths),
        brain=Jagged.from_lengths(torch.arange(6, dtype=torch.bfloat16)[:size] / 3, lengths),
        text=["é\n", "", "日"][:rows],
        detail=[{"a": [1, None]}, 2.5, "x"][:rows],
        columns={
            "returns": Jagged.from_lengths(floats.double()[:size], lengths),
            "other": Jagged.from_lengths(torch.arange(6)[:size], lengths),
        },
        scale=0.1,
        names={"k": [1, 2]},
    )


@pytest.mark.parametrize("rows", [3, 2, 1, 0])
def test_round_trip_through_a_file_is_bitwise(tmp_path, rows):
    batch = everything(rows)
    object.__setattr__(batch, "origin", "node.output")
    write_payload(tmp_path / "x.parquet", batch)
    back = read_payload(tmp_path / "x.parquet")
    assert_same(back, batch)
    assert back.origin == "node.output"
    assert_same(from_arrow(to_arrow(batch)), batch)


def test_no_columns_and_lone_surrogates_survive(tmp_path):
    credit = Credit(
        uid=torch.zeros(0, dtype=torch.int64),
        advantage=Jagged.from_rows([], torch.float32),
        mask=Jagged.from_rows([], torch.bool),
    )
    write_payload(tmp_path / "c.parquet", credit)
    assert_same(read_payload(tmp_path / "c.parquet"), credit)
    tokens = Jagged.from_rows([[1]], torch.int32)
    prompts = Prompts(uid=torch.tensor([1]), tokens=tokens, text=["\ud800"], answer=["1"], metadata=[{}])
    assert from_arrow(to_arrow(prompts)).text == ["\ud800"]


def test_list_columns_share_memory():
    jagged = Jagged.from_rows([[1.0, 2.0], [3.0]])
    credit = Credit(uid=torch.arange(2), advantage=jagged, mask=Jagged.from_rows([[True, False], [True]]))
    array = to_arrow(credit).column("advantage").chunk(0)
    assert array.values.buffers()[1].address == jagged.values.data_ptr()
    assert array.buffers()[1].address == jagged.offsets.data_ptr()


def test_a_report_is_one_row(tmp_path):
    report = TrainReport(metrics={"loss": 0.1, "nan": math.nan}, seconds={})
    write_payload(tmp_path / "r.parquet", report)
    frame = pd.read_parquet(tmp_path / "r.parquet")
    assert frame["metrics.loss"].tolist() == [0.1]
    assert bits(read_payload(tmp_path / "r.parquet").metrics) == bits(report.metrics)
    assert read_payload(tmp_path / "r.parquet").seconds == {}


def test_pandas_and_datasets_read_the_files(tmp_path):
    write_payload(tmp_path / "x.parquet", everything(3))
    frame = pd.read_parquet(tmp_path / "x.parquet")
    assert [len(r) for r in frame["columns.other"]] == [3, 0, 3]
    assert frame["text"].tolist() == ["é\n", "", "日"]
    assert json.loads(frame["detail"][0]) == {"a": [1, None]}
    datasets = pytest.importorskip("datasets")
    loaded = datasets.Dataset.from_parquet(str(tmp_path / "x.parquet"), cache_dir=str(tmp_path / "cache"))
    assert loaded[2]["columns.other"] == [3, 4, 5]


def test_what_has_no_column_form_is_a_sentence():
    def rewards(value, detail):
        return Rewards(
            uid=torch.arange(2), value=value, correct=torch.ones(2) > 0, valid=torch.ones(2) > 0, detail=detail
        )

    with pytest.raises(
        DataError,
        match=r"Rewards\.value: Object of type Tensor is not JSON serializable; expected a tensor of one dimension",
    ):
        to_arrow(rewards(torch.zeros(2, 2), ["", ""]))
    with pytest.raises(DataError, match=r"Rewards\.detail: Object of type set"):
        to_arrow(rewards(torch.zeros(2), [{1}, {2}]))
    with pytest.raises(DataError, match="a Weights is a handle"):
        to_arrow(Weights(version=1))


def test_half_written_foreign_and_missing_files_are_sentences(tmp_path):
    path = tmp_path / "000003.parquet"
    write_payload(path, everything(3))
    with pytest.raises(
        DataError, match=r"000009\.parquet: no such record; recorded there: 000003\.parquet to 000003\.parquet"
    ):
        read_payload(tmp_path / "000009.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(
        DataError, match=r"000003\.parquet: not a readable Parquet file .*half-written or foreign\. Remove it"
    ):
        read_payload(path)
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(
        DataError, match=r"000003\.parquet: not a recorded payload \(no 'creditgraph' entry in its schema\)"
    ):
        read_payload(path)


def test_records_of_other_versions_are_sentences():
    table = to_arrow(everything(1))
    note = json.loads(table.schema.metadata[b"creditgraph"])

    def changed(**changes):
        return table.replace_schema_metadata({b"creditgraph": json.dumps({**note, **changes})})

    with pytest.raises(DataError, match="expected record format 1, got 9; read it with the version"):
        from_arrow(changed(format=9))
    with pytest.raises(DataError, match=r"payload class 'os:system' is not known here"):
        from_arrow(changed(**{"class": "os:system"}))
    fewer = {k: v for k, v in note["fields"].items() if k != "small"}
    with pytest.raises(DataError, match="has no small, which Everything needs; it was recorded by another version"):
        from_arrow(changed(fields=fewer))


@dataclass(frozen=True, kw_only=True)
class Out:
    rewards: Rewards
    weights: Weights


class Maker(Component):
    def run(self) -> Out: ...


def recorder(path, **settings):
    return Recorder(path, RecordSettings(**settings), Graph((Node("maker", "maker", Maker, Maker.Config(), {}, {}),)))


def test_recorder_writes_chosen_outputs_of_every_nth_iteration(tmp_path):
    made = recorder(tmp_path, every=2)
    for iteration in range(5):
        made.put("maker", "rewards", iteration, everything(3))
        made.put("maker", "weights", iteration, Weights(version=iteration))
    made.close()
    assert sorted(p.name for p in (tmp_path / "maker.rewards").iterdir()) == [f"{i:06d}.parquet" for i in (0, 2, 4)]
    assert json.loads((tmp_path / "maker.weights" / "000004.json").read_text()) == {
        "class": "creditgraph.pipeline.core.payloads:Weights",
        "iteration": 4,
        "version": 4,
    }
    assert pq.read_metadata(tmp_path / "maker.rewards" / "000002.parquet").num_rows == 3


def test_recorder_refuses_unknown_outputs(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"run\.record\.outputs: no output 'maker\.reward' in this graph\. Did you mean 'maker\.rewards'\?",
    ):
        recorder(tmp_path, outputs=["maker.reward"])
    with pytest.raises(ValueError, match=r"expected a list such as \[sampler\.trajectories\], or 'all'"):
        RecordSettings(outputs="some")


def test_an_error_of_the_writer_reaches_the_main_thread(tmp_path):
    (tmp_path / "maker.rewards").write_text("in the way")
    made = recorder(tmp_path)
    made.put("maker", "rewards", 0, everything(1))
    with pytest.raises(RunError, match=r"maker\.rewards: cannot be written .*a file is in the place of a folder"):
        made.flush(0)
    made.close()
