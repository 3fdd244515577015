"""What the ranks run: learners of any layout on the batches of a test, as `learner.hf` runs them in its process."""

from __future__ import annotations

from typing import Any

import torch
from replicas import of_all, own_rows, run_own

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.objective import KL, OBJECTIVES, EntropyMask, Importance, ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.components.models.experts import unstack
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories
from creditgraph.pipeline.core.ranks import DeviceSlots, Ranks
from creditgraph.pipeline.run.distributed.processes import swap

VOCAB = 42
# Adam's ε is large: with the usual one it would blow rounding errors of near-zero gradients up to whole steps.
OPTIMIZER = OptimizerSettings(lr=3e-3, eps=1e-3, grad_clip=0.1, weight_decay=0.1, schedule="linear", warmup=2)


def make_batch(
    seed: int = 0, prompts: int = 4, per_prompt: int = 3, version: int = 0, candidates: int = 0, replays: int = 0
) -> tuple[Trajectories, Credit]:
    """Rows of unequal length; rows share their prompt, and every third one a prefix of its sibling's response.

    Each token has two of 4 experts in each of `replays` layers, the same at equal positions of all rows; those of the
    first prompt have none.
    """
    g = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=g).tolist()

    def size(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    prompt_rows, rows, inherited = [], [], []
    for _ in range(prompts):
        prompt, first = tokens(size(3, 9)), tokens(size(6, 14))
        for i in range(per_prompt):
            keep = 4 if i == 2 else 0
            prompt_rows.append(prompt)
            rows.append(first if i == 0 else first[:keep] + tokens(size(2, 14)))
            inherited.append(keep)
    response = Jagged.from_rows(rows, torch.int32)
    count = len(rows)
    noise, uid = torch.rand(len(response.values), generator=g), torch.arange(count) + 100 * (seed + 1)
    group = torch.arange(count) // per_prompt
    trajectories = Trajectories(
        uid=uid,
        prompt_uid=group,
        group=group,
        parent=torch.full((count,), -1),
        prompt_tokens=Jagged.from_rows(prompt_rows, torch.int32),
        response_tokens=response,
        inherited=torch.tensor(inherited),
        engine_logprobs=response.with_values(-3.5 - noise),
        entropies=response.with_values(3.0 * noise),
        thought_ends=Jagged.from_rows([[len(r)] for r in rows], torch.int32),
        policy_version=torch.full((count,), version),
        finish_reason=["eos"] * count,
        text=[""] * count,
        temperature=0.9,
    )
    if replays:
        sizes = [len(p) + len(r) - 1 for p, r in zip(prompt_rows, rows, strict=True)]
        table = torch.rand(max(sizes), replays, 4, generator=g).argsort(-1)[..., :2].flatten(1).to(torch.uint8)
        of_rows = [table[: size * (i >= per_prompt)].flatten() for i, size in enumerate(sizes)]
        trajectories = trajectories.replace(routed_experts=Jagged.from_rows(of_rows))
    advantage = response.spread(torch.randn(count, generator=g))
    shaping = response.with_values(torch.where(noise > 0.5, 0.1, 0.0))
    gate = response.with_values((noise > 0.3).float())
    fresh = response.with_values(response.positions >= response.spread(trajectories.inherited).values)
    columns = {"shaping": shaping, "gate": gate}
    for i in range(candidates):
        ids = torch.randint(0, VOCAB, (len(noise),), generator=g, dtype=torch.int32)
        columns[f"candidate_{i}"] = response.with_values(ids)
        columns[f"teacher_logprob_{i}"] = response.with_values(-2.0 - torch.rand(len(noise), generator=g))
    return trajectories, Credit(uid=uid, advantage=advantage, mask=fresh, columns=columns)


def two_runs(learner: Any, after_first: Any = None, replays: int = 0) -> tuple[list[dict[str, float]], Any]:
    """The metrics of two runs on two batches, and what `after_first` says after the first."""
    out, said = [], None
    for seed in range(2):
        learner.context.iteration = seed
        batch = make_batch(
            seed, version=seed, candidates=2 * (learner.config.objective.use == "distill"), replays=replays
        )
        out.append(run_own(learner, *batch).report.metrics)
        if seed == 0 and after_first is not None:
            said = after_first(learner)
    return out, said


def hf_learner(folder: str, settings: dict[str, Any], dtype: str = "float32") -> HFLearner:
    """The reference."""
    learner = HFLearner(HFLearner.Config(**{"optimizer": OPTIMIZER, **settings}))
    learner.setup(Context(node="learner", iterations=3, model=ModelSpec(path=folder, dtype=dtype)))
    return learner


def megatron_learner(
    folder: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
    dtype: str = "float32",
    turns: DeviceSlots | None = None,
) -> Any:
    """This rank's learner in the present torch.distributed world."""
    import torch.distributed as dist

    from creditgraph.components.learner.megatron.learner import MegatronLearner

    config = MegatronLearner.Config(**{"optimizer": OPTIMIZER, **layout, **settings})
    world = dist.get_world_size()
    ranks = Ranks(rank=dist.get_rank(), world=world, num_replicas=world // MegatronLearner.ranks_per_replica(config))
    learner = MegatronLearner(config)
    learner.setup(
        Context(
            node="learner",
            iterations=3,
            ranks=ranks,
            all_sum=sum_over_replicas,
            exchange=exchange_over_replicas,
            model=ModelSpec(path=folder, dtype=dtype),
            slots=turns or DeviceSlots(),
        )
    )
    return learner


def sum_over_replicas(value: torch.Tensor) -> torch.Tensor:
    """Over ranks of the same place in every replica."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    value = value.clone()
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return value


def exchange_over_replicas(parts: list[Any]) -> list[Any]:
    """Between the same ranks."""
    from megatron.core import parallel_state

    return swap(parts, parallel_state.get_data_parallel_group())


def clipped_gradients(learner: Any) -> dict[str, torch.Tensor]:
    """Whole clipped gradients of the first step in Hugging Face names: Adam's first moment over 1 − β₁."""
    parts = learner.backend.optimizer.inner.chained_optimizers
    moments = {p: s["exp_avg"] for part in parts for p, s in part.optimizer.state.items()}
    kept = {p: p.detach().clone() for p in moments}
    with torch.no_grad():
        for p, moment in moments.items():
            p.copy_(moment / 0.1)
    result = dict(learner.backend.model.export())
    with torch.no_grad():
        for p, value in kept.items():
            p.copy_(value)
    return result


def logprobs_of(learner: Any, replays: int = 0) -> torch.Tensor:
    """Per-token log-probs of one batch under the present weights, as `old_logprobs: recompute` makes them."""
    rows = own_rows(learner.context.ranks, *make_batch(9, replays=replays))
    training = RolloutTraining(learner.config, learner.context, learner.backend, *rows, learner.version)
    return of_all(learner, training.score(reference=False))


def train(
    folder: str, layout: dict[str, Any], cases: dict[str, dict[str, Any]], dtype: str = "float32"
) -> dict[str, dict[str, Any]]:
    """For each case: metrics of two runs, log-probs afterwards, the gradient of the first step, last weights."""
    out = {}
    for name, settings in cases.items():
        learner = megatron_learner(folder, layout, settings, dtype)
        # The distributed optimizer's moments lie across parameters.
        metrics, gradients = two_runs(
            learner, None if layout.get("distributed_optimizer") == "on" else clipped_gradients, 4 * (name == REPLAY)
        )
        out[name] = {
            "gradients": gradients,
            "metrics": metrics,
            "logprobs": logprobs_of(learner, 4 * (name == REPLAY)),
            "weights": learner.initial()["weights"].tensors,
        }
    return out


REPLAY = "replay"  # the case whose tokens go to given experts
WIDE = {"clip_low": 0.2, "clip_high": 0.2}
# Settings of the learner that exercise more of an objective than its defaults do.
SPECIAL: dict[str, dict[str, Any]] = {
    "reinforce": {
        "objective": ObjectiveSettings(use="reinforce", entropy_bonus=0.01, aggregate="seq_mean_token_mean"),
        "micro_batch_tokens": 0,
    },
    "ppo_clip": {
        "objective": ObjectiveSettings(use="ppo_clip", kl=KL(coefficient=0.1), importance=Importance(cap=2.0)),
        "old_logprobs": "recompute",
        "minibatches": 2,
        "micro_batch_tokens": 60,
    },
    "gspo": {"objective": ObjectiveSettings(use="gspo", config=WIDE), "micro_batch_tokens": 60},
    "gspo_gated": {
        "objective": ObjectiveSettings(use="gspo_gated", config=WIDE, entropy_mask=EntropyMask(keep=0.5, where="loss")),
        "epochs": 2,
        "micro_batch_tokens": 40,
    },
    "trace": {
        "objective": ObjectiveSettings(use="trace", config={"style": "both"}),
        "micro_batch_tokens": 60,
    },
    # Each row its own micro-batch: the longest sequence is above the budget.
    "shaped_probability": {
        "objective": ObjectiveSettings(use="shaped_probability"),
        "micro_batch_tokens": 10,
        "share_prefixes": False,
    },
}
# Every shipped objective; one without special settings is trained with its defaults.
CASES = {
    use: SPECIAL.get(use) or {"objective": ObjectiveSettings(use=use), "micro_batch_tokens": 60} for use in OBJECTIVES
} | {
    "p_trace": {
        "objective": ObjectiveSettings(use="trace", config={"clip": "current"}),
        "minibatches": 2,
        "micro_batch_tokens": 60,
    },
}


def train_hf(folder: str, cases: dict[str, dict[str, Any]], dtype: str = "float32") -> dict[str, dict[str, Any]]:
    """What `train` returns, of learner.hf."""
    out = {}
    for name, settings in cases.items():
        learner = hf_learner(folder, settings, dtype)
        metrics, moments = two_runs(learner, lambda x: x.state_dict()["optimizer"]["moments"], 4 * (name == REPLAY))
        out[name] = {
            "gradients": dict(unstack({n: m["exp_avg"] / 0.1 for n, m in moments.items()})),
            "metrics": metrics,
            "logprobs": logprobs_of(learner, 4 * (name == REPLAY)),
            "weights": learner.initial()["weights"].tensors,
        }
    return out


def train_layouts(
    folder: str, layouts: list[dict[str, Any]], cases: dict[str, dict[str, Any]], dtype: str = "float32"
) -> list[Any]:
    """`train` for several layouts, one after the other."""
    return [train(folder, layout, cases, dtype) for layout in layouts]


def one_prompt(folder: str, layout: dict[str, Any]) -> tuple[dict[str, float], Any, Any]:
    """A step on one prompt, which one replica takes; the others have nothing to compute."""
    learner = megatron_learner(folder, layout, CASES["reinforce"])
    out = run_own(learner, *make_batch(0, prompts=1))
    return out.report.metrics, out.weights.tensors, of_all(learner, out.logprobs.logprobs)


def one_step(
    folder: str, layouts: list[dict[str, Any]], settings: dict[str, Any]
) -> list[tuple[torch.Tensor, dict[str, float]]]:
    """Per layout: the log-probs that a step gives out, and what it logs."""
    out = []
    for layout in layouts:
        learner = megatron_learner(folder, layout, settings)
        made = run_own(learner, *make_batch(0))
        out.append((of_all(learner, made.logprobs.logprobs), dict(learner.context.metrics)))
    return out


def spoiled(folder: str, layout: dict[str, Any], what: str) -> tuple[dict[str, float], bool, bool]:
    """A step with a NaN loss or gradient on the last rank: metrics, whether weights stayed, whether a step follows."""
    import torch.distributed as dist

    learner = megatron_learner(folder, layout, CASES["gspo"])
    before = [p.detach().clone() for c in learner.backend.model.chunks for p in c.parameters()]
    own = learner.backend.model.logprobs

    def logprobs(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if what == "gradient" and hidden.requires_grad:  # not of the fixed sequence that is scored
            hidden = hidden.clone()
            hidden.register_hook(lambda grad: grad * float("nan"))
        result = own(hidden, *args, **kwargs)
        return tuple(x.with_values(x.values * float("nan")) for x in result) if what == "loss" else result

    if dist.get_rank() == dist.get_world_size() - 1:
        learner.backend.model.logprobs = logprobs
    trajectories, credit = make_batch(0)
    metrics = run_own(learner, trajectories, credit).report.metrics
    stayed = all(
        torch.equal(a, b)
        for a, b in zip(before, (p for c in learner.backend.model.chunks for p in c.parameters()), strict=True)
    )
    learner.backend.model.logprobs = own
    again = run_own(learner, trajectories, credit).report.metrics
    return metrics, stayed, again["steps"] == 1.0


def save_and_step(folder: str, layout: dict[str, Any], target: str, dtype: str = "float32") -> dict[str, Any]:
    """Two steps, a checkpoint that is written during the third step, and what this makes."""
    from pathlib import Path

    learner = megatron_learner(folder, layout, CASES["ppo_clip"], dtype)
    for seed in range(2):
        step(learner, seed)
    pending = learner.save_shards(Path(target))
    saved = dict(learner.backend.model.export())
    third = step(learner, 2)
    assert not (Path(target) / "metadata.json").exists()  # without it nothing is read
    pending.finish()
    assert pending.done()
    return {"saved": saved, **third}


def shared(folder: str, target: str) -> tuple[float, int]:
    """MB that this rank writes of a checkpoint with the distributed optimizer, and tensors it sends or receives."""
    from pathlib import Path
    from unittest import mock

    import torch.distributed as dist

    learner = megatron_learner(folder, {"distributed_optimizer": "on"}, CASES["ppo_clip"])
    names = ("gather", "scatter", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "send", "recv")
    with mock.patch.multiple(dist, **{name: mock.Mock(wraps=getattr(dist, name)) for name in names}):
        learner.save_shards(Path(target)).finish()
        # What all_gather_object and gather_object send are a description of the shards, as bytes.
        calls = [call for name in names for call in getattr(dist, name).call_args_list]
    moved = [x for call in calls for x in (*call.args, *call.kwargs.values()) if isinstance(x, torch.Tensor)]
    own = Path(target).glob(f"__{dist.get_rank()}_*.distcp")
    return sum(f.stat().st_size for f in own) / 1e6, sum(x.is_floating_point() for x in moved)


def fails_to_save(folder: str, target: str) -> str:
    """The sentence of a checkpoint whose folder vanishes before the writers open their files."""
    import shutil
    from pathlib import Path

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from creditgraph.pipeline.core.errors import RunError

    learner = megatron_learner(folder, {}, {})
    own = filesystem_async.FileSystemWriterAsync.preload_tensors

    def preload(*args: Any) -> Any:
        if dist.get_rank() == 0:
            shutil.rmtree(target)
        return own(*args)

    filesystem_async.FileSystemWriterAsync.preload_tensors = staticmethod(preload)
    try:
        learner.save_shards(Path(target)).finish()
    except RunError as error:
        return str(error)
    finally:
        filesystem_async.FileSystemWriterAsync.preload_tensors = staticmethod(own)
    return ""


def loses_its_writer(folder: str, target: str) -> str:
    """The sentence of a checkpoint whose writers are killed on the first rank."""
    import os
    import signal
    from pathlib import Path

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from creditgraph.components.learner.megatron import checkpoint
    from creditgraph.pipeline.core.errors import RunError

    learner = megatron_learner(folder, {}, {})
    writer = filesystem_async.FileSystemWriterAsync
    own, patience = writer.write_preloaded_data, checkpoint.PATIENCE

    def killed(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    writer.write_preloaded_data, checkpoint.PATIENCE = staticmethod(killed), 2.0
    try:
        learner.save_shards(Path(target)).finish()
    except RunError as error:
        return str(error)
    finally:
        writer.write_preloaded_data, checkpoint.PATIENCE = staticmethod(own), patience
    return ""


def resume_and_step(folder: str, layout: dict[str, Any], target: str, dtype: str = "float32") -> dict[str, Any]:
    """The weights of a checkpoint, and what the third step makes of them."""
    from pathlib import Path

    learner = megatron_learner(folder, layout, CASES["ppo_clip"], dtype)
    learner.load_shards(Path(target))
    return {"saved": dict(learner.backend.model.export()), **step(learner, 2)}


def step(learner: Any, seed: int) -> dict[str, Any]:
    """One run: its metrics and weights."""
    learner.context.iteration = seed
    trajectories, credit = make_batch(seed, version=seed)
    out = run_own(learner, trajectories, credit)
    return {"metrics": out.report.metrics, "weights": out.weights.tensors, "version": learner.version}


def fails_to_load(folder: str, target: str) -> str:
    """The sentence of `load_shards`."""
    from pathlib import Path

    from creditgraph.pipeline.core.errors import RunError

    learner = megatron_learner(folder, {}, {})
    try:
        learner.load_shards(Path(target))
    except RunError as error:
        return str(error)
    return ""


def taking_turns(folder: str, layout: dict[str, Any], dtype: str, target: str) -> dict[str, Any]:
    """A learner that shares its devices with engines and one that does not, on the same batches; a checkpoint between.

    What the first has on the device while engines sample, and whether weights and resumed weights are the same bits.
    """
    import dataclasses
    from pathlib import Path

    from creditgraph.components.models.fixed_sequence import fixed_tokens

    def learn(turns: DeviceSlots, resume: bool = False) -> tuple[Any, Any]:
        learner = megatron_learner(folder, layout, CASES["reinforce"], dtype, turns)
        if resume:
            learner.load_shards(Path(target))
        for seed in (1,) if resume else (0, 1):
            turns.end()  # as the executor does when an iteration begins
            learner.context.iteration = seed
            trajectories, credit = make_batch(seed, version=seed)
            out = run_own(learner, trajectories, credit)
            if seed == 0 and turns.shared:
                learner.save_shards(Path(target)).finish()
        turns.end()
        return learner, out

    _, expected = learn(DeviceSlots())
    meetings: list[int] = []
    learner, actual = learn(DeviceSlots(shared=True, meet=lambda: meetings.append(1)))
    held, stay = learner.backend.offloadable()
    own = {p.untyped_storage()._cdata for p in stay}
    moved = [t for t in held if t.untyped_storage()._cdata not in own]
    _, resumed = learn(DeviceSlots(shared=True), resume=True)
    assert dataclasses.asdict(actual.weights.scored) == dataclasses.asdict(expected.weights.scored)
    return {
        "moved": len(moved),
        "left": sum(t.untyped_storage().nbytes() for t in moved),
        "meetings": len(meetings),
        "weights": [None if w.weights.tensors is None else w.weights.tensors for w in (expected, actual, resumed)],
        "scored": actual.weights.scored.logprobs,
        "tokens": actual.weights.scored.tokens == fixed_tokens(VOCAB, 64),
    }
