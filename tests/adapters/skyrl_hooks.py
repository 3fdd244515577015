"""Runs SkyRL's own trainer step, registries and reductions on credit graphs; in the environment .venv-verl.

python skyrl_hooks.py BATCH.json RESULT.json
"""

import functools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import ray
import skyrl_gym
import torch
from hooks import said, start_ray
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    PolicyLossRegistry,
    apply_loss_reduction_to_advantages_minibatch,
    sync_registries,
)
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl.train.trainer import RayPPOTrainer
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import AutoTokenizer

from creditgraph.adapters.skyrl import CreditTrainer, check, register, register_all


def right_aligned(rows):
    """As SkyRL holds what belongs to the tokens of responses."""
    width = max(map(len, rows))
    return torch.tensor([[0.0] * (width - len(row)) + row for row in rows])


def steps_of(given):
    """The batch with a row for each turn, as step-wise trajectories have them: what was read ends the row before."""
    out = {name: [] for name in ("prompts", "responses", "rewards", "masks", "logprobs", "values", "uid", "last")}
    for i, mask in enumerate(given["masks"]):
        begin = mask.index(0) + mask[mask.index(0) :].index(1)
        for cut in (slice(0, begin), slice(begin, None)):
            out["prompts"].append(given["prompts"][i] + given["responses"][i][: cut.start])
            for name in ("responses", "rewards", "masks", "logprobs", "values"):
                out[name].append(given[name][i][cut])
            out["uid"].append(given["uid"][i])
            out["last"].append(cut.stop is None)
    return out


def batch_of(given):
    """The trainer's batch, padded on the left, with one row that only fills it."""
    sequences, attention, response_mask, rewards, loss_mask, logprobs, _ = convert_prompts_responses_to_batch_tensors(
        SimpleNamespace(pad_token_id=0),
        given["prompts"],
        given["responses"],
        given["rewards"],
        given["masks"],
        given["logprobs"],
    )
    batch = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": attention,
            "response_mask": response_mask,
            "rewards": rewards,
            "loss_mask": loss_mask,
            "rollout_logprobs": logprobs,
            "values": right_aligned(given["values"]),
        }
    )
    batch.metadata = {"uids": list(given["uid"]), "avg_response_length": 1.0}
    if "last" in given:
        batch.metadata["is_last_step"] = list(given["last"])
    return pad_training_input_batch(batch, 1)


class AsynchronousTrainer(CreditTrainer, FullyAsyncRayPPOTrainer):
    """As docs/trainers.md has it."""


def settings(step_wise=False, **algorithm):
    """SkyRL's own, with another algorithm."""
    cfg = SkyRLTrainConfig()
    cfg.trainer.algorithm = AlgorithmConfig(**algorithm)
    cfg.generator.step_wise_trajectories = step_wise
    return cfg


def trainer_of(kind, name, step_wise=False):
    """A trainer with what the step from rewards to advantages reads of it."""
    trainer = object.__new__(kind)
    trainer.cfg = settings(step_wise, advantage_estimator=name)
    trainer.all_metrics, trainer.train_dataset = {}, None
    return trainer


class Dispatch:
    """Calls SkyRL's forward pass of its policy workers, and its model, in this process and on a CPU."""

    def __init__(self, path, cfg):
        # For packed rows, which need FlashAttention.
        padding = ModuleType("flash_attn.bert_padding")
        padding.pad_input = padding.unpad_input = None
        sys.modules |= {"flash_attn": ModuleType("flash_attn"), padding.__name__: padding}
        from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
        from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

        torch.cuda.current_device = lambda: torch.device("cpu")
        worker = SimpleNamespace(cfg=cfg, model=HFModelWrapper(path, bf16=False))
        worker._forward_micro_batch = functools.partial(PolicyWorkerBase._forward_micro_batch, worker)
        self.pass_of = functools.partial(PolicyWorkerBase.forward, worker)

    def get_lcm_dp_size(self):
        """As of two replicas."""
        return 2

    def forward(self, model, data):
        assert model == "policy"
        assert len(data) % 2 == 0
        return self.pass_of(data)


