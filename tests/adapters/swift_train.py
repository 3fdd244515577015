"""Trains the embedded model with ms-swift and a credit graph; runs in the environment .venv-swift.

    python swift_train.py MODEL_DIR JOBS.json RESULTS.json

As trl_train.py: JOBS.json holds {name: {"graph", "overrides", "objective", "turns", "imported", "swift"}}, "swift" are
arguments of `swift rlhf`, "imported" a module that seems to be imported. RESULTS.json gets for each the loss of each
step, the weights' sums, metrics, and the rollouts of the last batch with their advantages; or "refused".
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

import swift.trainers.mixin
import torch
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.template import TemplateMeta, register_template
from swift.trainers import TrainerFactory

from creditgraph.adapters.swift import CreditGRPOTrainer, register
from creditgraph.pipeline.core.errors import ConfigError

# accelerate collects garbage after each training, which over all that was imported takes a second.
gc.freeze()
torch.set_num_threads(1)
swift.trainers.mixin.check_local_model_is_latest = lambda *_, **__: None  # it asks a server, with retries
register_template(TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=[], suffix=["<eos>"]))
PROMPTS = ["<solve> 3 + 4", "<solve> 5 - 2", "<solve> 2 * 3", "<solve> 7 + 1"]
OBSERVATIONS = [" 5 - 2", " 1 2"]
ARGUMENTS = {
    "rlhf_type": "grpo",
    "model_type": "qwen2",
    "template": "plain",
    "reward_funcs": "thirds",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "max_completion_length": 12,
    "max_length": 64,
    "max_steps": 4,
    "tuner_type": "full",
    "torch_dtype": "float32",
    "use_vllm": "false",
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "optim": "sgd",
    "max_grad_norm": 0,
    "weight_decay": 0,
    "beta": 0,
    "use_cpu": "true",
    "seed": 3,
    "dataloader_num_workers": 0,
}


class Thirds(ORM):
    def __call__(self, completions, **_):
        return [sum(ord(c) % 3 == 0 for c in text) / max(len(text), 1) for text in completions]


orms["thirds"] = Thirds


class Watched(CreditGRPOTrainer):
    """Plays two turns with an observation between them where `turns` is set, and keeps what the graph has read."""

    turns = False
    seen = {}

    def _generate_completions(self, samples):
        samples = super()._generate_completions(samples)
        if not self.turns:
            return samples
        tokenizer = self.template.tokenizer
        for sample in samples:
            ids = sample.response_token_ids
            first, last = ids[:4], [*ids[4:8], 5]
            words = OBSERVATIONS[first[0] % 2]
            sample.messages = [
                *sample.messages[:-1],
                {"role": "assistant", "content": tokenizer.decode(first)},
                {"role": "user", "content": words},
                {"role": "assistant", "content": tokenizer.decode(last)},
            ]
            sample.response_token_ids = [first, last]
            sample.rollout_infos["step_rewards"] = [(first[0] % 5) / 4, (last[0] % 7) / 6]
        return samples

    def _rollouts(self, samples, size):
        rollouts = super()._rollouts(samples, size)
        turn_rewards = rollouts.turn_rewards
        self.seen |= {"mask": rollouts.trained.int().tolist(), "tokens": rollouts.tokens.tolist()}
        self.seen |= {"turn_rewards": turn_rewards, "group": rollouts.group.tolist(), "prompts": rollouts.prompts}
        self.seen |= {"temperature": rollouts.temperature, "rewards": rollouts.rewards.tolist()}
        self.seen |= {"texts": rollouts.texts, "answers": rollouts.answers}
        return rollouts

    def _postprocess_batch(self, samples, batches):
        super()._postprocess_batch(samples, batches)
        self.seen["advantages"] = [
            row[kept.bool()].tolist()
            for one in batches
            for row, kept in zip(one["grpo_batch"].advantages, one["grpo_batch"].completion_mask, strict=True)
        ]


def train(model_dir, job, data):
    cls = GRPOTrainer
    sys.modules.update({job["imported"]: None} if job["imported"] else {})
    try:
        if job["graph"]:
            register(job["graph"], *job["overrides"], objective=job["objective"])
            cls = type("Job", (Watched,), {"turns": job["turns"], "seen": {}})
        module = sys.modules[__name__]
        module.Trainer = cls
        TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.Trainer"
        with tempfile.TemporaryDirectory() as folder:
            arguments = ARGUMENTS | {"model": model_dir, "dataset": data, "output_dir": folder} | job["swift"]
            if job["turns"]:
                arguments["loss_scale"] = "default"  # all turns
            main = SwiftRLHF([word for name, value in arguments.items() for word in (f"--{name}", str(value))])
            trainers = []
            original = cls.__init__

            def kept(self, *args, **kwargs):
                trainers.append(self)
                original(self, *args, **kwargs)

            cls.__init__ = kept
            try:
                main.run()
            finally:
                cls.__init__ = original
    except ConfigError as error:
        return {"refused": str(error)}
    finally:
        sys.modules.pop(job["imported"], None)
    (trainer,) = trainers
    history = trainer.state.log_history
    return {
        "losses": [row["loss"] for row in history if "loss" in row],
        "weights": [float(p.double().sum()) for p in trainer.model.parameters()],
        "metrics": sorted({name for row in history for name in row if name.startswith("credit/")}),
        "logged": list(trainer._logs["advantages"]),
        "seen": getattr(cls, "seen", {}),
    }


def main():
    model_dir, jobs, results = sys.argv[1:4]
    rank = os.environ.get("RANK")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.jsonl"
        rows = [{"messages": [{"role": "user", "content": p}], "solution": "7"} for p in PROMPTS]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        jobs = json.loads(Path(jobs).read_text())
        found = {name: train(model_dir, job, str(data)) for name, job in jobs.items()}
    Path(results if rank is None else f"{results}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
