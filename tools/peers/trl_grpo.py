"""TRL's GRPOTrainer on prompts given as JSON; runs in an environment of its own (see tools/bench_peers).

    python trl_grpo.py MODEL_DIR PROMPTS.json RESULT.json

PROMPTS.json holds {"prompts": [{"prompt", "answer"}], "group", "max_tokens", "lr", "iterations", "batch", "reward"};
"reward" is "" for the right number in the last box, or FILE.py:NAME of a function reward(prompt, response, answer).
RESULT.json gets the wall-clock and CPU seconds of each iteration, and of each rollout batch its tokens, its mean reward
and the share of groups whose rewards are all equal.
"""

import json
import re
import runpy
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
BOX = re.compile(r"\\boxed\{\s*([^}]*?)\s*\}")


def right(prompt, response, answer):
    """1 where the last box holds the reference answer."""
    boxes = BOX.findall(response)
    return float(bool(boxes) and boxes[-1] == answer)


def rewards_of(function):
    """The function over a batch, as TRL calls it."""

    def reward(prompts, completions, answer, **_):
        return [float(function(p, c, a)) for p, c, a in zip(prompts, completions, answer, strict=True)]

    return reward


class Clock(TrainerCallback):
    """Wall-clock and CPU time at the end of each optimiser step."""

    def __init__(self):
        self.wall, self.cpu = [], []

    def mark(self, *args, **kwargs):
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    on_train_begin = on_step_end = mark


def main():
    model_dir, prompts_file, result_file = sys.argv[1:4]
    job = json.loads(Path(prompts_file).read_text())
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = job["batch"] * job["group"]
    file, _, name = job["reward"].rpartition(":")
    function = runpy.run_path(file)[name] if file else right
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            num_generations=job["group"],
            max_completion_length=job["max_tokens"],
            max_steps=job["iterations"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            scale_rewards="group",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
            shuffle_dataset=False,
            seed=0,
        )
        clock = Clock()
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards_of(function),
            args=config,
            train_dataset=Dataset.from_list(job["prompts"]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    wall, cpu = ([b - a for a, b in pairwise(marks)] for marks in (clock.wall, clock.cpu))
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    lengths = [entry.get("completions/mean_length", 0.0) for entry in log]
    result = {
        "wall": wall,
        "cpu": cpu,
        "tokens": [n * rows for n in lengths],
        "rewards": [entry["reward"] for entry in log],
        "silent": [entry.get("frac_reward_zero_std", 0.0) for entry in log],
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
