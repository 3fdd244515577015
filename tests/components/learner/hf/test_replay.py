"""Router replay: a learner computes with the experts that an engine chose, against a loop over tokens and layers."""

import pytest
import torch

from creditgraph.components.learner.hf.learner import HFLearner
from creditgraph.components.learner.hf.model import LearnerModel
from creditgraph.components.learner.lora import Lora
from creditgraph.components.learner.packing.pack import pack
from creditgraph.components.learner.step import RolloutTraining
from creditgraph.pipeline.core.component import Context, ModelSpec
from creditgraph.pipeline.core.errors import AlignmentError, ConfigError
from creditgraph.pipeline.core.jagged import Jagged
from creditgraph.pipeline.core.payloads import Credit, Trajectories

LAYERS, EXPERTS, TOP = 3, 6, 2
SMALL = {
    "vocab_size": 42,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "initializer_range": 0.3,
}
PROMPTS = Jagged.from_rows([[3, 4, 5], [3, 4, 5], [9]], torch.int32)
RESPONSES = Jagged.from_rows([[6, 7, 8, 9], [6, 7, 11], [12, 13, 14, 15, 16]], torch.int32)
LENGTHS = PROMPTS.lengths + RESPONSES.lengths - 1


def model_of(kind):
    import transformers

    torch.manual_seed(0)
    own = {"Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 12, "norm_topk_prob": True}}.get(kind, {})
    own = own or {"norm_topk_prob": False}
    if kind == "Qwen3Moe":
        own["mlp_only_layers"] = [1]
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**{**SMALL, **own})
    ).eval()


