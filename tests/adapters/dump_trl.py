"""Trains the embedded model with TRL, which writes its tables of completions; runs in the environment .venv-trl.

    python dump_trl.py MODEL_DIR FOLDER [STEPS]

FOLDER/texts/completions has them as TRL writes them, FOLDER/ids/completions with the token ids that the reward function
logs, as docs/trainers.md shows; FOLDER/seen.json the rewards and advantages of each step, from the trainer itself.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from creditgraph.components.tasks.chains import Chains, Difficulty
from creditgraph.components.text.templates import extract_answer

torch.set_num_threads(1)
TASK = Chains()
PROBLEMS = [TASK.generate(0, i, Difficulty(steps=(4, 5), hard_facts=(1, 1))) for i in range(16)]


def correct(completions, answer, log_extra, **_):
    log_extra("answer", answer)
    return [float(extract_answer(text) == f"{right}") for text, right in zip(completions, answer, strict=True)]


def correct_with_ids(completions, answer, completion_ids, log_extra, **_):
    log_extra("completion_ids", completion_ids)
    return correct(completions, answer, log_extra)


def train(model_dir, folder, reward, steps):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    seen = []

    class Watched(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            seen.append(
                {
                    "advantages": output["advantages"].tolist(),
                    "ids": [
                        ids[mask.bool()].tolist()
                        for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
                    ],
                }
            )
            return output

    rows = [{"prompt": TASK.solve_prompt(p["question"]), "answer": TASK.answer(p)} for p in PROBLEMS]
    Watched(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=64,
            max_steps=steps,
            learning_rate=1e-5,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            log_completions=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=3,
        ),
    ).train()
    return seen


def main():
    model_dir, folder, *steps = sys.argv[1:]
    folder = Path(folder)
    jobs = {"texts": correct, "ids": correct_with_ids}
    found = {n: train(model_dir, folder / n, reward, int(steps[0]) if steps else 2) for n, reward in jobs.items()}
    (folder / "seen.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
