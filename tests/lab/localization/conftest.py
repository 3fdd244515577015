"""Run directories made by hand, whose failures, resets and outcomes are known; and one real run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from failures_by_hand import Reset, record

from creditgraph.pipeline.app.cli import main
from creditgraph.pipeline.run.compose.experiment import compose


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of toy_srpo with these resets in each of `iterations`, without training."""

    def make(resets: list[Reset], iterations: int = 1, oracle: bool = True) -> Path:
        run = tmp_path / "by_hand"
        run.mkdir()
        config = compose(["recipe=toy_srpo", f"run.root={tmp_path}"])
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n", encoding="utf-8")
        for iteration in range(iterations):
            record(run, iteration, resets, oracle)
        return run

    return make


@pytest.fixture
def localization(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Calls `creditgraph localization … --json`; the exit code and, parsed, what it printed."""

    def call(*arguments: Any, json_output: bool = True) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = main(["localization", *map(str, arguments), *(["--json"] if json_output else [])])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if json_output and not code else printed.out, printed.err

    return call


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five recorded iterations of toy_srpo."""
    root = tmp_path_factory.mktemp("runs")
    settings = [
        "run.iterations=5",
        "run.record.every=1",
        "run.name=toy",
        "prompts.batch=8",
        "data.eval.size=4",
        f"run.root={root}",
    ]
    assert main(["train", "recipe=toy_srpo", *settings]) == 0
    return root / "toy"
