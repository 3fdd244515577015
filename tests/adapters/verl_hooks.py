"""Runs verl's own functions on credit graphs; in the environment .venv-verl.

VERL_USE_EXTERNAL_MODULES=creditgraph.adapters.verl python verl_hooks.py BATCH.json RESULT.json
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transfer_queue
from hooks import said, start_ray
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import KVBatchMeta, PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import FSDPActorConfig
from verl_cpu import workers

from creditgraph.adapters.verl import register, with_model
from creditgraph.adapters.verl_servers import attach
from creditgraph.adapters.verl_workers import VerlPolicy
from creditgraph.pipeline.core.jagged import Jagged

OTHERS = ("uid", "data_source", "reward_model", "extra_info", "multi_modal_inputs")


def queued(columns):
    """Puts columns of outputs into verl's queue, as its agent loops do."""
    keys = columns.pop("keys")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    integer = ("prompts", "responses", "response_mask")
    fields = [
        {
            k: v if k in OTHERS else torch.tensor(v, dtype=torch.int64 if k in integer else torch.float32)
            for k, v in r.items()
        }
        for r in rows
    ]
    tags = [{} for _ in keys]
    transfer_queue.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train")
    return keys


def settings(name, temperature, loss="vanilla", **reward):
    """The part of verl's settings that a step to advantages reads."""
    rollout = {"n": 2, "temperature": temperature, "top_p": 0.5, "top_k": -1, "response_length": 12}
    rollout |= {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 2}
    return SimpleNamespace(
        algorithm=AlgoConfig(adv_estimator=name),
        actor_rollout_ref=OmegaConf.create({"rollout": rollout, "actor": {"policy_loss": {"loss_mode": loss}}}),
        reward=OmegaConf.create({"reward_model": {"enable": False}} | reward),
    )


def trainer_of(name, servers=(), temperature=1.0, workers=None, tokenizer=None, **reward):
    """verl's trainer with as much as its step to advantages reads."""
    concrete = type("Trainer", (PPOTrainer,), {})
    concrete.__abstractmethods__ = frozenset()
    trainer = object.__new__(concrete)
    trainer.config, trainer.actor_rollout_wg = settings(name, temperature, **reward), workers
    trainer.tokenizer = tokenizer
    if servers:
        trainer.standalone_server_manager = SimpleNamespace(server_addresses=list(servers))
    return trainer


def of_queue(name, keys, *args, **given):
    """The step of verl's trainer from rewards to advantages; what it puts into the queue, without padding."""
    trainer = trainer_of(name, *args, **given)
    assert PPOTrainer.fit.__wrapped__  # lends the model, as this does
    step = with_model(PPOTrainer._compute_advantage)
    step(trainer, KVBatchMeta(partition_id="train", keys=keys, tags=[{} for _ in keys]), {})
    names = ["advantages", "returns"]
    found = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=names)
    return {column: [row.tolist() for row in found[column].unbind()] for column in names}


def of_rollouts(columns, name):
    """Advantages of columns by the step of Agent Lightning's trainer, whose rows are requests of rollouts, in order."""
    order = sorted(range(len(columns["keys"])), key=lambda i: columns["keys"][i])
    names = ("token_level_rewards", "token_level_scores", "response_mask", "responses")
    tensors = {name: torch.tensor(columns[name])[order] for name in names}
    prompts = [columns["prompts"][i] for i in order]
    width = max(map(len, prompts))
    tensors["prompts"] = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    tensors["attention_mask"] = torch.tensor([[0] * (width - len(row)) + [1] * (len(row) + 7) for row in prompts])
    others = {"uid": columns["uid"], "rollout_id_list": [key.rsplit("_", 1)[0] for key in columns["keys"]]}
    data = DataProto.from_dict(
        tensors=tensors, non_tensors={k: np.array([v[i] for i in order], dtype=object) for k, v in others.items()}
    )
    advantages = compute_advantage(data, name, config=AlgoConfig()).batch["advantages"]
    return advantages[torch.tensor(order).argsort()].tolist()


def of_batch(name, columns):
    """Advantages by the function of verl's older trainers."""
    tensors = {k: torch.tensor(columns[k]) for k in ("prompts", "responses", "response_mask", "old_log_probs")}
    tensors["token_level_rewards"] = torch.tensor(columns["rm_scores"])
    tensors["attention_mask"] = torch.ones(2, 7, dtype=torch.int64)
    others = {k: np.array(columns[k], dtype=object) for k in ("uid", "reward_model", "multi_modal_inputs")}
    data = DataProto.from_dict(tensors=tensors, non_tensors=others)
    return compute_advantage(data, name, config=AlgoConfig()).batch["advantages"].tolist()


def scored(given, keys):
    """Advantages of a graph that verl's own worker scores texts for, of its queue and of its older trainers."""
    lent, tokenizer = workers(given["model"], given["port"]), AutoTokenizer.from_pretrained(given["model"])
    for name in ("of a queue", "of a batch"):
        register("recipe=toy_rredcot", *given["scored"], name=name)
    trainer = object.__new__(RayPPOTrainer)
    trainer.config, trainer.tokenizer, trainer.actor_rollout_wg = settings("of a batch", 0.7), tokenizer, lent
    assert RayPPOTrainer.fit.__wrapped__  # lends the model, as this does
    attach(ADV_ESTIMATOR_REGISTRY["of a batch"], trainer)
    texts = [Jagged.from_rows(rows, torch.int32) for rows in given["texts"]]
    ours = VerlPolicy(trainer).score(*texts, temperature=0.7)
    rows = [ours.logprobs.to_lists(), ours.entropies.to_lists()]
    queue = of_queue("of a queue", keys, temperature=0.7, workers=lent, tokenizer=tokenizer)["advantages"]
    return {"texts": rows, "credit": [queue, of_batch("of a batch", given["columns"])]}


