"""Runs OpenRLHF's own step from rewards to advantages, and its loss, with credit graphs; in the environment .venv-verl.

python openrlhf_hooks.py BATCH.json RESULT.json
"""

import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import ray
import torch
from hooks import said, start_ray
from transformers import AutoModelForCausalLM, AutoTokenizer

from creditgraph.adapters.openrlhf import install

MAKER, LOSS = "openrlhf.trainer.ppo_utils.experience_maker", "openrlhf.models.loss"


class Group:
    """OpenRLHF's model on a CPU in the place of its group of two workers, each of which takes half of the batches."""

    _actor_handlers = (None, None)

    def __init__(self, path, temperature):
        from openrlhf.models.actor import Actor

        # By its name it would be loaded in 16 bits.
        self.actor = Actor(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), temperature=temperature)
        self.actor.packing_samples = False

    def async_run_method_batch(self, method_name, **batches):
        assert method_name == "forward"
        count = len(batches["sequences"])
        assert count % 2 == 0
        with torch.no_grad():
            found = [self.actor(**{name: rows[i] for name, rows in batches.items()}) for i in range(count)]
        return [ray.put(found[: count // 2]), ray.put(found[count // 2 :])]


def settings(given, estimator, kl, loss="ppo"):
    """The part of OpenRLHF's settings that this step reads."""
    return SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False),
            kl=SimpleNamespace(init_coef=kl),
        ),
        rollout=SimpleNamespace(
            temperature=given.get("temperature", 1.0), n_samples_per_prompt=2, micro_batch_size=3, max_new_tokens=8
        ),
        reward=SimpleNamespace(
            clip_range=(-10, 10),
            overlong_buffer_len=given["buffer"],
            overlong_penalty_factor=1.0,
            stop_properly_penalty_coef=None,
        ),
        train=SimpleNamespace(dynamic_batch_enable=False),
        actor=SimpleNamespace(policy_loss_type=loss),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )


