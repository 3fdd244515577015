"""engine.local in bfloat16: its log-probs are those of transformers' forward and of its own scoring, up to rounding."""

import pytest
import torch

from creditgraph.components.engine.local.lean import LeanDecoder
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Weights


@pytest.fixture
def policy_and_model(start):
    return start("qwen3", dtype="bfloat16")


def test_logprobs_are_those_of_the_forward_and_of_scoring(policy_and_model, prompts, ask):
    policy, model = policy_and_model
    assert isinstance(policy.engine.decoder, LeanDecoder)
    done = ask(policy, prompts, max_tokens=20)
    scored = policy.score(Jagged.from_rows(prompts, torch.int32), done.tokens)
    gaps = []
    for i, prompt in enumerate(prompts):
        tokens = done.tokens.row(i).long()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens.tolist()], device=model.device)).logits[0].cpu()
        whole = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
        gaps.append((done.logprobs.row(i) - whole.gather(1, tokens[:, None])[:, 0]).abs())
    assert float(torch.cat(gaps).mean()) < 0.05
    assert float((done.logprobs.values - scored.logprobs.values).abs().mean()) < 0.05


def test_greedy_rows_do_not_depend_on_their_neighbours(policy_and_model, prompts, ask):
    policy, _ = policy_and_model
    whole = ask(policy, prompts, temperature=0.0, max_tokens=8)
    alone = ask(policy, prompts[2:3], temperature=0.0, max_tokens=8)
    # Where two logits are equal in eight bits another batch may take the other; the first token never hangs on more.
    assert whole.tokens.row(2).tolist()[0] == alone.tokens.row(0).tolist()[0]


def test_branches_are_scored_as_whole_contexts(policy_and_model, prompts):
    policy, _ = policy_and_model
    trunk = Jagged.from_rows(prompts[2:4], torch.int32)
    row, at = torch.tensor([0, 0, 1]), torch.tensor([9, 20, 6])
    tokens = Jagged.from_rows([[5, 6], [7, 8, 9], [4]], torch.int32)
    context = Jagged.from_rows([prompts[2][:9], prompts[2][:20], prompts[3][:6]], torch.int32)
    branched = policy.score_branches(trunk, row, at, tokens)
    whole = policy.score(context, tokens)
    assert float((branched.logprobs.values - whole.logprobs.values).abs().mean()) < 0.05


def test_loaded_weights_are_the_published_bits(policy_and_model, prompts, ask):
    policy, model = policy_and_model
    before = ask(policy, prompts, max_tokens=6)
    other = {name: t * 0.5 for name, t in model.state_dict().items()}
    changed = ask(policy.engine.run(weights=Weights(version=4, tensors=other)).policy, prompts, max_tokens=6)
    assert changed.logprobs.values.tolist() != before.logprobs.values.tolist()
    again = policy.engine.run(weights=Weights(version=3, tensors=dict(model.state_dict()))).policy
    after = ask(again, prompts, max_tokens=6)
    assert after.tokens.to_lists() == before.tokens.to_lists()
    assert after.logprobs.values.tolist() == before.logprobs.values.tolist()