def asked(given):
    """Advantages of graphs that ask a server, of verl's older trainers and of its queue."""
    out = {}
    columns = given["columns"]
    for name, settings in given["graphs"].items():
        register(name, *settings, name=f"asks {name}")
        out[name] = [of_batch(f"asks {name}", columns)]
    keys = queued(dict(columns))
    for name in given["graphs"]:
        out[name].append(of_queue(f"asks {name}", keys)["advantages"])
    known = columns | {"keys": ["e_0_0", "e_1_0"], "uid": ["e", "e"], "entropy": given["entropy"]}
    out["hicra"] = of_queue("creditgraph:hicra", queued(known))["advantages"]
    out["no entropies"] = said(lambda: of_queue("creditgraph:hicra", keys))
    seen = columns | {"keys": ["d_0_0", "d_1_0"], "multi_modal_inputs": [{"pixel_values": [1]}, {}]}
    out["images"] = said(lambda: of_queue("asks distill", queued(seen)))
    # The trainer's own servers, and verl's rewards.
    register("vineppo", *given["served"], name="served")
    out["scored"] = scored(given, keys)
    model = {"reward_model": {"enable": True}}
    # Before the first batch.
    out["asleep"] = said(lambda: trainer_of("served").fit(None))
    out["of a model"] = said(lambda: trainer_of("served", given["servers"], **model).fit(None))
    out["no loss"] = said(lambda: trainer_of("creditgraph:s_trace").fit(None))
    out["colder"] = said(lambda: trainer_of("asks distill", temperature=0.5).fit(None))
    out["served"] = of_queue("served", keys, given["servers"], temperature=0.0)["advantages"]
    register("vineppo", *given["served"], name="custom")
    custom = {"custom_reward_function": {"path": given["function"], "name": "score"}}
    out["custom"] = of_queue("custom", keys, given["servers"], temperature=0.0, **custom)["advantages"]
    return out


def main():
    start_ray(cpus=8)
    transfer_queue.init()
    batch = json.loads(Path(sys.argv[1]).read_text())
    tensors = {name: torch.tensor(batch[name]) for name in ("token_level_rewards", "response_mask")}
    states = batch["states"]
    register("gigpo", "advantage.omega=0.5", name="mine", states=lambda **given: states[: len(given["index"])])
    out = {}
    names = ["creditgraph:grpo", "creditgraph:gigpo", "creditgraph:mt_grpo", "mine", "grpo", "creditgraph:srpo"]
    for name in names:
        data = DataProto.from_dict(tensors=dict(tensors), non_tensors={"uid": np.array(batch["uid"], dtype=object)})
        try:
            out[name] = compute_advantage(data, name, config=AlgoConfig()).batch["advantages"].tolist()
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    # The same with what verl's older trainers have in a batch.
    further = {name: torch.tensor(batch[name]) for name in ("responses", "prompts", "attention_mask", "values")}
    for name in ("creditgraph:gigpo", "creditgraph:ppo"):
        data = DataProto.from_dict(tensors=tensors | further, non_tensors={"uid": np.array(batch["uid"], dtype=object)})
        data = compute_advantage(data, name, config=AlgoConfig())
        out[f"batch {name}"] = [data.batch[column].tolist() for column in ("advantages", "returns")]
    register("gigpo", f"--record={Path(sys.argv[2]).with_name('credit.jsonl')}", name="recorded")
    whole = queued(batch["queue"])
    for name in ("recorded", "creditgraph:ppo"):
        out[f"queue {name}"] = of_queue(name, whole)
    out["asked"] = asked(batch["asked"])
    sessions = batch["sessions"]
    parts = queued({name: sessions[name] for name in ("keys", "prompts", "responses")})
    for name in ("creditgraph:grpo", "creditgraph:gigpo", "grpo"):
        columns = ("token_level_rewards", "token_level_scores", "response_mask")
        data = DataProto.from_dict(
            tensors={column: torch.tensor(sessions[column]) for column in columns},
            non_tensors={"uid": np.array(sessions["uid"], dtype=object)},
        )
        # As verl's trainer calls it, by the name that it has imported.
        data = trainer_base.compute_advantage_for_multi_trajectories(
            data, batch_keys=parts, adv_estimator=name, config=AlgoConfig()
        )
        out[f"sessions {name}"] = data.batch["advantages"].tolist()
        out[f"rollouts {name}"] = of_rollouts(sessions, name)
    given = {name: torch.tensor(batch[name]) for name in ("old_log_prob", "log_prob", "advantages")}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4)
    for name in ("creditgraph:grpo", "creditgraph:p_trace", "creditgraph:s_trace", "vanilla", "geo_mean"):
        for mode in ("token-mean", "seq-mean-token-mean"):
            logprobs = given["log_prob"].clone().requires_grad_()
            arguments = given | {"log_prob": logprobs, "response_mask": tensors["response_mask"].bool()}
            try:
                loss, metrics = get_policy_loss_fn(name)(**arguments, loss_agg_mode=mode, config=config)
                loss.backward()
                out[f"{name} {mode}"] = [loss.item(), logprobs.grad.tolist(), sorted(metrics)]
            except Exception as error:
                out[f"{name} {mode}"] = f"{type(error).__name__}: {error}"
    whole = given | {"advantages": given["advantages"][:, :1].expand(-1, 7), "response_mask": tensors["response_mask"]}
    out["geo_mean of rows"] = get_policy_loss_fn("geo_mean")(**whole, config=config)[0].item()
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
