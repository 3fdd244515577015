"""Trains the embedded model with TRL and a credit graph; runs in the environments .venv-trl and .venv-unsloth.

    python trl_train.py MODEL_DIR JOBS.json RESULTS.json

JOBS.json holds {name: {"graph", "overrides", "objective", "turns", "trl", "experts", "ratios", "vllm", "chat", "named",
"branches"}}: "turns" plays two turns with an observation between them, "trl" are fields of GRPOConfig, "experts"
trains a mixture of experts, "ratios" gives a correction of vLLM's log-probs, "vllm" has a stand-in for it, "chat" has
conversations as prompts, "named" has TRL load the model, "branches" scores some, and without a graph TRL trains alone.
Continuations of VinePPO are greedy. RESULTS.json gets for each the trainer, the loss of each step, the weights' sums,
metrics, and the rollouts of the last batch with their advantages; or the error.
"""

import functools
import gc
import json
import os
import sys
import tempfile
from pathlib import Path

try:
    import unsloth.models  # as on a GPU, this puts its trainer in the place of TRL's
except ImportError:
    unsloth = None

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig
from trl import GRPOConfig, GRPOTrainer

from creditgraph.adapters import trl_model
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.trl import CreditGRPOTrainer
from creditgraph.components.rollouts import requests
from creditgraph.pipeline.core.errors import ConfigError
from creditgraph.pipeline.core.handles import Policy
from creditgraph.pipeline.core.jagged import Jagged

# accelerate collects garbage after each training, which over all that was imported takes a second.
gc.freeze()
torch.set_num_threads(1)
# The embedded model writes neither lines nor sentences.
requests.ends_of_thoughts = lambda pieces, mode: [min(i + 3, len(pieces)) for i in range(0, len(pieces), 3)]
PROMPTS = ["<solve> 3 + 4", "<solve> 5 - 2 + 1", "<solve> 2 * 3", "<solve> 7 + 1 - 2 - 3"]
DEFAULTS = {"beta": 0.0, "learning_rate": 1e-2, "num_generations": 4, "max_completion_length": 12}
OBSERVATIONS = [[5, 6], [7]]


def reward(prompts, completion_ids, **_):
    return [sum(t % 3 == 0 for t in ids) / len(ids) for ids in completion_ids]


def chat_reward(prompts, completions, log_extra, log_metric, **_):
    assert [message["role"] for message in prompts[0]] == ["user"]
    assert [message["role"] for message in completions[0]] == ["assistant"]
    log_extra("role", ["assistant"] * len(completions))
    log_metric("responses", len(completions))
    return [len(messages[0]["content"]) % 7 / 6 for messages in completions]


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


def watched(credit):
    """A dictionary that gets what the graph's next rows inherited, and their groups."""
    found, make = {}, type(credit).rows

    def rows(prompts):
        trajectories, advantages = make(credit, prompts)
        found["inherited"], found["group"] = trajectories.inherited.tolist(), trajectories.group.tolist()
        found["prompt"], found["tokens"] = trajectories.prompt_uid.tolist(), trajectories.response_tokens.to_lists()
        return trajectories, advantages

    credit.rows = rows
    return found


class StandIn:
    """Samples in the place of vLLM, with the model that is trained, and says log-probs as vLLM does."""

    def __init__(self, trainer):
        self.trainer, self.temperature = trainer, trainer.temperature
        self.max_completion_length = trainer.max_completion_length

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        trainer, settings = self.trainer, self.trainer.generation_config
        trainer.use_vllm = False
        settings.temperature, settings.max_new_tokens = self.temperature, self.max_completion_length
        ids, _ = GRPOTrainer._generate_single_turn(trainer, prompts, None, {}, num_generations)
        scores = trainer._policy._score(list(zip(prompts, ids, strict=True)))
        trainer.use_vllm = True
        return prompts, ids, [[[logprob] for logprob, _ in row] for row in scores], None


