"""`creditgraph eval … suite=…` when something is missing, misspelt or in use."""

import fcntl
import json
import shutil

import pytest
import yaml
from small_suite import evaluate, write_suite

from creditgraph.pipeline.app.cli import main

# One process makes the run and the whole evaluation once for both files of the group.
pytestmark = pytest.mark.xdist_group("evaluation")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["model=tiny", "suite=smalls"], ["suite=smalls", "Did you mean 'small'?"]),
        (["suite=small"], ["nothing to evaluate", "run=RUN or model=NAME"]),
        (["suite=small", "model=tiny", "checkpiont=1"], ["'checkpiont=1': unknown. Did you mean 'checkpoint'?"]),
        (["suite=small", "model=tiyn"], ["model=tiyn", "Did you mean 'tiny'?"]),
        (["suite=small", "model=tiny", "engine=vlmm"], ["engine=vlmm", "Did you mean 'vllm'?"]),
        (["suite=small", "model=tiny", "engine.max_rowz=1"], ["engine.max_rowz: unknown setting"]),
        (["suite=small", "model=tiny", "tasks=ones"], ["tasks=ones: no such task", "Did you mean 'one'?"]),
        (["suite=small", "model=tiny", "tasks.one.samples=2"], ["got k = 4 and 2 samples"]),
        (
            ["suite=small", "model=tiny", "tasks.one.template=chat"],
            ["'tasks.one' samples thought by thought", "set tasks.one.template=thought, or tasks.one.mode=line ("],
        ),
        (["suite=small", "model=tiny", "data.ones.path=x"], ["data.ones: no such task"]),
        (
            ["suite=small", "model=tiny", "tasks.one.verifier.use=verifier.exct"],
            ["verifier.exct", "Did you mean 'verifier.exact'?"],
        ),
        (["suite=small", "run=/nowhere/r"], ["/nowhere/r: no run there"]),
        (["suite=small", "model=tiny", "chunk=0"], ["chunk: expected at least 1 response, got 0"]),
        (["--fresh"], ["expected suite=NAME with run=RUN or model=NAME"]),
    ],
)
def test_a_wrong_command_gets_a_sentence(arguments, parts, configs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *arguments, "-c", configs]) == 2
    text = capsys.readouterr().err
    for part in parts:
        assert part in text
    assert "Traceback" not in text


def test_sets_out_of_reach_are_all_named_with_the_local_override(tmp_path, capsys):
    folder = tmp_path / "c"
    (folder / "data").mkdir(parents=True)
    for name in ("far", "further"):
        entry = {
            "source": "file",
            "path": str(tmp_path / f"{name}.jsonl"),
            "template": "plain",
            "verifier": "verifier.exact",
        }
        (folder / "data" / f"{name}.yaml").write_text(yaml.safe_dump({"eval": entry}))
    configs = write_suite(folder, tasks={"far": {}, "further": {}})
    assert evaluate(configs, "model=tiny", f"root={tmp_path}") == 2
    text = capsys.readouterr().err
    for part in (
        "2 of 2 sets cannot be loaded",
        "far.jsonl does not exist",
        "data.far.path=FILE",
        "data.further.path=FILE",
    ):
        assert part in text
    (tmp_path / "mine.jsonl").write_text(
        '{"question": "s1 + 1", "answer": "1"}\n{"question": "s1 + 2", "answer": ""}\n'
    )
    paths = [f"data.{n}.path={tmp_path / 'mine.jsonl'}" for n in ("far", "further")]
    assert evaluate(configs, "model=tiny", f"root={tmp_path}", *paths, "tasks.further.max_tokens=4000") == 0
    out = capsys.readouterr().out
    assert "further: max_tokens is 4000, but the model's context leaves" in out
    results = tmp_path / "model-tiny" / "eval" / "small" / "initial"
    assert json.loads((results / "results.json").read_text())["tasks"]["far"]["rejected"] == 1
    assert [json.loads(line)["task"] for line in (results / "rejected.jsonl").read_text().splitlines()] == [
        "far",
        "further",
    ]


def test_checkpoints_that_are_not_there(finished, configs, tmp_path, capsys):
    assert evaluate(configs, f"run={finished}", "checkpoint=7") == 2
    assert "has none of that iteration; there are 0, 1" in capsys.readouterr().err
    assert evaluate(configs, f"run={finished}", f"checkpoint={tmp_path}/exported") == 2
    assert "no such folder" in capsys.readouterr().err
    shutil.copytree(finished, tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints", "eval"))
    assert evaluate(configs, f"run={tmp_path / 'r'}") == 2
    assert "no checkpoint; continue the run" in capsys.readouterr().err


def test_a_run_that_is_still_training(run, configs, tmp_path, capsys):
    with (run / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert evaluate(configs, f"run={run}", "tasks=one") == 2
        text = capsys.readouterr().err
        assert "still training (process" in text
        assert "checkpoint=N; there are 0, 1" in text
        assert evaluate(configs, f"run={run}", "tasks=one", "checkpoint=0", "contamination=false") == 0
        assert "note: " in capsys.readouterr().out


def test_two_evaluations_at_once(configs, tmp_path, capsys):
    folder = tmp_path / "model-tiny" / "eval" / "small" / "initial"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert evaluate(configs, "model=tiny", f"root={tmp_path}") == 2
    assert "Two processes must not share it: wait for it, stop it, or use label=NAME." in capsys.readouterr().err