def chosen_experts(seed=0):
    """Per row [tokens, layers, TOP]: different experts for each token; those of a common prefix agree."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(n * LAYERS)]).view(
            n, LAYERS, TOP
        )
        for n in LENGTHS.tolist()
    ]
    rows[1][:5] = rows[0][:5]
    return rows


def loop(model, experts):
    """Log-probs of the response tokens, row by row; routers loop over tokens, or choose without `experts`."""
    out = []
    for row in range(len(PROMPTS)):
        tokens = [*PROMPTS.row(row).tolist(), *RESPONSES.row(row).tolist()]
        given = None if experts is None else experts[row]
        logits = with_routers(model, given, torch.tensor([tokens[:-1]]))
        first = len(PROMPTS.row(row)) - 1
        logprobs = logits.log_softmax(-1)
        out += [logprobs[place, tokens[place + 1]] for place in range(first, len(tokens) - 1)]
    return torch.stack(out)


def with_routers(model, given, ids):
    kept = {}
    for layer, block in enumerate(model.model.layers):
        gate = getattr(block.mlp, "gate", None)
        if given is None or gate is None or not hasattr(gate, "norm_topk_prob"):
            continue

        def route(hidden, gate=gate, layer=layer):
            weights, places = [], []
            for token, state in enumerate(hidden.reshape(-1, hidden.shape[-1])):
                odds = torch.exp(gate.weight @ state)
                own = [odds[int(e)] / odds.sum() for e in given[token, layer]]
                weights.append(torch.stack([x / sum(own) if gate.norm_topk_prob else x for x in own]))
                places.append(given[token, layer])
            return None, torch.stack(weights), torch.stack(places)

        kept[gate], gate.forward = gate.forward, route
    try:
        return model(input_ids=ids, use_cache=False).logits[0]
    finally:
        for gate, forward in kept.items():
            gate.forward = forward


def packed(experts, share):
    flat = None if experts is None else torch.cat([rows.flatten(1) for rows in experts]).to(torch.int16)
    return pack(PROMPTS, RESPONSES, torch.arange(3), share, experts=flat)


def gradients(model, values):
    model.zero_grad()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Olmoe"])
def test_given_experts_compute_what_the_loop_does(kind, share):
    model, experts = model_of(kind), chosen_experts()
    expected = loop(model, experts)
    assert float((expected - loop(model, None)).detach().abs().max()) > 0.01  # the routers would have chosen others
    slow = gradients(model, expected)
    learner = LearnerModel(model, recompute="full")
    batch = packed(experts, share)
    assert (batch.saved > 0) == share
    actual = learner.logprobs(batch, 1.0)[0].values
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    fast = gradients(model, actual)
    assert fast.keys() == slow.keys()
    for name, gradient in slow.items():
        torch.testing.assert_close(fast[name], gradient, atol=3e-5, rtol=1e-4, msg=name)


def test_where_no_experts_are_known_the_router_chooses():
    model = model_of("Qwen3Moe")
    learner = LearnerModel(model)
    own = learner.logprobs(packed(None, False), 1.0)[0].values
    experts = chosen_experts()
    experts[0][:], experts[1][:] = -1, -1
    mixed = learner.logprobs(packed(experts, False), 1.0)[0]
    torch.testing.assert_close(mixed.values[:7], own[:7], atol=1e-5, rtol=0)
    assert float((mixed.values[7:] - own[7:]).detach().abs().max()) > 0.01
    # The next pass, without any, has not kept them.
    assert torch.equal(learner.logprobs(packed(None, False), 1.0)[0].values, own)


def test_a_model_without_such_routers_is_refused():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    learner = LearnerModel(Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)).eval())
    with pytest.raises(ConfigError, match=r"got Qwen3ForCausalLM\. Set engine\.return_routed_experts=false"):
        learner.logprobs(packed(chosen_experts(), False), 1.0)


# --- in training ---


def rollouts(experts):
    """Trajectories of the rows above; `experts` are Jagged."""
    count, floats = len(PROMPTS), RESPONSES.with_values(torch.full((len(RESPONSES.values),), -3.0))
    return Trajectories(
        uid=torch.arange(count),
        prompt_uid=torch.tensor([0, 0, 1]),
        group=torch.tensor([0, 0, 1]),
        parent=torch.full((count,), -1),
        prompt_tokens=PROMPTS,
        response_tokens=RESPONSES,
        inherited=torch.zeros(count, dtype=torch.int64),
        engine_logprobs=floats,
        entropies=floats,
        thought_ends=Jagged.from_rows([[n] for n in RESPONSES.lengths.tolist()], torch.int32),
        policy_version=torch.zeros(count, dtype=torch.int64),
        finish_reason=["eos"] * count,
        text=[""] * count,
        routed_experts=experts,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    model_of("Qwen3Moe").save_pretrained(folder)
    return str(folder)


def trained(folder, experts, **settings):
    learner = HFLearner(HFLearner.Config(old_logprobs="recompute", micro_batch_tokens=9, **settings))
    learner.setup(Context(node="learner", iterations=2, model=ModelSpec(path=folder)))
    rows = rollouts(experts)
    ones = RESPONSES.with_values(torch.ones(len(RESPONSES.values)))
    credit = Credit(uid=rows.uid, advantage=ones, mask=ones.with_values(ones.values > 0))
    training = RolloutTraining(learner.config, learner.context, learner.backend, rows, credit, 0)
    return training.run(), learner


@pytest.mark.parametrize("rank", [0, 2])  # of adapters, which begin as nothing
def test_training_replays_the_experts_of_rows_that_have_them_and_counts_their_tokens(folder, rank):
    rows = [x.flatten() for x in chosen_experts()]
    some = Jagged.from_rows([rows[0], torch.zeros(0, dtype=torch.int64), rows[2]], torch.uint8)
    result = trained(folder, some, share_prefixes=False, lora=Lora(rank=rank))[0]
    expected = loop(model_of("Qwen3Moe"), chosen_experts()).detach()
    own = loop(model_of("Qwen3Moe"), None).detach()
    torch.testing.assert_close(result.logprobs.row(0), expected[:4], atol=2e-5, rtol=0)
    torch.testing.assert_close(result.logprobs.row(1), own[4:7], atol=2e-5, rtol=0)
    torch.testing.assert_close(result.logprobs.row(2), expected[7:], atol=2e-5, rtol=0)
    assert result.metrics["replayed_tokens"] == int(LENGTHS[0] + LENGTHS[2])
    assert result.metrics["forward_tokens"] == int(LENGTHS.sum())
    assert "replayed_tokens" not in trained(folder, None)[0].metrics


def test_the_reference_model_has_a_router_of_its_own(folder):
    from creditgraph.components.learner.objective import KL, ObjectiveSettings

    settings = {"objective": ObjectiveSettings(kl=KL(coefficient=0.1)), "share_prefixes": False}
    whole = Jagged.from_rows([x.flatten() for x in chosen_experts()], torch.uint8)
    learner = trained(folder, whole, **settings)[1]
    rows = rollouts(whole)
    none = RESPONSES.with_values(torch.zeros(len(RESPONSES.values)))
    credit = Credit(uid=rows.uid, advantage=none, mask=none.with_values(none.values == 0))
    training = RolloutTraining(learner.config, learner.context, learner.backend, rows, credit, 1)
    own = loop(model_of("Qwen3Moe"), None).detach()
    torch.testing.assert_close(training.score(reference=True).values, own, atol=2e-5, rtol=0)


def test_experts_of_other_tokens_are_refused(folder):
    wrong = Jagged.from_rows([x.flatten()[: 6 * 6 - 1] for x in chosen_experts()], torch.uint8)
    with pytest.raises(
        AlignmentError, match=r"expected \d+ experts for each token but the last, or none, got \d+ for a"
    ):
        trained(folder, wrong, share_prefixes=False)


def test_rows_with_other_tokens_lose_the_experts_and_batches_without_them_are_filled():
    whole = Jagged.from_rows([x.flatten() for x in chosen_experts()], torch.uint8)
    rows = rollouts(whole)
    assert rows.replace(group=rows.group + 1).routed_experts is whole
    assert rows.replace(response_tokens=rows.response_tokens).routed_experts is None
    assert rows.select(torch.tensor([2])).routed_experts.to_lists() == [whole.row(2).tolist()]
    both = Trajectories.concat([rollouts(None), rows])
    assert both.routed_experts.lengths.tolist() == [0, 0, 0, *whole.lengths.tolist()]
    assert both.routed_experts.row(5).tolist() == whole.row(2).tolist()


def test_rows_that_are_cut_keep_the_experts_of_what_is_left():
    whole = Jagged.from_rows([x.flatten() for x in chosen_experts()], torch.uint8)
    rows = rollouts(whole)
    length = torch.tensor([2, 0, 5])
    cut = rows.experts_of_first(length)
    assert cut.lengths.tolist() == [(3 + 1) * 6, 2 * 6, 5 * 6]
    assert [cut.row(i).tolist() for i in range(3)] == [whole.row(i)[: len(cut.row(i))].tolist() for i in range(3)]
    assert rollouts(None).experts_of_first(length) is None
