"""Calls the hooks of the slime adapter as slime does, with one rank.

    python slime_hooks.py RESULT.json

In PYTHONPATH are slime's sources, or tests/adapters/slime_stand_in.
"""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import slime.backends.megatron_utils.loss as slime_loss
import torch
from hooks import said
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.utils.types import Sample

from creditgraph.adapters import slime as adapter
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.pipeline.core.jagged import Jagged
from tests.adapters.tiny_server import tiny_server

REAL = hasattr(slime_loss, "compute_advantages_and_returns")
ARGS = {
    "custom_advantage_function_path": "creditgraph.adapters.slime.advantages",
    "reward_key": None,
    "use_rollout_logprobs": False,
    "kl_coef": 0.0,
    "use_opd": False,
    "normalize_advantages": False,
    "rollout_top_p": 1.0,
    "rollout_temperature": 1.0,
    "log_probs_chunk_size": -1,
    "allgather_cp": False,
    "advantage_estimator": "grpo",
    "loss_type": "policy_loss",
    "use_opsm": False,
    "get_mismatch_metrics": False,
    "use_tis": False,
    "use_kl_loss": False,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.2,
    "eps_clip_c": None,
    "calculate_per_token_loss": False,
    "context_parallel_size": 1,
}
# Of rollouts, greedy so that they can be compared.
SERVED = {
    "rollout_temperature": 0.0,
    "rollout_max_response_len": 12,
    "rollout_top_p": 0.5,
    "rollout_top_k": -1,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "sglang_server_concurrency": 512,
    "group_rm": False,
    "custom_rm_path": None,
    "rm_type": "math",
}


def samples(given):
    """Samples with two tokens of prompt."""
    rows = zip(given["responses"], given["masks"], given["rewards"], given["groups"], strict=True)
    return [
        Sample(
            group_index=group,
            index=i,
            tokens=[1, 2, *response],
            response_length=len(response),
            reward=reward,
            loss_mask=mask,
            remove_sample=i == given["removed"],
        )
        for i, (response, mask, reward, group) in enumerate(rows)
    ]


def siblings(given, share):
    """Two samples of each with two turns: the second one's prompt ends where its turn begins; rewards of their own."""
    out = []
    for sample in samples(given):
        mask = sample.loss_mask
        begin = mask and mask.index(0) + mask[mask.index(0) :].index(1)
        for b, e in [(0, begin), (begin, None)] if mask else [(0, None)]:
            own = {"index": len(out), "rollout_id": sample.index, "loss_mask": mask and mask[b:e]}
            own["tokens"] = sample.tokens[: None if e is None else e + 2]
            own["response_length"] = len(own["tokens"]) - b - 2
            own["reward"] = sample.reward if share or not b else sample.reward + 1
            out.append(replace(sample, **own))
    return out


def step(given, args, rows):
    """What a rank gets of the advantages, and losses with their gradients."""
    lengths = [len(r) for r in given["responses"]]
    totals = [n + 2 for n in lengths]
    tokens = [torch.tensor([1, 2, *r]) for r in given["responses"]]
    masks = [torch.tensor([0] * n if m is None else m) for n, m in zip(lengths, given["trained"], strict=True)]
    logits = torch.tensor(given["logits"]).unsqueeze(0)
    rank = {
        "rewards": rows,
        "total_lengths": totals,
        "response_lengths": lengths,
        "loss_masks": masks,
        "log_probs": [torch.tensor(row) for row in given["old"]],
        "kl": [torch.zeros(n) for n in lengths],
    }
    if REAL:
        slime_loss.compute_advantages_and_returns(args, rank)
    else:
        adapter.advantages(args, rank)
    batch = rank | {"unconcat_tokens": tokens}
    mean = get_sum_of_sample_mean(totals, lengths, masks, [m.sum().clamp(min=1) for m in masks], False)
    out = {"advantages": [row.tolist() for row in rank["advantages"]]}
    functions = {"ours": adapter.loss} | ({"theirs": slime_loss.policy_loss_function} if REAL else {})
    for name, function in functions.items():
        leaf = logits.clone().requires_grad_()
        total, logged = function(args, batch, leaf, mean)
        total.backward()
        out[name] = [total.item(), leaf.grad[0].tolist(), {key: float(value) for key, value in logged.items()}]
    return out


