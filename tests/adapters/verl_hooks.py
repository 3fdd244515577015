"""Runs verl's own functions on credit graphs; in the environment .venv-verl.

VERL_USE_EXTERNAL_MODULES=creditgraph.adapters.verl python verl_hooks.py BATCH.json RESULT.json
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.config import FSDPActorConfig

from creditgraph.adapters.verl import register


def main():
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
    sessions = batch["sessions"]
    for name in ("creditgraph:grpo", "creditgraph:gigpo", "grpo"):
        columns = ("token_level_rewards", "token_level_scores", "response_mask")
        data = DataProto.from_dict(
            tensors={column: torch.tensor(sessions[column]) for column in columns},
            non_tensors={"uid": np.array(sessions["uid"], dtype=object)},
        )
        # As verl's trainer calls it, by the name that it has imported.
        data = trainer_base.compute_advantage_for_multi_trajectories(
            data, batch_keys=sessions["keys"], adv_estimator=name, config=AlgoConfig()
        )
        out[f"sessions {name}"] = data.batch["advantages"].tolist()
    given = {name: torch.tensor(batch[name]) for name in ("old_log_prob", "log_prob", "advantages")}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=4)
    for name in ("creditgraph:grpo", "creditgraph:p_trace", "creditgraph:s_trace", "vanilla"):
        for mode in ("token-mean", "seq-mean-token-mean"):
            logprobs = given["log_prob"].clone().requires_grad_()
            arguments = given | {"log_prob": logprobs, "response_mask": tensors["response_mask"].bool()}
            try:
                loss, metrics = get_policy_loss_fn(name)(**arguments, loss_agg_mode=mode, config=config)
                loss.backward()
                out[f"{name} {mode}"] = [loss.item(), logprobs.grad.tolist(), sorted(metrics)]
            except Exception as error:
                out[f"{name} {mode}"] = f"{type(error).__name__}: {error}"
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