def samples_of(given, critic):
    """Responses as OpenRLHF's generator hands them over: one at a time, a mask without the first token."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    out = []
    for i, (prompt, response) in enumerate(zip(given["prompts"], given["responses"], strict=True)):
        mask = torch.tensor([0] * (len(prompt) - 1) + given["masks"][i]).unsqueeze(0)
        ids = torch.tensor([prompt + response])

        def over_mask(values, mask=mask, response=response):
            row = torch.zeros(mask.shape)
            row[0, -len(response) :] = torch.tensor(values)
            return row

        out.append(
            Experience(
                sequences=ids,
                attention_mask=torch.ones_like(ids),
                action_mask=mask,
                kl=over_mask(given["kl"][i]),
                values=over_mask(given["values"][i]) if critic else None,
                action_log_probs=over_mask(given["logprobs"][i] if "logprobs" in given else [0.0] * len(response)),
                labels=[given["labels"][i] if "labels" in given else ""],
                images=given.get("images", []),
                rewards=torch.tensor([given["rewards"][i]]),
                response_length=torch.tensor([len(response)]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([ids.shape[1]]),
            )
        )
    return out


def advantages(given, estimator="group_norm", kl=0.0, loss="ppo"):
    """Advantages and returns of each response, and what is logged of it."""
    from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

    strategy = SimpleNamespace(args=settings(given, estimator, kl, loss))
    tokenizer, group = SimpleNamespace(pad_token_id=0), None
    if "model" in given:
        tokenizer, group = AutoTokenizer.from_pretrained(given["model"]), Group(given["model"], given["temperature"])
    maker = sys.modules[MAKER].RemoteExperienceMaker(group, *[None] * 3, FixedKLController(kl), strategy, tokenizer)
    rows = {}
    for part in maker.compute_advantages_and_returns(
        maker.split_rollout_samples(samples_of(given, estimator == "gae"))
    ):
        assert part.advantages.shape == part.action_mask.shape == part.returns.shape
        for place, i in enumerate(part.index):
            begin = len(given["prompts"][i]) - 1
            kept = slice(begin, begin + len(given["responses"][i]))
            if hasattr(maker, "credit"):
                outside = part.advantages[place].clone()
                outside[kept] = 0
                assert not outside.any(), "advantages of a prompt or of padding"
            logged = {name: value[place].item() for name, value in part.info.items()}
            rows[i] = [part.advantages[place, kept].tolist(), part.returns[place, kept].tolist(), logged]
    return [rows[i] for i in range(len(rows))]


def loss(given, **options):
    """Value and gradient of a loss that OpenRLHF makes, with the totals that it passes of two ranks."""
    mask = torch.tensor(given["padded_masks"])
    old = torch.tensor(given["old"])
    logprobs = (old + torch.tensor(given["moved"])).requires_grad_()
    made = sys.modules[LOSS].PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.2, **options)
    value, *rest = made(
        logprobs, old, torch.tensor(given["advantages"]), mask, old, dp_size=2, batch_num_tokens=31, global_batch_size=9
    )
    value.backward()
    return [value.item(), logprobs.grad.tolist(), [None if x is None else x.item() for x in rest]]


def in_a_worker(given):
    """What a worker of OpenRLHF has, which imports its modules by itself."""
    for name in (MAKER, "openrlhf.trainer.ray.ppo_actor"):
        importlib.import_module(name)
    found = [rows for rows, *_ in advantages(given)]
    return found, type(sys.modules["openrlhf.trainer.ray.ppo_actor"].PolicyLoss(0.2, 0.2)).__name__


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    own = {name: dict(vars(importlib.import_module(name))) for name in (MAKER, LOSS)}
    out = {"own": advantages(given), "own gae": advantages(given, "gae", kl=0.1), "no graph": said(install)}
    out |= {f"own {unit}": loss(given, token_level_loss=unit == "tokens") for unit in ("tokens", "rows")}
    for graph in ("grpo", "gigpo advantage.omega=0.5", "mt_grpo", "ppo", "p_trace", "s_trace", "srpo"):
        sys.modules[MAKER].RemoteExperienceMaker = own[MAKER]["RemoteExperienceMaker"]
        sys.modules[LOSS].PolicyLoss = own[LOSS]["PolicyLoss"]
        os.environ |= {"CREDITGRAPH_GRAPH": graph, "CREDITGRAPH_LOSS": "true"}
        install()
        out[graph] = said(lambda: advantages(given))
        out[f"{graph} with a critic"] = said(lambda: advantages(given, "gae", kl=0.1))
        out[f"{graph} with gspo"] = said(lambda: advantages(given, loss="gspo"))
        for unit in ("tokens", "rows"):
            out[f"loss of {graph} {unit}"] = said(lambda unit=unit: loss(given, token_level_loss=unit == "tokens"))
    out["dual clip"] = said(lambda: loss(given, dual_clip=3.0))
    for graph, settings in given["ask"].items():
        sys.modules[MAKER].RemoteExperienceMaker = own[MAKER]["RemoteExperienceMaker"]
        os.environ |= {"CREDITGRAPH_GRAPH": " ".join([graph, *settings]), "CREDITGRAPH_LOSS": "false"}
        install()
        out[f"{graph} asks"] = said(lambda: advantages(given["asked"]))
    out["images"] = said(lambda: advantages(given["asked"] | {"images": ["a.png"]}))
    out["colder"] = said(lambda: advantages(given["asked"] | {"temperature": 0.5}))
    os.environ["CREDITGRAPH_LOSS"] = "yes"
    out["neither true nor false"] = said(install)
    # What `ray job submit --runtime-env` hands on.
    variables = {"CREDITGRAPH_GRAPH": "gigpo advantage.omega=0.5", "CREDITGRAPH_LOSS": "true"}
    environment = {"worker_process_setup_hook": "creditgraph.adapters.openrlhf.install", "env_vars": variables}
    os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": environment})
    start_ray(runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}})  # as OpenRLHF starts it
    os.environ |= {
        "CREDITGRAPH_GRAPH": " ".join(["recipe=toy_rredcot", *given["own"]["settings"]]),
        "CREDITGRAPH_LOSS": "false",
    }
    sys.modules[MAKER].RemoteExperienceMaker = own[MAKER]["RemoteExperienceMaker"]
    install()
    out["by its workers"] = said(
        lambda: advantages(given["asked"] | {"model": given["own"]["model"], "temperature": 0.7})
    )
    out["in a worker"] = ray.get(ray.remote(in_a_worker).remote(given))
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
