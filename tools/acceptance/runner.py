"""Runs stages, each in a process of its own, and keeps one JSON line per stage."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch import ROOT

from acceptance.measure import Run

SOURCES = ("pipeline", "components", "configs", "tools", "tests")
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "megatron.core",
    "mbridge",
    "hydra",
    "vllm",
    "transformer_engine",
)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: as in `--stage`.
        proves: what a pass means, for the page.
        place: module and function.
        minutes: how long it is expected to take on one GPU; it is not begun with less left.
    """

    name: str
    proves: str
    place: str
    minutes: float

    def function(self) -> Callable[[Run], None]:
        """The function of the stage."""
        module, _, name = self.place.partition(":")
        found: Callable[[Run], None] = getattr(importlib.import_module(f"acceptance.{module}"), name)
        return found


# What is right comes before how fast it is: a machine is lent for less time than all of them take.
STAGES = (
    Stage("attention", "bf16 attention of packed rows equals float64, by the fused kernel", "attention:stage", 1),
    Stage("heads", "log-probs, entropies and gradients of both heads equal float64", "heads:stage", 1),
    Stage("engine", "engine.local samples what the learner computes, and how fast", "engine:stage", 2),
    Stage("publish", "weights reach an engine unchanged, and how fast", "weights:publish", 1),
    Stage("checkpoint", "a resumed learner is the one that was saved", "weights:checkpoint", 2),
    Stage("prefixes", "shared prefixes save time at the same gradient", "learners:prefixes", 2),
    Stage("suite", "the component tests on the device", "suite:stage", 4),
    Stage("toys", "toy GRPO and SRPO learn as on a CPU", "toys:stage", 4),
    Stage("vllm", "vLLM samples what the learner computes, takes its weights and sleeps", "kinds:vllm", 3),
    Stage("served", "a vLLM server does the same, with weights by files and by CUDA's IPC", "kinds:served", 3),
    Stage("lora", "adapters alone are trained, and sampled with", "kinds:lora", 1),
    Stage("experts", "a mixture of experts: both learners make the same step", "kinds:experts", 2),
    Stage("fp8", "TransformerEngine's layers, also in 8 bits, learn what learner.hf does", "kinds:fp8", 2),
    Stage("mfu-hf", "speed and memory of learner.hf", "learners:hf", 4),
    Stage("mfu-fsdp", "speed and memory of learner.hf sharded, on one rank", "learners:fsdp", 4),
    Stage("mfu-megatron", "speed and memory of learner.megatron, local layers", "learners:megatron", 4),
)


class Results:
    """The lines of one folder, the last one per stage.

    Args:
        folder: where results.jsonl is.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def lines(self) -> dict[str, dict[str, Any]]:
        """Stage → its line."""
        if not self.file.exists():
            return {}
        rows = (json.loads(line) for line in self.file.read_text(encoding="utf-8").splitlines() if line)
        return {row["stage"]: row for row in rows}

    def put(self, line: dict[str, Any]) -> None:
        """Adds a line in the place of the stage's earlier one; a process that is killed leaves the old file."""
        rows = self.lines() | {line["stage"]: line}
        new = self.file.with_suffix(".new")
        new.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")
        new.replace(self.file)


def done(line: dict[str, Any] | None, small: bool, device: str) -> bool:
    """Whether a stage need not run again: it ended by itself, at this size and on this kind of device."""
    return (
        line is not None and line["status"] in ("passed", "failed") and (line["small"], line["kind"]) == (small, device)
    )


def preload() -> None:
    """Imports here what every stage would import for itself, seconds each time."""
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    for module in {stage.place.partition(":")[0] for stage in STAGES}:
        importlib.import_module(f"acceptance.{module}")


def run_stage(stage: Stage, device: str, small: bool, scratch: Path, log: Path, seconds: float) -> dict[str, Any]:
    """Runs a stage in a process that is ended after `seconds`; returns its line.

    The process is forked, so that it starts at once, and has the device to itself: after an error that no later call on
    the device survives, the next stage has a new one. This process itself must never touch CUDA.
    """
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(stage, device, small, scratch, log, theirs))
    start = time.monotonic()
    process.start()
    theirs.close()
    line: dict[str, Any] = {
        "stage": stage.name,
        "status": "cut off",
        "kind": device,
        "small": small,
        "facts": {},
        "rows": [],
        "checks": [],
        "notes": [],
    }
    while True:
        left = start + seconds - time.monotonic()
        if left <= 0 or not ours.poll(left):
            line["reason"] = f"not finished within {seconds / 60:.1f} minutes; what it had measured is kept"
            break
        try:
            kind, value = ours.recv()
        except EOFError:
            line["status"] = "failed"
            line["reason"] = _end_of(process, log)
            break
        if kind == "end":
            line.update(value)
            break
        if kind == "facts":
            line["facts"] = value
        else:
            line[kind].append(value)
    _end(process, 0 if line["status"] == "cut off" else 5)
    line["seconds"] = round(time.monotonic() - start, 1)
    if line["status"] == "passed" and not all(check["holds"] for check in line["checks"]):
        line["status"] = "failed"
    return line


def _end_of(process: Any, log: Path) -> str:
    process.join(10)
    return f"its process ended with code {process.exitcode}; see {log.name}"


def _end(process: Any, grace: float) -> None:
    """Ends all that a stage started, and its process if it has not ended by itself within `grace` seconds."""
    process.join(grace)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        process.join(5)


def _child(stage: Stage, device: str, small: bool, scratch: Path, log: Path, lines: Connection) -> None:
    os.setsid()
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    print(f"\n== {stage.name}", flush=True)
    run = Run(device=device, small=small, scratch=scratch, lines=lines)
    try:
        lines.send(("facts", facts(device)))
        stage.function()(run)
        end = {"status": "passed"}
    except ModuleNotFoundError as error:
        name = (error.name or str(error)).partition(".")[0]
        traceback.print_exc()
        own = name in (*SOURCES, "acceptance", "creditgraph")
        end = {"status": "failed" if own else "not run", "reason": f"missing here: {error.name or error}"}
    except BaseException as error:
        traceback.print_exc()
        end = {"status": "failed", "reason": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    sys.stdout.flush()
    lines.send(("end", end))
    lines.close()
    # Without the interpreter's clean-up, which may wait for threads of a stage that failed.
    os._exit(0)


def facts(device: str) -> dict[str, Any]:
    """The device, and versions of what ran on it."""
    import torch

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        name = f"{torch.cuda.get_device_name()}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free)"
    else:
        torch.set_num_threads(1)
        name = f"CPU, {platform.machine()}, one thread"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda or "none"}
    for package in PACKAGES:
        versions[package] = version_of(package)
    return {"device": name, "versions": versions, **code()}


def version_of(package: str) -> str:
    """The version of an installed package; "not installed"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(
            {"megatron.core": "megatron-core", "hydra": "hydra-core", "transformer_engine": "transformer-engine"}.get(
                package, package
            )
        )
    except PackageNotFoundError:
        return "not installed"


def code() -> dict[str, str]:
    """The commit, "unknown" in a copy without git, and a digest of the sources, which every copy has."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() if found.returncode == 0 else ""
    except OSError:
        commit = ""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json", "") and file.is_file() and "__pycache__" not in file.parts:
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return {"commit": commit or "unknown", "sources": digest.hexdigest()[:12]}
