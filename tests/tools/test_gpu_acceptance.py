"""tools/gpu_acceptance on a CPU: all stages at small sizes, a resumption, and stages that do not pass."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from acceptance import attention, learners, runner, suite, toys
from acceptance.measure import Run, operations
from acceptance.models import SMALL, model_folder
from acceptance.page import page
from acceptance.runner import STAGES, Results, Stage, done, run_stage
from safetensors.torch import load_file

from creditgraph.pipeline.run.timeline.memory import peak_memory

ROOT = Path(__file__).resolve().parents[2]


def accept(out, scratch, *arguments):
    command = [sys.executable, str(ROOT / "tools/gpu_acceptance"), "--device", "cpu", "--small", "--out", str(out)]
    command += ["--scratch", str(scratch), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch, check=False)


@pytest.mark.slow
def test_all_stages_pass_at_small_sizes_and_a_second_call_runs_what_is_left(tmp_path):
    out = tmp_path / "out"
    ran = accept(out, tmp_path)
    lines = Results(out).lines()
    log = (out / "log.txt").read_text()[-3000:]
    assert ran.returncode == 0, ran.stdout + ran.stderr + log
    assert list(lines) == [stage.name for stage in STAGES]
    for name in lines:
        if name == "fp8" and importlib.util.find_spec("transformer_engine") is None:  # it is compiled for CUDA
            assert (lines[name]["status"], lines[name]["reason"]) == ("not run", "missing here: transformer_engine")
            continue
        assert lines[name]["status"] == "passed"
        assert lines[name]["rows"]
        assert lines[name]["checks"]
        assert lines[name]["facts"]["versions"]["torch"] == torch.__version__
        assert len(lines[name]["facts"]["sources"]) == 12
    text = (out / "page.md").read_text()
    assert "small sizes" in text
    assert all(f"## {name}: {line['status']}" in text for name, line in lines.items())

    # The last stage was killed, another never began.
    kept = [line for line in lines.values() if line["stage"] != "heads"]
    kept = [line | ({"status": "cut off"} if line["stage"] == "attention" else {}) for line in kept]
    Results(out).file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    again = accept(out, tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    ran_now = {line.split()[0] for line in again.stdout.splitlines()[:-1] if "done before" not in line}
    assert ran_now - {"fp8"} == {"attention", "heads"}  # what was not run is tried again
    assert Results(out).lines()["attention"]["status"] == "passed"
    assert Results(out).lines()["toys"] == lines["toys"]
    # No minute is left: nothing begins.
    assert accept(out, tmp_path, "--stage", "heads", "--minutes", "0.1").returncode == 3


@dataclass(frozen=True)
class Own(Stage):
    """A stage that is a function of this file; it is forked, so it needs no name that can be imported."""

    work: object = None

    def function(self):
        return self.work


def line_of(work, tmp_path, seconds=30.0):
    stage = Own("attention", "nothing", "", 1, work)
    return run_stage(stage, "cpu", True, tmp_path, tmp_path / "log.txt", seconds)


def test_a_check_that_does_not_hold_fails_its_stage(tmp_path):
    def work(run):
        run.check("fine", 1.0, 2.0)
        run.check("too much", 3.0, 2.0)
        run.check("not a number", float("nan"), 2.0)

    line = line_of(work, tmp_path)
    assert line["status"] == "failed"
    assert [check["holds"] for check in line["checks"]] == [True, False, False]
    assert "| too much | 3 | ≤ 2 | **FAILS** |" in page({"attention": line})


def test_a_stage_that_lacks_a_package_has_not_run(tmp_path):
    def work(run):
        import no_such_package.inside  # noqa: F401

    line = line_of(work, tmp_path)
    assert (line["status"], line["reason"]) == ("not run", "missing here: no_such_package")
    assert not done(line, True, "cpu")

    def broken(run):
        import creditgraph.components.no_such_module  # noqa: F401

    assert line_of(broken, tmp_path)["status"] == "failed"


def test_a_stage_that_is_cut_off_keeps_its_rows_and_leaves_no_process(tmp_path):
    def work(run):
        run.row(measured=1)
        child = subprocess.Popen(["sleep", "600"])
        run.row(pid=child.pid)
        time.sleep(600)

    start = time.monotonic()
    line = line_of(work, tmp_path, seconds=8.0)
    assert time.monotonic() - start < 60
    assert line["status"] == "cut off"
    assert line["rows"][0] == {"measured": 1}
    assert not done(line, True, "cpu")
    state = Path(f"/proc/{line['rows'][1]['pid']}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_stage_whose_process_dies_or_raises_fails(tmp_path):
    died = line_of(lambda run: os._exit(7), tmp_path)
    assert (died["status"], died["reason"]) == ("failed", "its process ended with code 7; see log.txt")

    def work(run):
        run.row(measured=1)
        raise ValueError("it does not work")

    raised = line_of(work, tmp_path)
    assert (raised["status"], raised["reason"]) == ("failed", "ValueError: it does not work")
    assert raised["rows"] == [{"measured": 1}]
    assert "it does not work" in (tmp_path / "log.txt").read_text()
    assert done(raised, True, "cpu")
    assert not done(raised, False, "cpu")
    assert not done(raised, True, "cuda")


def test_preloading_leaves_cuda_alone():
    """A process forked from one that has started CUDA, or has asked its driver for devices, can no longer use it."""
    code = """