def rows_of(given):
    """Two samples of the embedded model's tokens."""
    return [
        Sample(
            group_index=4,
            index=i,
            prompt="q",
            tokens=[46, 3, *tokens],
            response_length=len(tokens),
            reward=reward,
            label="4",
        )
        for i, (tokens, reward) in enumerate(given["continued"])
    ]


def continued(given, *more):
    """Advantages of a graph that asks slime's router and its rewards, and those of the same by hand."""
    settings = ["model=tiny", "segmenter.use=segmenter.fixed", "segmenter.tokens=2", "value.continuations=1", *more]
    with tiny_server() as server:
        server.model = "default"
        host, port = server.url.removeprefix("http://").split(":")
        args = Namespace(**ARGS | SERVED, creditgraph="vineppo", creditgraph_overrides=settings)
        args.sglang_router_ip, args.sglang_router_port = host, port
        found = adapter.credit(args, rows_of(given))[1]
        again = adapter.credit(args, rows_of(given))[1]
        fixed = ["verifier.use=verifier.exact", "value.temperature=0", "value.max_tokens=12"]
        by_hand = CreditGraph("vineppo", *settings, *fixed, f"--endpoint={server.url}/v1", "--model=default")
        expected = by_hand(
            Rollouts(
                mask=Jagged.from_rows([[1] * len(row) for row, _ in given["continued"]]).to_padded(),
                rewards=torch.tensor([reward for _, reward in given["continued"]]),
                group=[0, 0],
                tokens=Jagged.from_rows([row for row, _ in given["continued"]]).to_padded(),
                prompts=[[46, 3]] * 2,
                answers=["4", "4"],
            )
        )
        sent = [body for _, body, _ in server.requests]
    rows = [[row.tolist() for row in rows] for rows in (found, again, expected)]
    return {"rows": rows, "stop": sent[0]["stop"], "top_p": sent[0]["top_p"]}


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    if REAL:
        from megatron.core import mpu

        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        mpu.initialize_model_parallel()
    out = {"real": REAL}
    for graph, overrides in {"grpo": None, "gigpo": "advantage.omega=0.5"}.items():
        args = Namespace(**ARGS, creditgraph=graph, creditgraph_overrides=overrides)
        raw, rows = adapter.credit(args, samples(given))
        out[graph] = {"raw": raw, "rows": [row.tolist() for row in rows], **step(given, args, rows)}
        for name, share in (("siblings", True), ("of their own", False)):
            raw, rows = adapter.credit(args, siblings(given, share))
            out[f"{graph} {name}"] = {"raw": raw, "rows": [row.tolist() for row in rows]}
    args = Namespace(**ARGS)
    out["no graph"] = said(lambda: adapter.credit(args, samples(given)))
    out["no credit"] = said(lambda: adapter.advantages(args, {"rewards": [0.5, 1.0]}))
    args = Namespace(**(ARGS | {"use_kl_loss": True, "context_parallel_size": 2}), creditgraph="grpo")
    out["kl"] = said(lambda: adapter.loss(args, {}, torch.zeros(1), None))
    args = Namespace(**(ARGS | {"advantage_estimator": "gspo"}), creditgraph="gigpo")
    out["gspo"] = said(lambda: adapter.credit(args, samples(given)))
    args = Namespace(**(ARGS | {"advantage_estimator": "gspo", "loss_type": "custom_loss"}), creditgraph="gigpo")
    out["gspo, our loss"] = [row.tolist() for row in adapter.credit(args, samples(given))[1]]
    out["continued"] = continued(given)
    out["own verifier"] = continued(given, "verifier.use=verifier.exact")["rows"]
    args = Namespace(**ARGS | SERVED | {"group_rm": True}, creditgraph="vineppo")
    args.creditgraph_overrides = ["model=tiny", "segmenter.use=segmenter.fixed"]
    args.sglang_router_ip = args.sglang_router_port = "1"
    out["group_rm"] = said(lambda: adapter.credit(args, rows_of(given)))
    lost = samples(given)
    lost[1].group_index = None
    out["no group"] = said(lambda: adapter.credit(args, lost))
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
