"""What the tests of sharding run on every rank of a pool."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas import own_rows, run_own

from creditgraph.components.learner.dtensors import gather
from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.objective import KL, ObjectiveSettings
from creditgraph.components.learner.optimizer import OptimizerSettings
from creditgraph.pipeline.core.component import Context, ModelSpec, identity_sum
from creditgraph.pipeline.core.errors import CreditgraphError
from creditgraph.pipeline.core.ranks import Ranks
from creditgraph.pipeline.run.distributed.processes import swap


def beside(name: str) -> Any:
    """A module of the tests of learner.megatron, which train on the same batches."""
    key = f"creditgraph_test_megatron_{name}"
    if key not in sys.modules:
        path = Path(__file__).parent.parent / "megatron" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(key, path)
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]


training = beside("training")
OPTIMIZER: OptimizerSettings = training.OPTIMIZER
KEPT = ObjectiveSettings(use="ppo_clip", kl=KL(coefficient=0.1))
LORA = {"lora": Lora(rank=3, alpha=6.0), "objective": KEPT, "old_logprobs": "recompute", "micro_batch_tokens": 30}
CASES: dict[str, dict[str, Any]] = {
    # Shared prefixes in one micro-batch; a reference, mini-batches without rows on some ranks; a micro-batch per row.
    "reinforce": training.CASES["reinforce"],
    "ppo_clip": training.CASES["ppo_clip"],
    "shaped_probability": training.CASES["shaped_probability"] | {"recompute": "full"},
    "lora": LORA,
    "lora_recompute": LORA | {"recompute": "full", "minibatches": 2},
}


def learner_of(folder: str, settings: dict[str, Any], dtype: str = "float32") -> HFLearner:
    """A learner that was set up on this rank, in the present torch.distributed world or alone."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = Ranks(rank=dist.get_rank() if world > 1 else 0, world=world, num_replicas=world)

    def all_sum(value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    learner = HFLearner(HFLearner.Config(**{"optimizer": OPTIMIZER, **settings}))
    spec = ModelSpec(path=folder, dtype=dtype)
    context = Context(
        node="learner", iterations=3, ranks=ranks, all_sum=all_sum if world > 1 else identity_sum, model=spec
    )
    if world > 1:
        context.exchange = lambda parts: swap(parts, dist.group.WORLD)
    learner.setup(context)
    return learner


def computes_in(folder: str, size: int, dtype: str) -> tuple[str, str]:
    """The dtype that a sharded learner computes in, and that of its shards."""
    learner = learner_of(folder, {"fsdp_size": size}, dtype)
    return str(learner.model.dtype), str(next(iter(learner.model.trainable().values())).dtype)


def moments(learner: HFLearner) -> dict[str, torch.Tensor]:
    """Whole first moments by parameter; after one step they are the clipped gradients times 1 − β₁."""
    held = learner.optimizer.tensors()
    return {name.removeprefix("exp_avg/"): gather(t).clone() for name, t in held.items() if name.startswith("exp_avg/")}


def train(folder: str, size: int, cases: dict[str, dict[str, Any]], dtype: str = "float32") -> dict[str, Any]:
    """Per case: metrics of two runs, clipped gradients of the first, log-probs and weights at last."""
    out = {}
    for name, settings in cases.items():
        learner = learner_of(folder, settings | {"fsdp_size": size}, dtype)
        replays = 2 * (name == training.REPLAY)
        metrics, gradients = training.two_runs(learner, moments, replays)
        out[name] = {
            "metrics": metrics,
            "gradients": {n: g / 0.1 for n, g in gradients.items()},
            "logprobs": training.logprobs_of(learner, replays),
            "weights": learner.weights().tensors,
        }
    return out


def memory(folder: str, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Elements that this rank holds of weights, gradients and moments; the largest read and export at once."""
    from creditgraph.components.learner.hf import files

    read, real = [], files._read

    def counting(*args: Any) -> torch.Tensor:
        tensor = real(*args)
        read.append(tensor.numel())
        return tensor

    files._read = counting
    try:
        learner = learner_of(folder, settings | {"fsdp_size": size})
    finally:
        files._read = real
    run_own(learner, *training.make_batch(0))
    held = [t.to_local() for t in learner.optimizer.tensors().values() if t.dim()]
    exported = list(learner.backend.export())
    return {
        "held": sum(t.untyped_storage().nbytes() // 4 for t in held),
        "read": sum(read),
        "model": sum(p.to_local().numel() for p in learner.model.causal_lm.parameters()),
        "freed": sum(t.untyped_storage().size() == 0 for _, t in exported),
        "exported": len(exported),
    }


def save_and_step(folder: str, size: int, settings: dict[str, Any], target: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and what the third step makes."""
    learner = learner_of(folder, settings | {"fsdp_size": size})
    for seed in range(2):
        training.step(learner, seed)
    learner.save_shards(Path(target))
    return {"state": learner.state_dict(), **training.step(learner, 2)}


def resume_and_step(
    folder: str, size: int, settings: dict[str, Any], state: dict[str, Any], target: str
) -> dict[str, Any]:
    """What the third step makes after a checkpoint."""
    learner = learner_of(folder, settings | {"fsdp_size": size})
    learner.load_state_dict(state)
    learner.load_shards(Path(target))
    return training.step(learner, 2)


def refused(folder: str, settings: dict[str, Any], target: str = "") -> str:
    """The sentence with which a learner is refused, or what it loads."""
    try:
        learner = learner_of(folder, settings)
        if target:
            learner.load_shards(Path(target))
    except CreditgraphError as error:
        return str(error)
    return ""


def critic(folder: str, size: int, target: str = "") -> dict[str, Any]:
    """Values of this replica's rows in three steps of a critic; with a folder, resumed after two."""
    from creditgraph.components.learner.hf.critic import Critic
    from creditgraph.components.segmenter.fixed import fixed_ends
    from creditgraph.pipeline.core.payloads import Rewards, Segments

    like = learner_of(folder, {"fsdp_size": 1}).context

    def made() -> Critic:
        node = Critic(Critic.Config(optimizer=OPTIMIZER, fsdp_size=size, minibatches=2))
        node.setup(Context(node="value", iterations=3, ranks=like.ranks, all_sum=like.all_sum, model=like.model))
        node.context.exchange = like.exchange
        return node

    def step(node: Critic, seed: int) -> torch.Tensor:
        rows = own_rows(like.ranks, *training.make_batch(seed))[0]
        right = rows.uid % 2 == 0
        rewards = Rewards(
            uid=rows.uid, value=right.float(), correct=right, valid=torch.ones_like(right), detail=[""] * len(rows)
        )
        segments = Segments(uid=rows.uid, ends=fixed_ends(rows.response_tokens.lengths, 2))
        node.context.iteration = seed
        return node.run(trajectories=rows, segments=segments, rewards=rewards).values.values.values

    node = made()
    out = {"values": [step(node, seed) for seed in range(2)]}
    if target:
        node.save_shards(Path(target))
        state, node = node.state_dict(), made()
        node.load_state_dict(state)
        node.load_shards(Path(target))
    out["values"].append(step(node, 2))
    return out | {"metrics": {k: v for k, v in node.context.metrics.items() if "seconds" not in k}}