import sys, torch
calls = []
torch.cuda._lazy_init = lambda: calls.append("start")
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount = lambda: calls.append("count") or 0
sys.path[:0] = sys.argv[1:]
from acceptance.runner import preload
preload()
assert not calls and not torch.cuda.is_initialized(), calls
"""
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    subprocess.run([sys.executable, "-c", code, str(ROOT), str(ROOT / "tools")], env=environment, check=True)


def checks_of(stage):
    run = Run(device="cpu", small=True, scratch=Path())
    stage(run)
    return [value for kind, value in run.lines if kind == "checks"]


def test_the_sharded_stage_measures_a_sharded_learner(tmp_path):
    """It would pass as well with a learner that is not sharded, so it checks the weights themselves."""
    run = Run(device="cpu", small=True, scratch=tmp_path)
    learners.fsdp(run)
    held = {value["name"]: value["holds"] for kind, value in run.lines if kind == "checks"}
    assert held["qwen2-small, none: every weight is a DTensor"] is True


def test_attention_that_is_a_little_wrong_fails(monkeypatch):
    own = attention.attend
    # A window of one token more, which only long rows show.
    monkeypatch.setattr(
        attention, "attend", lambda q, k, v, layout, window: own(q, k, v, layout, window and window + 1)
    )
    failed = {check["name"].partition(",")[0] for check in checks_of(attention.stage) if not check["holds"]}
    assert failed == {"window"}


def test_operations_tell_a_fused_kernel_from_separate_products():
    x = torch.randn(1, 2, 8, 4)
    fused = operations(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    plain = operations(lambda: (x @ x.transpose(2, 3)).softmax(-1) @ x)
    assert any(word in name for name in fused for word in attention.FAST)
    assert not any(word in name for name in plain for word in attention.FAST)
    assert any(word in name for name in plain for word in attention.SLOW)


@pytest.mark.parametrize("shape", SMALL.values(), ids=list(SMALL))
def test_operations_are_two_per_weight_and_token_and_those_of_attention(shape, tmp_path):
    tensors = load_file(
        Path(model_folder(Run(device="cpu", small=True, scratch=tmp_path), shape)) / "model.safetensors"
    )
    # The embedding is there once: as input it is a lookup, as output a product.
    share = {True: shape.chosen / shape.experts if shape.experts else 0, False: 1}
    weights = sum(t.numel() * share[".experts." in name] for name, t in tensors.items() if t.dim() == 2)
    causal_pairs = 10 * 64 / 2  # ten tokens on average see half of 64
    attention = 4 * causal_pairs * shape.heads * shape.head_dim * shape.layers
    assert shape.forward_flops(10, 64) == 10 * 2 * weights + attention


def test_a_toy_curve_of_another_level_fails(tmp_path):
    stored = json.loads(toys.CURVES.read_text())["curves"]
    assert {recipe: len(curves) for recipe, curves in stored.items()} == dict.fromkeys(toys.RECIPES, len(toys.SEEDS))
    curves = {int(seed): curve for seed, curve in stored["toy_grpo"].items()}
    assert {len(curve) for curve in curves.values()} == {toys.ITERATIONS}
    held = []
    for level in (0.0, 0.1):
        run = Run(device="cpu", small=False, scratch=tmp_path)
        toys._compare(run, "toy_grpo", 0, [r + level for r in curves[0]], curves)
        held.append([value["holds"] for kind, value in run.lines if kind == "checks"])
    assert held == [[True, True], [False, False]]


def test_failed_tests_of_the_suite_are_named_and_missing_packages_are_not_failures(tmp_path, monkeypatch):
    report = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><skipped message="no"/></testcase>
<testcase classname="a" name="three"><failure message="assert 1 == 2">long</failure></testcase>
<testcase classname="" name="b"><error message="collection failure">No module named 'rapidfuzz'</error></testcase>
</testsuite></testsuites>"""
    monkeypatch.setattr(suite.subprocess, "run", lambda *_, **__: (tmp_path / "suite.xml").write_text(report))
    run = Run(device="cpu", small=True, scratch=tmp_path)
    suite.stage(run)
    assert ("rows", {"suite": "--device cpu", "passed": 1, "failed": 1, "skipped": 1}) in run.lines
    notes = [value for kind, value in run.lines if kind == "notes"]
    assert notes[0] == "failed: a::three: assert 1 == 2"
    assert "rapidfuzz" in notes[1]
    assert [value["holds"] for kind, value in run.lines if kind == "checks"] == [False, True]


def test_a_peak_holds_those_of_the_phases_that_a_learner_measures_within_it(monkeypatch):
    most = [0]
    for name in ("empty_cache", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: most[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: most.__setitem__(0, 0))
    with Run("cuda", small=True, scratch=Path()).peak() as found:
        for taken in (3e9, 1e9):
            with peak_memory("cuda"):
                most[0] = taken
    assert found["gb"] == 3


def test_the_digest_of_the_sources_changes_with_a_file(tmp_path, monkeypatch):
    for folder in runner.SOURCES:
        (tmp_path / folder).mkdir()
    file = tmp_path / "components" / "a.py"
    file.write_text("x = 1\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    before = runner.code()
    assert before == runner.code()
    assert before["commit"] == "unknown"
    file.write_text("x = 2\n")
    assert runner.code()["sources"] != before["sources"]
