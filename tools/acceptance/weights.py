"""Weights from learner to engine, and a checkpoint: speed, memory, and whether a resumed learner is bit-equal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from acceptance.learners import PROMPT, alive, build
from acceptance.measure import Run
from acceptance.models import HALF, QWEN2, batch_of, context_of, random_tokens, shape_of
from creditgraph.components.engine.channel import ChannelSettings, FileChannel
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.engine.weight_files import checksum_of
from creditgraph.pipeline.core.encoding import encode
from creditgraph.pipeline.core.payloads import Weights
from creditgraph.pipeline.run.checkpoint import Checkpoints, load


def publish(run: Run) -> None:
    """The learner's snapshot, its files, and the engine's load, each in GB/s."""
    shape = shape_of(run, QWEN2)
    with alive(run, "hf", shape) as learner:
        with run.peak() as peak:
            start = run.clock()
            weights = learner.weights()
            taken = run.clock() - start
        size = sum(t.nbytes for t in weights.tensors.values())
        run.row(
            what="snapshot of the learner", seconds=taken, gb_per_s=size / taken / 1e9, peak_added_gb=peak["added_gb"]
        )
        channel = FileChannel(ChannelSettings(path=_folder_with_room(run, 3 * size)), run.dtype)
        try:
            for name in ("first version, new files", "third version, files reused"):
                for version in (0,) if name.startswith("first") else (1, 2):
                    start = run.clock()
                    update = channel.publish(Weights(version=version, tensors=weights.tensors))
                    label = update.label()
                    seconds = run.clock() - start
                    channel.retire(version)
                run.row(what=f"publish, {name}", seconds=seconds, gb_per_s=size / seconds / 1e9)
            _load(run, shape, weights, update, label, size)
        finally:
            channel.close()


def _load(run: Run, shape: Any, weights: Weights, update: Any, label: str, size: int) -> None:
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(context_of(run, shape, "engine"))
    with run.peak() as peak:
        start = run.clock()
        engine.run(weights=Weights(version=1, path=update.path))
        seconds = run.clock() - start
    run.row(
        what="engine loads the files", seconds=seconds, gb_per_s=size / seconds / 1e9, peak_added_gb=peak["added_gb"]
    )
    start = run.clock()
    engine.run(weights=Weights(version=2, tensors=weights.tensors))
    seconds = run.clock() - start
    run.row(what="engine loads tensors in memory", seconds=seconds, gb_per_s=size / seconds / 1e9)
    start = run.clock()
    own = checksum_of(weights.tensors or {})
    seconds = run.clock() - start
    run.row(what=f"checksum on the {run.device}", seconds=seconds, gb_per_s=size / seconds / 1e9)
    run.check("the files have the learner's bits", label.endswith(own))
    engine.close()


def _folder_with_room(run: Run, size: int) -> str:
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * size:
        return str(shared)
    run.note(f"/dev/shm has less than {size / 1e9:.1f} GB free; files were written to {run.scratch}.")
    return str(run.scratch)


def checkpoint(run: Run) -> None:
    """A learner that continues from its checkpoint makes the same step as the one that was not stopped."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    shape = shape_of(run, HALF)
    length = 48 if run.small else 4096
    tokens = random_tokens(8, length + 1, shape.vocab, seed=6)
    batch = batch_of(tokens[:, :PROMPT], tokens[:, PROMPT:], shape.vocab)
    settings: dict[str, Any] = {"recompute": "full"}
    folder = run.scratch / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)

    def step(learner: Any) -> dict[str, torch.Tensor]:
        weights = learner.run(trajectories=batch[0], credit=batch[1]).weights
        return {name: t.cpu() for name, t in weights.tensors.items()}

    with alive(run, "hf", shape, **settings) as learner:
        step(learner)
        with run.peak() as peak:
            start = run.clock()
            state = encode(learner.state_dict(), "learner")
            taken = run.clock() - start
        size = sum(t.nbytes for t in state.tensors.values())
        run.row(
            what="state to host memory",
            seconds=taken,
            gb=size / 1e9,
            gb_per_s=size / taken / 1e9,
            peak_added_gb=peak["added_gb"],
        )
        start = run.clock()
        path = Checkpoints(folder).save(1, {"learner": state})
        seconds = run.clock() - start
        run.row(what="write the checkpoint", seconds=seconds, gb=size / 1e9, gb_per_s=size / seconds / 1e9)
        if peak["added_gb"] is not None:
            run.check(
                "memory that a checkpoint adds on the device, share of the state", peak["added_gb"] * 1e9 / size, 0.2
            )
        before = {name: t.clone() for name, t in state.tensors.items()}
        expected = step(learner)
    _resume(run, shape, settings, path, before, expected, step)
    shutil.rmtree(folder, ignore_errors=True)


def _resume(
    run: Run, shape: Any, settings: dict[str, Any], path: Path, before: dict[str, Any], expected: Any, step: Any
) -> None:
    results = []
    for attempt in range(2):
        start = run.clock()
        state = load(path).groups["learner"]
        learner = build(run, "hf", shape, **settings)
        learner.load_state_dict(state)
        seconds = run.clock() - start
        if not attempt:
            run.row(what="read, check and resume", seconds=seconds)
            again = encode(learner.state_dict(), "learner").tensors
            same = again.keys() == before.keys() and all(torch.equal(again[n], t) for n, t in before.items())
            run.check("the resumed state is bit-equal", same)
        results.append(step(learner))
        learner.__dict__.clear()
        del learner, state
        run.free()
    repeats = _equal(*results)
    run.row(what="a step repeated from one state gives the same bits", seconds=None, holds=repeats)
    if repeats:
        run.check("the step after resuming is bit-equal", _equal(results[0], expected))
    else:
        apart = max(float((a.float() - expected[n].float()).abs().max()) for n, a in results[0].items())
        run.note("A step from one state does not repeat its own bits here, so the resumed one is compared in size.")
        run.check("largest difference of a weight after the resumed step", apart, 1e-4)


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())