class Lengths(BaseTextEnv):
    """Rewards a response by its length and the reference answer; with more than one turn to come it goes on."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.answer, self.turns = float(extras["reward_spec"]["ground_truth"]), extras["max_turns"]

    def step(self, action):
        reward = len(action.rstrip()) % 7 / 16 + self.answer / 8
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=self.turns == 1, metadata={})


class Entries(list):
    """Entries that are copies, as those of a table."""

    def __getitem__(self, place):
        return dict(super().__getitem__(place))


def served(given):
    """Advantages of graphs that ask SkyRL's workers or servers, and refusals."""
    skyrl_gym.register(id="lengths", entry_point=Lengths)

    def advantages(name, graph="vineppo", temperature=0.0, turns=1, zero=False, together=False, other=False, at=()):
        register(graph, *given["graphs"][graph], *at, name=name)
        trainer = trainer_of(CreditTrainer, name)
        trainer.cfg.trainer.placement.colocate_all = together
        trainer.cfg.trainer.policy.model.path = "tiny"
        generator = trainer.cfg.generator
        generator.max_turns, generator.zero_reward_on_non_stop = turns, zero
        generator.sampling_params.temperature, generator.sampling_params.max_generate_length = temperature, 12
        check(trainer.cfg)
        trainer.inference_engine_client = SimpleNamespace(proxy_url=given["url"], server_urls=[given["url"]])
        if graph != "vineppo" and not at:
            trainer.cfg.trainer.algorithm.temperature = temperature
            trainer.tokenizer = AutoTokenizer.from_pretrained(given["model"])
            trainer.dispatch = Dispatch(given["model"], trainer.cfg.trainer)
        trainer.train_dataset = object.__new__(PromptDataset)
        trainer.train_dataset.prompt_key, trainer.train_dataset.env_class_key = "prompt", "env_class"
        entry = {"prompt": [{"role": "user", "content": "?"}], "env_class": "lengths"}
        trainer.train_dataset.dataframe = Entries([entry | {"reward_spec": {"ground_truth": "4"}}])
        if other:
            trainer.train_dataset = []
        return trainer.compute_advantages_and_returns(batch_of(given["batch"]))["advantages"].tolist()

    cases = {
        "vineppo": {},
        "rredcot": {"graph": "recipe=toy_rredcot", "temperature": 0.7, "together": True},
        "zero": {"zero": True},
        "asleep": {"together": True},
        "colder": {"graph": "recipe=toy_rredcot", "temperature": 0.5, "at": given["where"]},
        "goes on": {"turns": 2},
        "another dataset": {"other": True},
    }
    return {name: said(lambda name=name, case=case: advantages(name, **case)) for name, case in cases.items()}


def in_another_process(name):
    """The class of the loss that a worker of SkyRL gets under a name."""
    return type(PolicyLossRegistry.get(name)).__name__


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    register_all()
    register("gigpo", "advantage.omega=0.5", name="mine")
    out = {}

    def advantages(name, kind=CreditTrainer, column="advantages", given=given):
        return trainer_of(kind, name).compute_advantages_and_returns(batch_of(given))[column].tolist()

    for name in ("grpo", "creditgraph:grpo", "creditgraph:gigpo", "creditgraph:mt_grpo", "mine", "creditgraph:srpo"):
        out[name] = said(lambda name=name: advantages(name))
    register("vineppo", *given["settings"], name="asks")
    out["asked"] = said(lambda: advantages("asks", given=given["asked"]))
    register("distill", *given["teacher"], name="distill")
    out["distill"] = said(lambda: advantages("distill", given=given["asked"]))
    out["served"] = served(given["served"])
    out["ppo"] = [advantages("creditgraph:ppo", column=column) for column in ("advantages", "returns")]
    for name in ("grpo", "creditgraph:grpo", "creditgraph:gigpo", "creditgraph:mt_grpo", "creditgraph:ppo"):
        trainer, batch = trainer_of(CreditTrainer, name, step_wise=True), batch_of(steps_of(given))
        batch = trainer.compute_advantages_and_returns(batch)
        columns = {key: batch[key].tolist() for key in ("advantages", "returns")}
        metric = "loss/avg_final_rewards"
        out[f"steps {name}"] = columns | {"last": batch.metadata["is_last_step"], metric: trainer.all_metrics[metric]}
    out["asynchronous"] = said(lambda: advantages("creditgraph:gigpo", AsynchronousTrainer))
    out["plain trainer"] = said(lambda: advantages("creditgraph:mt_grpo", RayPPOTrainer))
    chosen = {
        "grpo": {"advantage_estimator": "grpo"},
        "mt_grpo, p_trace": {"advantage_estimator": "creditgraph:mt_grpo", "policy_loss_type": "creditgraph:p_trace"},
        "srpo": {"advantage_estimator": "creditgraph:srpo"},
        "loss of grpo_lambda": {"policy_loss_type": "creditgraph:grpo_lambda"},
    }
    for name, options in chosen.items():
        out[f"check {name}"] = said(lambda options=options: check(settings(**options)))
    chosen = settings(policy_loss_type="creditgraph:grpo")
    out["asynchronous loss"] = said(lambda: AsynchronousTrainer(chosen))
    batch = batch_of(given)
    config = AlgorithmConfig(policy_loss_type="regular")
    old = batch["rollout_logprobs"]
    for reduction in ("token_mean", "sequence_mean"):
        scaled = apply_loss_reduction_to_advantages_minibatch(
            torch.tensor(given["advantages"]), batch["loss_mask"], reduction, len(old), old.shape[1]
        )
        for name in ("regular", "creditgraph:grpo", "creditgraph:p_trace", "creditgraph:s_trace"):

            def loss(name=name, scaled=scaled):
                logprobs = (old + torch.tensor(given["moved"])).requires_grad_()
                policy_loss = PolicyLossRegistry.get(name)
                value, metrics = policy_loss(logprobs, old, scaled, config, batch["loss_mask"], old)
                value.backward()
                return [value.item(), logprobs.grad.tolist(), sorted(metrics)]

            out[f"{name} {reduction}"] = said(loss)
    start_ray()
    sync_registries()
    remote = ray.remote(in_another_process)
    out["in a worker"] = ray.get(remote.remote("creditgraph:p_trace"))
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
