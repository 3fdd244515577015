"""Runs engine.vllm with vLLM's V2 model runner, that of GPUs, on a CPU, and prints what it did as JSON.

Triton's interpreter runs the runner's kernels on CPU tensors. Both must be chosen before anything imports Triton, so
this is a program of its own. Prompts are prefilled in chunks of 64 tokens, as on GPUs in chunks of thousands.
"""

# ruff: noqa: E402
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends["cpu"] = backends["nvidia"]  # vLLM asks only whether there is one; nothing is compiled

import torch

ROOT = Path(__file__).resolve().parents[4]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from experts import make_model, wrong_rows
from vllm_pair import Pair, worker_of

from creditgraph.components.engine.vllm import in_process, options
from creditgraph.components.engine.vllm.receive import Receiver
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged

torch.set_num_threads(1)
CHUNK = 64


def use_v2() -> None:
    """Has `engine.vllm` start the V2 runner, with chunked prefill."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False  # the interpreter cannot run this one kernel: PyTorch's form instead
    made, variables = options.engine_options, options.engine_variables
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": CHUNK, "max_num_seqs": CHUNK}
    v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    in_process.engine_variables = lambda settings, model: variables(settings, model) | v2
    options.engine_variables = in_process.engine_variables
    in_process.engine_options = lambda settings, model: made(settings, model) | chunked


def requests(tokens, seed=0, **sampling):
    return Requests(tokens=tokens, seed=torch.arange(len(tokens)) + seed, sampling=Sampling(**sampling))


def prompts(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Jagged.from_rows(torch.randint(5, 40, (rows, length), generator=generator).tolist(), torch.int32)


def difference(pair, context, tokens, got, temperature=1.0):
    """Largest difference of log-probs and of entropies from transformers in float64."""
    exact = pair.exact(context, tokens, temperature)
    return [float((a - b).abs().max()) for a, b in zip((got.logprobs.values, got.entropies.values), exact, strict=True)]


def main() -> dict:
    use_v2()
    pair = Pair("tiny")
    runner = worker_of(pair).model_runner
    found = {"runner": [type(x).__qualname__ for x in (runner, runner.sampler, runner.prompt_logprobs_worker)]}
    found["module"] = [base.__module__ for base in type(runner).__mro__]
    pair.load(noise=0.01)
    some = prompts(8, 20)
    greedy = requests(some, temperature=0.0, max_tokens=8)
    found["greedy"] = [p.generate(greedy).tokens.to_lists() for p in (pair.policy, pair.reference)]
    found["exact"] = []
    for sampling in ({}, {"temperature": 0.7, "top_p": 0.9, "top_k": 8}):
        done = pair.policy.generate(requests(some, max_tokens=8, **sampling))
        temperature = sampling.get("temperature", 1.0)
        scored = pair.policy.score(some, done.tokens, temperature)
        found["exact"] += [difference(pair, some, done.tokens, x, temperature) for x in (done, scored)]
    first, again, other = (pair.policy.generate(requests(some, seed=s, max_tokens=8)) for s in (0, 0, 50))
    order = torch.tensor([6, 1])
    few = Requests(tokens=some.select(order), seed=order, sampling=Sampling(max_tokens=8))
    found["seeds"] = [x.tokens.to_lists() for x in (first, again, other)]
    found["two alone"] = [pair.policy.generate(few).tokens.to_lists(), [first.tokens.row(i).tolist() for i in order]]
    found |= scoring(pair)
    likely = int(first.tokens.values[0])
    runner.sampler.forbidden = torch.arange(pair.vllm.vocab_size) == likely
    same = Jagged.from_rows([some.row(0)] * 30, torch.int32)
    done = pair.policy.generate(requests(same, max_tokens=1))
    found["forbidden"] = [likely, done.tokens.values.tolist(), difference(pair, same, done.tokens, done)]
    pair.vllm.close()
    return found | {"experts": experts()}


def pack_again() -> None:
    """vLLM packs experts for a CPU when it loads the first weights, and leaves later ones as they are."""
    finish = Receiver.finish_weight_update

    def packed(receiver):
        finish(receiver)
        for module in receiver.model.modules():
            if kernel := getattr(getattr(module, "quant_method", None), "moe_kernel", None):
                kernel.fused_experts.process_weights_after_loading(module)

    Receiver.finish_weight_update = packed


def experts() -> list:
    """Of three batches of six rows, of new weights, the last from the cache: rows with wrong experts, with any."""
    pack_again()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(make_model(folder), return_routed_experts=True)
        pair.load(noise=0.05)
    pair.model.float()
    some, found = prompts(6, 40), []
    for sampling in ({"max_tokens": 8}, {"max_tokens": 40, "stop": ("3", "7")}, {"max_tokens": 8}):
        done = pair.policy.generate(requests(some, **sampling))
        found.append(wrong_rows(pair.model, some, done.tokens, done.routed_experts))
    pair.vllm.close()
    return found


def scoring(pair) -> dict:
    """Long rows, scored without and with their contexts in the cache; what came from the cache both times."""
    long = prompts(3, 150, seed=1)
    tails = prompts(3, 30, seed=2)  # the scored tokens pass through the model in two chunks
    found: dict = {"scores": [], "cached": []}
    for _ in range(2):
        pair.vllm.context.iteration += 1
        scored = pair.policy.score(long, tails, 0.8)
        found["scores"].append(difference(pair, long, tails, scored, 0.8))
        found["cached"].append(pair.vllm.context.metrics["cached_tokens"])
    done = pair.policy.generate(requests(long, max_tokens=12))
    scored = pair.policy.score(long, done.tokens)  # every position is in the cache
    found["scores"].append(difference(pair, long, done.tokens, scored))
    return found


if __name__ == "__main__":
    result = main()
    sys.stdout.write("\n" + json.dumps(result) + "\n")
