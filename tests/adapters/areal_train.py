"""Trains the embedded model with AReaL: its trainer, controller and two FSDP workers; runs in .venv-verl.

    python areal_train.py MODEL_DIR FOLDER URL

Only generation is not by AReaL: its servers need a GPU, so a stand-in returns fixed rows, and new weights stay where
they are. A teacher answers at URL. Writes FOLDER/results.json.
"""

import json
import sys
from pathlib import Path

import torch
from areal import PPOTrainer
from areal.api import cli_args as cli
from areal.api.io_struct import SaveLoadMeta
from areal.infra.rpc.rtensor import RTensor
from safetensors.torch import load_file

from creditgraph.adapters.areal import CreditPPOTrainer
from creditgraph.adapters.graph import CreditGraph
from creditgraph.pipeline.core.errors import ConfigError


class Rows:
    """In the place of AReaL's servers: groups of rows with two turns of the policy, an observation between them."""

    callback_addr = "127.0.0.1:1"
    sizes = (4, 4, 4, 4)  # of groups

    def prepare_batch(self, *args, **kwargs):
        generator = torch.Generator().manual_seed(0)
        groups = []
        for g, size in enumerate(self.sizes):
            width = 14 + 2 * g  # each group has its own
            ids = torch.randint(3, 24, (size, width), generator=generator, dtype=torch.int32)
            ids[:, :4] = ids[:1, :4]
            mask, attention = torch.zeros(size, width, dtype=torch.int32), torch.ones(size, width, dtype=torch.bool)
            for i in range(size):
                mask[i, 4 : 7 + i % 2] = 1
                ids[i, 7 + i % 2 : 9] = 5 + i % 2  # what the environment wrote
                mask[i, 9 : width - i] = 1
                attention[i, width - i :] = False
            groups.append(
                {
                    "input_ids": ids * attention,
                    "loss_mask": mask,
                    "attention_mask": attention,
                    "logprobs": -torch.rand(size, width, generator=generator) * mask,
                    "versions": torch.zeros(size, width, dtype=torch.int32),
                    "rewards": torch.randint(0, 4, (size,), generator=generator) / 3,
                }
            )
        return groups

    def __getattr__(self, name):
        if name in ("pause", "resume", "set_version", "destroy", "save_perf_tracer"):
            return lambda *args, **kwargs: {}
        raise AttributeError(name)


class WithoutServers:
    """Of a trainer: generation by `Rows`."""

    def _init_scheduler(self):
        scheduler = super()._init_scheduler()
        scheduler.startup_timeout = 200.0  # workers import for 20 s and more on a busy machine; AReaL waits 30 s
        return scheduler

    def _init_rollout(self, *args, **kwargs):
        return Rows()

    def _create_train_engine(self, actor_config, alloc):
        engine = super()._create_train_engine(actor_config, alloc)
        engine.update_weights = lambda meta: None
        update = engine.ppo_update

        def watched(batch):
            self.seen = [{k: x.tolist() for k, x in g.items()} for g in RTensor.localize(batch)]
            update(batch)

        engine.ppo_update = watched
        return engine

    def _export_and_commit_stats(self, **place):
        self.logged = self.actor.export_stats()


class Own(WithoutServers, PPOTrainer):
    """AReaL's."""


class Credited(WithoutServers, CreditPPOTrainer):
    """That of the adapter."""


def config_of(model, folder, name, **actor):
    (folder / name).mkdir()
    names = {"experiment_name": "areal", "trial_name": name}
    worker = cli.SchedulingSpec(cpu=1, cmd=f"{sys.executable} -m areal.infra.rpc.rpc_server")
    actor = {
        **names,
        "path": model,
        "backend": "fsdp:d2",
        "dtype": "float32",
        "attn_impl": "eager",
        "weight_update_mode": "disk",
        "optimizer": cli.OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0),
        "kl_ctl": 0.0,
        "scheduling_spec": (worker,),
        **actor,
    }
    shared = str(folder / name)
    return cli.PPOConfig(
        **names,
        total_train_epochs=1,
        total_train_steps=1,
        tokenizer_path=model,
        train_dataset=cli.TrainDatasetConfig(path="none", type="rl", batch_size=4),
        gconfig=cli.GenerationHyperparameters(n_samples=4),
        rollout=cli.InferenceEngineConfig(backend="vllm:d1"),
        actor=cli.PPOActorConfig(**actor),
        scheduler=cli.SchedulerConfig(type="local"),
        saver=cli.SaverConfig(**names, fileroot=shared),
        evaluator=cli.EvaluatorConfig(**names, fileroot=shared),
        recover=cli.RecoverConfig(**names, fileroot=shared, mode="disabled"),
        stats_logger=cli.StatsLoggerConfig(**names, fileroot=shared),
        cluster=cli.ClusterSpecConfig(
            fileroot=shared, name_resolve=cli.NameResolveConfig(type="nfs", nfs_record_root=shared)
        ),
    )


def step(trainer):
    trainer.train("areal.workflow.multi_turn.MultiTurnWorkflow")
    return {"seen": trainer.seen, "logged": trainer.logged}


def weights_of(trainer, folder):
    trainer.actor.save(SaveLoadMeta(path=str(folder / "weights"), weight_format="hf", with_optim=False))
    return {k: x.double().sum().item() for k, x in load_file(folder / "weights" / "model.safetensors").items()}


def refused(build):
    try:
        build()
    except ConfigError as error:
        return str(error)
    return "none"


def main(model, folder, url):
    data = [{"messages": []}] * 4
    centred = cli.NormConfig(mean_level="group", std_level=None, group_size=4)
    results = {}
    with Own(config_of(model, folder, "own", reward_norm=centred), data) as trainer:
        results["own"] = step(trainer) | {"weights": weights_of(trainer, folder / "own")}
    config = config_of(model, folder, "grpo")
    with Credited(config, data, credit=CreditGraph("grpo", "advantage.normalize=mean")) as trainer:
        results["grpo"] = step(trainer) | {"weights": weights_of(trainer, folder / "grpo")}
        # Groups of several sizes, which AReaL's stride cannot have.
        trainer.credit, trainer.rollout.sizes = CreditGraph("gigpo", "advantage.omega=0.5"), [3, 5, 4, 2]
        results["gigpo"] = step(trainer)
        trainer.credit = taught = CreditGraph("distill", "model=tiny", "teacher.model=tiny", f"--endpoint={url}")
        results["distill"] = step(trainer)
        trainer.credit = CreditGraph("gigpo")
        config.actor.importance_sampling_level = "sequence"
        results["sequence"] = refused(lambda: step(trainer))
        results["agent"] = refused(lambda: trainer.train(lambda data: None))
    for name, actor in (("norms", {"reward_norm": centred, "adv_norm": centred}), ("kl", {"kl_ctl": 0.1})):
        other = config_of(model, folder, name, **actor)
        results[name] = refused(lambda other=other: CreditPPOTrainer(other, data, credit="grpo"))
    other = config_of(model, folder, "hot")
    other.gconfig.temperature = 0.7
    results["hot"] = refused(lambda: CreditPPOTrainer(other, data, credit=taught))
    results["critic"] = refused(lambda: CreditPPOTrainer(config, data, credit="ppo"))
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
