"""Trains the embedded model with TRL and a credit graph; runs in the environment .venv-trl.

    python trl_train.py MODEL_DIR JOBS.json RESULTS.json

JOBS.json holds {name: {"graph", "overrides", "objective", "turns", "trl"}}: "turns" plays two turns with an observation
between them, "trl" are fields of GRPOConfig, and without a graph TRL trains alone. RESULTS.json gets for each the loss
of each step, the weights' sums, metrics, and the rollouts of the last batch with their advantages.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.trl import CreditGRPOTrainer

torch.set_num_threads(1)
PROMPTS = ["<solve> 3 + 4", "<solve> 5 - 2", "<solve> 2 * 3", "<solve> 7 + 1"]
OBSERVATIONS = [[5, 6], [7]]


def reward(prompts, completion_ids, **_):
    return [sum(t % 3 == 0 for t in ids) / len(ids) for ids in completion_ids]


def turn_rewards(prompts, completion_ids, **_):
    return [[(ids[0] % 5) / 4, (ids[-1] % 7) / 6] for ids in completion_ids]


def two_turns(tokenizer):
    """A rollout function of TRL: four tokens, an observation that depends on the first, four tokens."""

    def sample(prompts, trainer):
        out = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for prompt in prompts:
            ids = tokenizer(prompt)["input_ids"]
            row, mask = list(ids), []
            for turn in range(2):
                with torch.no_grad():
                    new = trainer.model.generate(
                        torch.tensor([row]), max_new_tokens=4, min_new_tokens=4, do_sample=True, top_k=0, pad_token_id=0
                    )[0, len(row) :].tolist()
                seen = OBSERVATIONS[new[0] % 2] if turn == 0 else []
                row += new + seen
                mask += [1] * len(new) + [0] * len(seen)
            out["prompt_ids"].append(ids)
            out["completion_ids"].append(row[len(ids) :])
            out["logprobs"].append([0.0] * len(mask))
            out["env_mask"].append(mask)
        return out

    return sample


def train(model_dir, job):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    seen = {}
    further = {}
    cls = GRPOTrainer
    if job["graph"]:
        cls = CreditGRPOTrainer
        further = {"credit": CreditGraph(job["graph"], *job["overrides"]), "objective": job["objective"]}
        if job["turns"]:
            further["turn_rewards"] = turn_rewards

    class Watched(cls):
        def _rollouts(self, output, size):
            rollouts = super()._rollouts(output, size)
            seen["mask"] = rollouts.trained.int().tolist()
            seen["tokens"] = rollouts.tokens.tolist()
            seen["rewards"] = rollouts.rewards.tolist()
            seen["turn_rewards"] = rollouts.turn_rewards
            seen["group"] = rollouts.group.tolist()
            return rollouts

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen["advantages"] = output["advantages"].tolist()
            return output

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=12,
            max_steps=4,
            num_iterations=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=3,
            **job["trl"],
        )
        trainer = Watched(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": p, "answer": ""} for p in PROMPTS]),
            rollout_func=two_turns(tokenizer) if job["turns"] else None,
            **further,
        )
        trainer.train()
    history = trainer.state.log_history
    return {
        "losses": [row["loss"] for row in history if "loss" in row],
        "weights": [float(p.double().sum()) for p in model.parameters()],
        "metrics": sorted({name for row in history for name in row if name.startswith("credit/")}),
        "logged": list(trainer._logs["advantages"]),
        "seen": seen,
    }


def main():
    model_dir, jobs, results = sys.argv[1:4]
    jobs = json.loads(Path(jobs).read_text())
    found = {name: train(model_dir, job) for name, job in jobs.items()}
    rank = os.environ.get("RANK")
    Path(results if rank is None else f"{results}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