def load(model_dir, experts):
    if unsloth is not None:
        return unsloth.FastLanguageModel.from_pretrained(
            model_dir, max_seq_length=64, dtype=torch.float32, load_in_4bit=False, full_finetuning=True
        )
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if not experts:
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), tokenizer
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def train(model_dir, job):
    torch.manual_seed(0)
    model, tokenizer = load(model_dir, job["experts"])
    if job["chat"]:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS] if job["chat"] else PROMPTS
    seen = {}
    further = {}
    cls = GRPOTrainer
    if job["graph"]:
        cls = CreditGRPOTrainer
        credit = CreditGraph(job["graph"], *job["overrides"]) if job["overrides"] else job["graph"]
        further = {"credit": credit, "objective": job["objective"]}
        if job["turns"]:
            further["turn_rewards"] = turn_rewards

    class Watched(cls):
        def _generate(self, prompts):
            if getattr(self, "_rows", None) is not None and self.model.training:
                seen["rows"] = watched(self.credit)
            return super()._generate(prompts)

        def _rollouts(self, output, size):
            rollouts = super()._rollouts(output, size)
            seen["mask"] = rollouts.trained.int().tolist()
            seen["tokens"] = rollouts.tokens.tolist()
            seen["rewards"] = rollouts.rewards.tolist()
            seen["turn_rewards"] = rollouts.turn_rewards
            seen["group"] = rollouts.group.tolist()
            seen.update({name: getattr(rollouts, name) for name in ("prompts", "texts", "answers")})
            return rollouts

        @functools.wraps(cls._generate_single_turn)
        def _generate_single_turn(self, prompt_ids, images, fields, *num_generations):
            sampled = self.generation_config.do_sample
            self.generation_config.do_sample = num_generations != (1,) or job["graph"] != "vineppo"
            found = super()._generate_single_turn(prompt_ids, images, fields, *num_generations)
            self.generation_config.do_sample = sampled
            return found

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            if self.model.training:
                seen["advantages"] = output["advantages"].tolist()
            if job["ratios"]:
                output["importance_sampling_ratio"] = 0.5 + output["completion_ids"] % 7 / 6
            return output

        def _compute_loss(self, model, inputs):
            # The condition of TRL's loss for the ratios.
            self.use_vllm, self.vllm_importance_sampling_correction = job["ratios"] or job["vllm"], True
            loss = super()._compute_loss(model, inputs)
            self.use_vllm = job["vllm"]
            return loss

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=4,
            num_iterations=2,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=3,
            **(DEFAULTS | job["trl"]),
        )
        trainer = Watched(
            model=model_dir if job["named"] else model,
            processing_class=tokenizer,
            reward_funcs=chat_reward if job["chat"] else reward,
            args=config,
            train_dataset=(
                data := Dataset.from_list(
                    [
                        {
                            "prompt": p,
                            "answer": str(i + 2),
                            "question": text.removeprefix("<solve> "),
                            "template": "chains",
                        }
                        for i, (p, text) in enumerate(zip(prompts, PROMPTS, strict=True))
                    ]
                )
            ),
            eval_dataset=data,
            rollout_func=two_turns(tokenizer) if job["turns"] else None,
            **further,
        )
        if job["vllm"]:
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = StandIn(trainer)
        trainer.train()
    history = trainer.state.log_history
    return {
        "trainer": GRPOTrainer.__name__,
        "losses": [row["loss"] for row in history if "loss" in row],
        "weights": [float(p.double().sum()) for p in trainer.model.parameters()],
        "branches": branches(trainer._policy) if job["branches"] else None,
        "masks": job["graph"] and trainer._policy._takes_masks,
        "evaluated": sorted(
            {name for row in history for name in row if name.startswith(("eval_reward", "eval_credit"))}
        ),
        "metrics": sorted({name for row in history for name in row if name.startswith("credit/")}),
        "logged": list(trainer._logs["advantages"]),
        "extra": {name: len(values) for name, values in trainer._logs.get("extra", {}).items()},
        "counted": [row["responses"] for row in history if "responses" in row],
        "seen": seen,
    }


def branches(policy):
    """Log-probs and entropies of branches of three trunks, packed and one by one."""
    trunk = Jagged.from_rows([[3 + (7 * i + j) % 40 for j in range(n)] for i, n in enumerate((9, 5, 7))], torch.int32)
    tokens = Jagged.from_rows(
        [[4 + (5 * i + j) % 40 for j in range(n)] for i, n in enumerate((3, 0, 2, 4, 1, 5))], torch.int32
    )
    given = (trunk, torch.tensor([2, 0, 0, 1, 0, 2]), torch.tensor([7, 1, 9, 5, 4, 3]), tokens)
    trl_model.BRANCHES = 6  # so that a trunk runs more than once
    scores = policy._packed(*given, 1.0), Policy.score_branches(policy, *given)
    return [[x.values.tolist() for x in (one.logprobs, one.entropies)] for one in scores]


def trained_or_refused(model_dir, job):
    try:
        return train(model_dir, job)
    except ConfigError as error:
        return {"error": str(error)}


def main():
    model_dir, jobs, results = sys.argv[1:4]
    jobs = json.loads(Path(jobs).read_text())
    found = {name: trained_or_refused(model_dir, job) for name, job in jobs.items()}
    rank = os.environ.get("RANK")
    Path(results if rank is None else f"{results}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
